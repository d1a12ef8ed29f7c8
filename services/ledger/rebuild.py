"""The read models from nothing: the same fold over the whole record, into emptied tables, in one transaction."""

from collections.abc import Callable

from services.ledger import database, reading
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import Arrival, record
from services.ledger.tables import READ_MODEL_KEYS, TableWriter


class LedgerActive(Exception):
    """A ledger copies into this database: stop it first."""


async def rebuild(database_url: str, progress: Callable[[int], None] | None = None) -> int:
    """Fold every recorded event; returns how many. `progress` is told how many so far.

    Readers see the old rows until the end. Errors: LedgerActive; those of `database.connect`.
    """
    connection = await database.connect(database_url)
    try:
        if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", database.ACTIVE_LOCK):
            raise LedgerActive("a ledger copies into this database: stop it, rebuild, start it again")
        models, writer, events = ReadModels(), TableWriter(connection), 0
        async with connection.transaction():
            for table in READ_MODEL_KEYS:
                await connection.execute(f"DELETE FROM {table}")  # noqa: S608
            for log in await reading.logs(connection):
                async for page in reading.pages(connection, log):
                    for row in page:
                        if row.table != "repeats":
                            place = Place(log.number, row.stream_seq)
                            evolve(models, str(log.log), place, record(Arrival(row.stream_seq, row.raw)))
                    await writer.write_read_models(models)
                    events += len(page)
                    if progress is not None:
                        progress(events)
        return events
    finally:
        await connection.close()
