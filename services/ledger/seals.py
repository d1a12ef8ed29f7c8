"""What is sealed, and which days may go: the questions behind `log-sealed` and `block-day-dropped`."""

from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

from services.ledger.records import LOG_TABLES, Arrival, LogTable, record
from shared.contracts.codec import decode
from shared.contracts.envelope import EventData
from shared.contracts.events import BlockDayDropped, DroppedRun, LogSealed

RUNS_MAX = 5_000
"""Runs that one event can name. A day has one per log, and some around midnight, where two days' events meet."""


STATEMENT_LIMIT_S = 1_800.0
"""To count an hour of rows, or to find the runs of a day, which has tens of millions."""


class Extent(NamedTuple):
    """How far the newest log is copied and how far it is sealed; `sealed_ns` is when, None for never."""

    log: UUID
    stream_seq: int
    heads: Mapping[LogTable, bytes]
    sealed_seq: int
    sealed_at_seq: int
    sealed_ns: int | None


def head(heads: Mapping[LogTable, bytes]) -> bytes:
    """The one hash that stands for all rows of all tables."""
    return blake2b(b"".join(heads[table] for table in LOG_TABLES), digest_size=32).digest()


async def extent(connection: Any) -> Extent | None:
    """As of now; None in an empty record."""
    row = await connection.fetchrow(
        "SELECT * FROM logs JOIN checkpoints USING (log) ORDER BY number DESC LIMIT 1",
    )
    if row is None:
        return None
    seal = await connection.fetchrow(
        "SELECT stream_seq, time_ns, raw FROM decisions WHERE type = 'log-sealed' AND log = $1 "
        "ORDER BY stream_seq DESC LIMIT 1",
        row["log"],
    )
    sealed = decode(seal["raw"]).data if seal else None
    heads = {table: row[f"{table}_head"] for table in LOG_TABLES}
    return Extent(
        row["log"],
        row["stream_seq"],
        heads,
        sealed.to_seq if isinstance(sealed, LogSealed) else 0,
        seal["stream_seq"] if seal else 0,
        seal["time_ns"] if seal else None,
    )


async def seal(connection: Any, reached: Extent, snapshot: bytes | None = None) -> LogSealed:
    """The seal of everything that was copied since the last one; `snapshot` is the hash of the state that is kept with it."""
    counts = [
        await connection.fetchval(
            f"SELECT count(*) FROM {table} WHERE log = $1 AND stream_seq > $2 AND stream_seq <= $3",  # noqa: S608
            *(reached.log, reached.sealed_seq, reached.stream_seq),
            timeout=STATEMENT_LIMIT_S,
        )
        for table in LOG_TABLES
    ]
    return LogSealed(
        sealed_log=str(reached.log),
        from_seq=reached.sealed_seq + 1,
        to_seq=reached.stream_seq,
        count=sum(counts),
        head=head(reached.heads),
        snapshot=snapshot,
    )


async def kept_days(connection: Any) -> list[date]:
    """The days that have a partition, oldest first."""
    rows = await connection.fetch(
        "SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'block_events'::regclass AND c.relname ~ '^block_events_[0-9]{8}$' ORDER BY 1"
    )
    return [row["day"] for row in rows]


async def dropped_days(connection: Any) -> list[BlockDayDropped]:
    """Every day that the record says is dropped."""
    return [each for each in await _said(connection, BlockDayDropped.TYPE) if isinstance(each, BlockDayDropped)]


async def gone_days(connection: Any) -> list[BlockDayDropped]:
    """Those whose rows are no longer there: between a day's drop being said and being done, they are."""
    kept = {day.isoformat() for day in await kept_days(connection)}
    return [each for each in await dropped_days(connection) if each.day not in kept]


async def all_seals(connection: Any) -> list[LogSealed]:
    """Every seal that is in the record."""
    return [each for each in await _said(connection, LogSealed.TYPE) if isinstance(each, LogSealed)]


async def _said(connection: Any, kind: str) -> list[EventData | None]:
    """What the ledger has said of a kind. A row that was changed into something else says nothing: the chain tells of it."""
    rows = await connection.fetch(
        "SELECT d.stream_seq, d.raw FROM decisions d JOIN logs l USING (log) WHERE d.type = $1 ORDER BY l.number, d.stream_seq",
        kind,
    )
    told = (record(Arrival(row["stream_seq"], row["raw"])) for row in rows)
    return [each.event.data if each.event else None for each in told]


async def runs(connection: Any, day: date, reached: Extent) -> Sequence[DroppedRun] | None:
    """The rows of a day as runs of the chain; None unless all of them are sealed and can be named in one event."""
    found = await connection.fetch(_RUNS, day, RUNS_MAX + 1, timeout=STATEMENT_LIMIT_S)
    unsealed = any(row["log"] == reached.log and row["to_seq"] > reached.sealed_seq for row in found)
    if unsealed or len(found) > RUNS_MAX:
        return None
    return [
        DroppedRun(
            log=str(row["log"]), from_seq=row["from_seq"], to_seq=row["to_seq"], rows=row["rows"], chain=row["chain"]
        )
        for row in found
    ]


# A run ends where a row of another day lies between two of this one in the chain.
_RUNS = """
WITH span AS (
    SELECT log, min(stream_seq) AS first, max(stream_seq) AS last FROM block_events WHERE day = $1 GROUP BY log
), near AS (
    SELECT b.log, b.stream_seq, b.day,
           count(*) FILTER (WHERE b.day <> $1) OVER (PARTITION BY b.log ORDER BY b.stream_seq) AS island
    FROM block_events b JOIN span s ON s.log = b.log AND b.stream_seq BETWEEN s.first AND s.last
), run AS (
    SELECT log, min(stream_seq) AS from_seq, max(stream_seq) AS to_seq, count(*) AS rows
    FROM near WHERE day = $1 GROUP BY log, island
)
SELECT r.log, r.from_seq, r.to_seq, r.rows, b.chain
FROM run r JOIN logs l USING (log) JOIN block_events b ON b.log = r.log AND b.stream_seq = r.to_seq AND b.day = $1
ORDER BY l.number, r.from_seq LIMIT $2
"""
