"""The read models from nothing: the same fold over the whole record, into emptied tables, in one transaction.

Where days of block events have gone by policy, no fold can tell what workers held, until the first snapshot behind them says
it. So the tables come out as they were, byte for byte, once the record was sealed after the newest day that has gone; what
`unfolded` says of rows that are gone stays as it is.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from services.ledger import database, partial, reading, seals, snapshots
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import Arrival, record
from services.ledger.tables import READ_MODEL_KEYS, TableWriter
from shared.contracts.events import BlockDayDropped


class LedgerActive(Exception):
    """A ledger copies into this database: stop it first."""


async def rebuild(database_url: str, progress: Callable[[int], None] | None = None) -> int:
    """Fold every recorded event; returns how many. `progress` is told how many so far.

    Readers see the old rows until the end. Errors: LedgerActive; BadState; those of `database.connect`.
    """
    connection = await database.connect(database_url)
    try:
        if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", database.ACTIVE_LOCK):
            raise LedgerActive("a ledger copies into this database: stop it, rebuild, start it again")
        writer, events = TableWriter(connection), 0
        async with connection.transaction():
            gone = await seals.gone_days(connection)
            await _empty(connection, gone)
            models = await _begun(connection, writer)
            known = deque(await snapshots.behind_drops(connection, gone))
            for log in await reading.logs(connection):
                async for page in reading.pages(connection, log):
                    for row in page:
                        place = Place(log.number, row.stream_seq)
                        if known and known[0] < place:
                            await snapshots.regain(connection, models, known.popleft())
                        if row.table != "repeats":
                            evolve(models, str(log.log), place, record(Arrival(row.stream_seq, row.raw)))
                    await writer.write_read_models(models)
                    events += len(page)
                    if progress is not None:
                        progress(events)
            for place in known:
                await snapshots.regain(connection, models, place)
            await writer.write_read_models(models)
        return events
    finally:
        await connection.close()


async def _begun(connection: Any, writer: TableWriter) -> ReadModels:
    """Nothing, or what a record that is a part of another one begins with."""
    begun = await partial.beginning(connection)
    if begun is None:
        return ReadModels()
    models = partial.thawed(begun.models)
    await partial.write(connection, writer, models, begun.place)
    return models


async def _empty(connection: Any, gone: Iterable[BlockDayDropped]) -> None:
    for table in READ_MODEL_KEYS:
        if table != "unfolded":
            await connection.execute(f"DELETE FROM {table}")  # noqa: S608
    runs = [run for day in gone for run in day.runs]
    await connection.execute(
        _FORGET_FAULTS,
        [UUID(run.log) for run in runs],
        [run.from_seq for run in runs],
        [run.to_seq for run in runs],
    )


_FORGET_FAULTS = """
DELETE FROM unfolded u USING logs l WHERE l.number = u.log AND NOT EXISTS (
    SELECT FROM unnest($1::uuid[], $2::bigint[], $3::bigint[]) AS run (log, from_seq, to_seq)
    WHERE run.log = l.log AND u.stream_seq BETWEEN run.from_seq AND run.to_seq
)
"""
