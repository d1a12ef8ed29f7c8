"""What the pool was at places of the record, kept so that the past need not be folded from its beginning.

A snapshot is a copy of the read-model tables that hold a state, made where the record is sealed; `loading.py` reads one as it
reads the tables. It also outlives the block events before it: once a day of those has gone by policy, no fold can know what
workers held then, and what they hold since is known from the first snapshot behind that day.
"""

from collections.abc import AsyncIterator, Iterable
from hashlib import blake2b
from typing import Any

from services.ledger.loading import load_caches, sources
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels
from services.ledger.seals import STATEMENT_LIMIT_S, Extent
from shared.contracts.events import BlockDayDropped
from shared.model.prefix_index import PrefixIndex

MODELS = (
    "nodes", "workers", "caches", "cached_runs", "sources", "open_requests", "open_reconciliations", "newest_parameters"
)  # fmt: skip

NEWEST_KEPT = 24
"""A day's, if the record is sealed every hour."""

DAYS_KEPT = 400
"""Of older days the first one is kept: each has a few megabytes for a hundred thousand cached blocks."""

# What lies in the record was sent before now: a sender's clock that is ahead of the ledger's must not put every later state
# of the pool, and every day that snapshots are thinned to, into the future.
NEWEST_CLOCK = """
SELECT GREATEST((SELECT max(time_ns) FROM snapshots), LEAST($4, GREATEST(
    (SELECT max(time_ns) FROM decisions WHERE log = $1 AND stream_seq > $2 AND stream_seq <= $3),
    (SELECT max(time_ns) FROM block_events WHERE log = $1 AND stream_seq > $2 AND stream_seq <= $3), 0)))
"""

THIN_OUT = f"""
DELETE FROM snapshots USING (
    SELECT log, stream_seq, row_number() OVER (ORDER BY log DESC, stream_seq DESC) AS age,
           row_number() OVER (PARTITION BY time_ns / 86400000000000 ORDER BY log, stream_seq) AS of_day,
           dense_rank() OVER (ORDER BY time_ns / 86400000000000 DESC) AS day_age
    FROM snapshots
) AS ranked
WHERE snapshots.log = ranked.log AND snapshots.stream_seq = ranked.stream_seq
  AND ranked.age > {NEWEST_KEPT} AND (ranked.of_day > 1 OR ranked.day_age > {DAYS_KEPT})
"""  # noqa: S608 - of two numbers

ROWS_PREFETCH = 500
"""Each may have all the blocks of a long run."""

ROWS = """
SELECT model, value::text AS value FROM snapshot_rows WHERE log = $1 AND stream_seq = $2
ORDER BY model COLLATE "C", value::text COLLATE "C"
"""

# One that was made within a full report names events that may have gone with their day.
FIRST_WHOLE = """
SELECT s.log, s.stream_seq FROM snapshots s WHERE (s.log, s.stream_seq) >= ($1, $2) AND NOT EXISTS (
    SELECT FROM snapshot_rows r WHERE r.log = s.log AND r.stream_seq = s.stream_seq AND r.model = 'caches'
    AND r.value ->> 'report_seq' IS NOT NULL
) ORDER BY 1, 2 LIMIT 1
"""


async def take(connection: Any, reached: Extent, now_ns: int) -> Place:
    """Keep the state at the checkpoint, within the caller's repeatable-read transaction; older snapshots are thinned out.
    `now_ns` is the ledger's clock."""
    number = await connection.fetchval("SELECT number FROM logs WHERE log = $1", reached.log)
    place = Place(number, reached.stream_seq)
    if await connection.fetchval("SELECT EXISTS (SELECT FROM snapshots WHERE log = $1 AND stream_seq = $2)", *place):
        return place
    before = await connection.fetchval("SELECT max(stream_seq) FROM snapshots WHERE log = $1", number) or 0
    clocks = (reached.log, before, reached.stream_seq, now_ns)
    newest_ns = await connection.fetchval(NEWEST_CLOCK, *clocks, timeout=STATEMENT_LIMIT_S)
    await connection.execute("INSERT INTO snapshots (log, stream_seq, time_ns) VALUES ($1, $2, $3)", *place, newest_ns)
    for model in MODELS:
        await connection.execute(
            f"INSERT INTO snapshot_rows SELECT $1, $2, '{model}', to_jsonb(t) FROM {model} t",  # noqa: S608
            *place,
            timeout=STATEMENT_LIMIT_S,
        )
    await connection.execute(THIN_OUT)
    return place


async def rows(connection: Any, at: Place) -> AsyncIterator[tuple[str, str]]:
    """The rows of a snapshot as (model, JSON), in an order of their own. Call within a transaction."""
    async for row in connection.cursor(ROWS, *at, prefetch=ROWS_PREFETCH, timeout=STATEMENT_LIMIT_S):
        yield row["model"], row["value"]


async def digest(connection: Any, at: Place) -> bytes:
    """The hash of a snapshot, which a seal publishes."""
    found = blake2b(digest_size=32)
    async for model, value in rows(connection, at):
        for part in (model.encode(), value.encode()):
            found.update(len(part).to_bytes(8))
            found.update(part)
    return found.digest()


async def before_seq(connection: Any, place: Place) -> Place | None:
    """The last snapshot at or before a place; None if there is none."""
    sql = "SELECT log, stream_seq FROM snapshots WHERE (log, stream_seq) <= ($1, $2) ORDER BY 1 DESC, 2 DESC LIMIT 1"
    return _place(await connection.fetchrow(sql, *place))


async def before_time(connection: Any, time_ns: int) -> Place | None:
    """The last snapshot of nothing that was sent later than `time_ns`, clocks that were ahead of the ledger's left aside."""
    sql = "SELECT log, stream_seq FROM snapshots WHERE time_ns <= $1 ORDER BY 1 DESC, 2 DESC LIMIT 1"
    return _place(await connection.fetchrow(sql, time_ns))


async def behind_drops(connection: Any, dropped: Iterable[BlockDayDropped]) -> list[Place]:
    """Where what workers hold is known again: the first snapshot behind each run of rows that has gone, in order."""
    numbers = {str(row["log"]): row["number"] for row in await connection.fetch("SELECT log, number FROM logs")}
    found = set[Place]()
    for run in (run for day in dropped for run in day.runs if run.log in numbers):
        place = _place(await connection.fetchrow(FIRST_WHOLE, numbers[run.log], run.to_seq))
        found |= {place} if place else set()
    return sorted(found)


async def regain(connection: Any, models: ReadModels, at: Place) -> None:
    """Take what each worker holds, and how far sources had counted, from the snapshot `at`, up to which the record has been
    folded without what has gone."""
    changes = models.changes
    changes.caches |= models.holders.workers.keys()
    for worker, runs in models.runs.items():
        changes.runs.setdefault(worker, set()).update(runs.runs)
    models.holders.workers.clear()
    models.holders.index = PrefixIndex()
    models.runs.clear()
    models.reports.clear()
    await load_caches(connection, models, at)
    models.sources.update(await sources(connection, at))
    changes.sources |= models.sources.keys()
    changes.caches |= models.holders.workers.keys()
    for worker, runs in models.runs.items():
        changes.runs.setdefault(worker, set()).update(runs.runs)


def _place(row: Any) -> Place | None:
    return Place(row["log"], row["stream_seq"]) if row else None
