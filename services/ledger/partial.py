"""A record that is a part of another one: it begins where that one was sealed, with the state that was kept there.

What is before the beginning is not there, so the state stands for it: the read models, which a seal's snapshot vouches for as
far as they hold what workers are and have, and what the deciders had folded (`replay/freezing.py`), which is opaque here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg
import orjson

from services.ledger.loading import load
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES, Arrival, LogTable, record
from services.ledger.seals import STATEMENT_LIMIT_S, gone_days
from services.ledger.tables import TableWriter
from shared.contracts.events import LogSealed
from shared.runtime.states import freeze, thaw

PACKAGES = ("shared", "services.ledger")
"""Where the classes of the read models are."""

SAME = ("nodes", "workers", "caches", "cached_runs", "sources")
"""Tables of which a snapshot has every row."""


class Beginning(NamedTuple):
    """Where a part begins, and what stands for everything before: read models and deciders, frozen."""

    place: Place
    models: bytes
    deciders: bytes


async def beginning(connection: Any) -> Beginning | None:
    """That of the whole record; None if it has all of its events."""
    row = await connection.fetchrow(
        "SELECT b.log, b.stream_seq, b.models, s.content FROM beginnings b JOIN states s USING (log, stream_seq)"
    )
    return Beginning(Place(row["log"], row["stream_seq"]), row["models"], row["content"]) if row else None


async def models_at(connection: Any, place: Place) -> ReadModels:
    """The read models at a snapshot, or where the record begins. Errors: BadState."""
    begun = await beginning(connection)
    if begun is None or begun.place != place:
        return await load(connection, place)
    return thawed(begun.models)


def thawed(models: bytes) -> ReadModels:
    """Errors: BadState."""
    found = thaw(models, PACKAGES)
    assert isinstance(found, ReadModels), "the read models of a state are read models"
    return found


async def frozen_at(connection: Any, place: Place) -> bytes:
    """The read models at a snapshot, or where the record begins. Errors: BadState."""
    models = await models_at(connection, place)
    models.take()
    models.holders.watcher = None
    return freeze(models)


# --- seals


async def sealed_places(connection: Any, number: int, log: Any) -> dict[Place, tuple[int, LogSealed]]:
    """Snapshots of the log that a seal vouches for, with that seal and where it lies, oldest first. Left out are those around
    which block events have gone: what follows them could not be folded."""
    kept = await connection.fetch("SELECT stream_seq FROM snapshots WHERE log = $1 ORDER BY 1", number)
    rows = await connection.fetch(
        "SELECT stream_seq, raw FROM decisions WHERE log = $1 AND type = $2 ORDER BY 1", log, LogSealed.TYPE
    )
    said = [(row["stream_seq"], record(Arrival(row["stream_seq"], row["raw"])).event) for row in rows]
    seals = {e.data.to_seq: (seq, e.data) for seq, e in said if e is not None and isinstance(e.data, LogSealed)}
    gone = [run for day in await gone_days(connection) for run in day.runs if run.log == str(log)]
    places = [
        Place(number, row["stream_seq"])
        for row in kept
        if not any(run.from_seq <= row["stream_seq"] < run.to_seq for run in gone)
    ]
    return {at: seals[at.seq] for at in places if at.seq in seals and seals[at.seq][1].snapshot is not None}


async def heads_at(connection: Any, place: Place) -> dict[LogTable, bytes]:
    """Where the chains were behind a place: at the last row before, or where a day that went by policy has left them."""
    heads = {}
    for table in LOG_TABLES:
        row = await connection.fetchrow(_LAST_ROW[table], *place, timeout=STATEMENT_LIMIT_S)
        heads[table] = (Place(row["number"], row["stream_seq"]), row["chain"]) if row else (Place(0, 0), CHAIN_ORIGIN)
    for row in await connection.fetch("SELECT * FROM beginnings"):
        begun = Place(row["log"], row["stream_seq"])
        heads |= {table: (begun, row[f"{table}_head"]) for table in LOG_TABLES if heads[table][0] < begun}
    numbers = {str(row["log"]): row["number"] for row in await connection.fetch("SELECT log, number FROM logs")}
    for run in (run for day in await gone_days(connection) for run in day.runs if run.log in numbers):
        end = Place(numbers[run.log], run.to_seq)
        if heads["block_events"][0] < end <= place:
            heads["block_events"] = end, run.chain
    return {table: chain for table, (_, chain) in heads.items()}


_LAST_ROW = {
    table: f"SELECT l.number, t.stream_seq, t.chain FROM {table} t JOIN logs l USING (log) "  # noqa: S608
    "WHERE (l.number, t.stream_seq) <= ($1, $2) ORDER BY l.number DESC, t.stream_seq DESC LIMIT 1"
    for table in LOG_TABLES
}


# --- taking one in


async def keep(
    connection: Any, begun: Beginning, heads: dict[LogTable, bytes], rows: Sequence[tuple[str, str]]
) -> None:
    """Store where a part begins and the snapshot there, within the caller's transaction. Errors: ValueError names the model of
    which there is no such row."""
    place = begun.place
    await connection.execute(
        "INSERT INTO beginnings (log, stream_seq, decisions_head, block_events_head, repeats_head, models) "
        "VALUES ($1, $2, $3, $4, $5, $6)",
        *(*place, *(heads[table] for table in LOG_TABLES), begun.models),
    )
    await connection.execute("INSERT INTO states VALUES ($1, $2, $3)", *place, begun.deciders)
    # No sender's clock is known: nothing is looked up by it before the beginning.
    await connection.execute("INSERT INTO snapshots VALUES ($1, $2, 0)", *place)
    try:
        await connection.executemany(
            "INSERT INTO snapshot_rows VALUES ($1, $2, $3, $4::text::jsonb)", [(*place, *row) for row in rows]
        )
    except asyncpg.DataError as error:
        raise ValueError(f"a row of the snapshot is no JSON: {error}") from error


async def write(connection: Any, writer: TableWriter, models: ReadModels, place: Place) -> None:
    """The rows of the read models at the beginning: those of the fold, and of the snapshot what no fold holds."""
    changes = models.changes
    changes.nodes |= models.pool.nodes.keys()
    changes.caches |= models.holders.workers.keys()
    changes.sources |= models.sources.keys()
    for worker, runs in models.runs.items():
        changes.runs.setdefault(worker, set()).update(runs.runs)
    await writer.write_read_models(models)
    for table, view in (("requests", "open_requests"), ("parameters", "newest_parameters")):
        await connection.execute(
            f"INSERT INTO {table} SELECT (jsonb_populate_record(NULL::{table}, value)).* FROM snapshot_rows "  # noqa: S608
            f"WHERE log = $1 AND stream_seq = $2 AND model = '{view}'",
            *place,
        )


async def differing(connection: Any, models: ReadModels, place: Place) -> str | None:
    """The first part in which the read models, as they were written, are not what the sealed snapshot says; None if none is."""
    for table in SAME:
        if await connection.fetchval(_DIFFERS.format(table=table), *place, timeout=STATEMENT_LIMIT_S):
            return table
    rows = await connection.fetch(
        "SELECT model, value::text FROM snapshot_rows WHERE log = $1 AND stream_seq = $2 AND model = ANY($3::text[])",
        *(*place, ["open_requests", "newest_parameters"]),
    )
    told = [(row["model"], orjson.loads(row["value"])) for row in rows]
    if {value["request"] for model, value in told if model == "open_requests"} != models.holders.open.keys():
        return "open_requests"
    values = [value["value"] for model, value in told if model == "newest_parameters"]
    return "parameters" if values and values != [models.parameters.model_dump(mode="json")] else None


_DIFFERS = """
WITH here AS (SELECT to_jsonb(t) AS value FROM {table} t),
     there AS (SELECT value FROM snapshot_rows WHERE log = $1 AND stream_seq = $2 AND model = '{table}')
SELECT EXISTS (SELECT value FROM here EXCEPT SELECT value FROM there)
    OR EXISTS (SELECT value FROM there EXCEPT SELECT value FROM here)
"""
