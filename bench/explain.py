"""How long `vertumnus explain` takes in a large record: `python -m bench.explain --events 10000000`. Starts a Postgres.

Two thousand requests of a simulated pool are recorded as the ledger records them. The rest is filler that Postgres makes
itself, behind them in the log: rows that have places, types, correlations and read models of their own, ids that rise as those
of events do, and short bytes. A row of filler takes about half a kilobyte of disk with its indexes.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import asyncpg

from bench.replay import life, pool
from cli.embedded.postgres import EmbeddedPostgres
from migrations.steps import upgrade
from replay.explaining import explain
from services.ledger import database
from services.ledger.batches import batch
from services.ledger.logbook import open_newest
from services.ledger.readmodels import ReadModels
from services.ledger.records import Arrival
from services.ledger.tables import TableWriter

STREAM = UUID(int=1)
REQUESTS = 2_000
ASKED = 200
BATCH_EVENTS = 1_000
FILLER_ROWS = 500_000
"""A statement. One in eight is a block event."""
LARGE_ROWS = 10_000

_COLUMNS = "log, stream_seq, id, type, version, pool, source, source_seq, time_ns, correlation, causation, raw, chain"
_FILLER = f"""
INSERT INTO {{table}} ({_COLUMNS}{{day_column}})
SELECT $1, n, lpad(to_hex(n), 32, '0')::uuid, '{{type}}', 1, 'bench', 'filler', n, n, 'filler-' || n / 8, NULL, '\\x00',
       decode(repeat('00', 32), 'hex'){{day}}
FROM generate_series($2::bigint, $3::bigint) AS n WHERE (n % 8 = 0) = {{is_block}}
"""
FILL_DECISIONS = _FILLER.format(table="decisions", day_column="", type="request-assigned", day="", is_block="false")
FILL_BLOCKS = _FILLER.format(
    table="block_events", day_column=", day", type="blocks-stored", day=", current_date", is_block="true"
)
FILL_REQUESTS = """
INSERT INTO requests (request, received_log, received_seq, ended, end_log, end_seq)
SELECT 'filler-' || n, 1, n * 8, 'completed', 1, n * 8 FROM generate_series($1::bigint / 8 + 1, $2::bigint / 8) AS n
"""

PLANNED = {
    "a request's events": "SELECT * FROM {table} WHERE correlation = 'r1' ORDER BY stream_seq LIMIT 1000",
    "an event by its id": "SELECT * FROM {table} WHERE id = '00000000-0000-0000-0000-000000000007'",
    "a page of a log": "SELECT * FROM {table} WHERE log = '00000000-0000-0000-0000-000000000001' "
    "AND stream_seq > 5000 AND stream_seq <= 10000",
}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Milliseconds to explain a request.")
    parser.add_argument("--events", type=int, default=1_000_000, help="in the whole record")
    events = parser.parse_args().events
    with tempfile.TemporaryDirectory(prefix="vertumnus-bench-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        with EmbeddedPostgres(directory / "postgres", durable=False) as postgres:
            upgrade(postgres.url())
            print(json.dumps(asyncio.run(measure(postgres.url(), events)), indent=2))


async def measure(url: str, events: int, requests: int = REQUESTS, asked: int = ASKED) -> dict[str, Any]:
    """Times in milliseconds, connecting included; `scanned` names the questions that would read a whole table of the log, and
    every large table that was read as a whole meanwhile."""
    recorded = await write(url, life(pool(1), requests))
    await fill(url, recorded, events)
    chance, times = Random(1), list[float]()
    connection = await database.connect(url)
    names = [row["request"] for row in await connection.fetch("SELECT request FROM requests WHERE source IS NOT NULL")]
    stored = sum([await connection.fetchval(f"SELECT count(*) FROM {each}") for each in ("decisions", "block_events")])
    scanned, before = await whole_tables(connection), await whole_reads(connection)
    for _ in range(asked):
        begun = time.perf_counter()
        told = await explain(url, chance.choice(names), recompute=False)
        times.append((time.perf_counter() - begun) * 1e3)
        assert told.attempts, "every request of the simulation was placed"
    scanned += [table for table, reads in (await whole_reads(connection)).items() if reads > before.get(table, 0)]
    await connection.close()
    cuts = statistics.quantiles(times, n=100)
    return {
        "events_stored": stored,
        "explained": asked,
        "p50_ms": round(cuts[49], 1),
        "p99_ms": round(cuts[98], 1),
        "scanned": scanned,
    }


async def write(url: str, arrivals: list[Arrival]) -> int:
    """Record the log as the ledger does; its last sequence."""
    connection = await database.connect(url)
    checkpoint = (await open_newest(connection, STREAM, 10**12, "bench", UUID(int=2))).checkpoint
    models, writer = ReadModels(), TableWriter(connection)
    for begin in range(0, len(arrivals), BATCH_EVENTS):
        added = batch(models, checkpoint, arrivals[begin : begin + BATCH_EVENTS], ())
        async with connection.transaction():
            await writer.write_log(added)
            await writer.write_read_models(models)
        checkpoint = added.checkpoint
    await connection.close()
    return checkpoint.stream_seq


async def fill(url: str, after_seq: int, to_seq: int) -> None:
    """Filler behind `after_seq`, as the owner of the tables; today's block events lie in one partition."""
    connection = await asyncpg.connect(database.driver_url(url))
    await connection.execute("SELECT ensure_block_day(current_date)")
    for begin in range(after_seq + 1, to_seq + 1, FILLER_ROWS):
        end = min(begin + FILLER_ROWS - 1, to_seq)
        await connection.execute(FILL_DECISIONS, STREAM, begin, end)
        await connection.execute(FILL_BLOCKS, STREAM, begin, end)
        await connection.execute(FILL_REQUESTS, begin, end)
    for table in ("decisions", "block_events", "requests"):
        await connection.execute(f"ANALYZE {table}")
    await connection.close()


async def whole_tables(connection: Any) -> list[str]:
    """Which of the questions behind `explain`, `replay` and `verify` would read a whole table of the log."""
    found = []
    for what, sql in PLANNED.items():
        for table in ("decisions", "block_events"):
            plan = await connection.fetch(f"EXPLAIN {sql.format(table=table)}")
            # Partitions that are all but empty may be read as a whole.
            large = "decisions" if table == "decisions" else f"block_events_{time.strftime('%Y%m%d', time.gmtime())}"
            if any(f"Seq Scan on {large} " in f"{row[0]} " for row in plan):
                found.append(f"{what} in {table}")
    return found


async def whole_reads(connection: Any) -> dict[str, int]:
    """How often each table of more than `LARGE_ROWS` was read from end to end, by connections that have ended and this one."""
    await connection.execute("SELECT pg_stat_force_next_flush()")
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    sql = "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE n_live_tup > $1"
    return {row["relname"]: row["seq_scan"] for row in await connection.fetch(sql, LARGE_ROWS)}


if __name__ == "__main__":
    main()
