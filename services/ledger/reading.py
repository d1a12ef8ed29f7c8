"""The record from its first row to its last, page by page, in the order of the stream."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from services.ledger.records import LOG_TABLES, Arrival, LogTable

PAGE_EVENTS = 5_000


class LogRow(NamedTuple):
    """One row of a log table. `columns` are those that repeat what the bytes say."""

    table: LogTable
    stream_seq: int
    raw: bytes
    chain: bytes
    columns: dict[str, Any]


class Begins(NamedTuple):
    """Where a record begins that is a part of another one: behind `stream_seq`, where the chains had these heads."""

    stream_seq: int
    heads: dict[LogTable, bytes]


class LogInfo(NamedTuple):
    """One log: what it follows, how far it is copied, and its accepted gaps as (first, last) missing sequence. `begins` is None
    for a log that the record has from its first event."""

    log: UUID
    number: int
    predecessor: UUID | None
    predecessor_seq: int | None
    stream_seq: int
    heads: dict[LogTable, bytes]
    gaps: tuple[tuple[int, int], ...]
    begins: Begins | None = None

    @property
    def after_seq(self) -> int:
        """The record has what lies behind."""
        return self.begins.stream_seq if self.begins else 0


async def logs(connection: Any) -> list[LogInfo]:
    """Every log, oldest first."""
    return [
        LogInfo(
            row["log"],
            row["number"],
            row["predecessor"],
            row["predecessor_seq"],
            row["stream_seq"],
            {table: row[f"{table}_head"] for table in LOG_TABLES},
            tuple((from_seq, to_seq) for from_seq, to_seq in orjson.loads(row["gaps"])),
            Begins(row["begun_seq"], {table: row[f"{table}_begun"] for table in LOG_TABLES})
            if row["begun_seq"] is not None
            else None,
        )
        for row in await connection.fetch(_LOGS)
    ]


_LOGS = """
SELECT l.*, c.*, b.stream_seq AS begun_seq, b.decisions_head AS decisions_begun, b.block_events_head AS block_events_begun,
       b.repeats_head AS repeats_begun, COALESCE(g.pairs, '[]') AS gaps
FROM logs l JOIN checkpoints c USING (log) LEFT JOIN beginnings b ON b.log = l.number
LEFT JOIN LATERAL (
    SELECT json_agg(json_build_array(from_seq, to_seq) ORDER BY from_seq)::text AS pairs FROM gaps WHERE log = l.log
) g ON true
ORDER BY l.number
"""
"""One question, and of no type that the driver would have to ask about first."""


async def pages(connection: Any, log: LogInfo, to_seq: int | None = None) -> AsyncIterator[list[LogRow]]:
    """The rows of one log in stream order up to `to_seq`; without it up to its checkpoint and whatever lies beyond."""
    last = to_seq
    if last is None:
        last = max([log.stream_seq, *[await connection.fetchval(_LAST[table], log.log) or 0 for table in LOG_TABLES]])
    for start in range(log.after_seq, last, PAGE_EVENTS):
        rows: list[LogRow] = []
        for table in LOG_TABLES:
            found = await connection.fetch(_PAGE[table], log.log, start, min(start + PAGE_EVENTS, last))
            rows += [LogRow(table, row["stream_seq"], row["raw"], row["chain"], _rest(row)) for row in found]
        rows.sort(key=lambda row: row.stream_seq)
        yield rows


def _rest(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("stream_seq", "raw", "chain")}


_REPEATED = "id, source, source_seq"
_COLUMNS: dict[LogTable, str] = {
    "decisions": f"{_REPEATED}, type, version, pool, time_ns, correlation, causation",
    "block_events": f"{_REPEATED}, type, version, pool, time_ns, correlation, causation, day",
    "repeats": _REPEATED,
}
_PAGE = {
    table: f"SELECT stream_seq, raw, chain, {_COLUMNS[table]} FROM {table} "  # noqa: S608
    "WHERE log = $1 AND stream_seq > $2 AND stream_seq <= $3"
    for table in LOG_TABLES
}
_LAST = {table: f"SELECT max(stream_seq) FROM {table} WHERE log = $1" for table in LOG_TABLES}  # noqa: S608


async def told(connection: Any, log: UUID, types: Sequence[str]) -> list[Arrival]:
    """Every decision of these types in one log, in stream order."""
    sql = "SELECT stream_seq, raw FROM decisions WHERE log = $1 AND type = ANY($2::text[]) ORDER BY stream_seq"
    return [Arrival(row["stream_seq"], row["raw"]) for row in await connection.fetch(sql, log, list(types))]


async def stories(connection: Any, log: UUID, after_seq: int, to_seq: int) -> AsyncIterator[list[Arrival]]:
    """What was published in one log behind `after_seq` up to `to_seq`, page by page and in order, repeats left out."""
    for start in range(after_seq, to_seq, PAGE_EVENTS):
        rows = await connection.fetch(_STORY, log, start, min(start + PAGE_EVENTS, to_seq))
        yield [Arrival(row["stream_seq"], row["raw"]) for row in rows]


_STORY = """
SELECT stream_seq, raw FROM decisions WHERE log = $1 AND stream_seq > $2 AND stream_seq <= $3
UNION ALL SELECT stream_seq, raw FROM block_events WHERE log = $1 AND stream_seq > $2 AND stream_seq <= $3 ORDER BY 1
"""
