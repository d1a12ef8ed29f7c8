"""Which logs the record has, and how far each has been copied.

A log is one incarnation of the stream. A stream with another identity begins a new one, and so does a stream that was put
back to an older state: sequences would otherwise name two different events.
"""

from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from services.ledger.batches import Checkpoint
from services.ledger.bundles import LogBegins
from services.ledger.feed import Gap
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES

NEWEST = """
SELECT l.log, l.number, l.stream, l.pool, l.predecessor, c.stream_seq, c.digest, c.decisions_head, c.block_events_head,
       c.repeats_head
FROM logs l JOIN checkpoints c USING (log) ORDER BY l.number DESC LIMIT 1
"""

ACCEPT_GAP = """
INSERT INTO gaps (log, from_seq, to_seq, accepted_by, reason)
SELECT c.log, c.stream_seq + 1, c.gap_to, $1, $2 FROM checkpoints c JOIN logs l USING (log)
WHERE c.gap_to IS NOT NULL ORDER BY l.number DESC LIMIT 1
RETURNING log, from_seq, to_seq
"""


class OtherPool(Exception):
    """The database holds the record of another pool, or a part of a record."""


class Opened(NamedTuple):
    """The log to copy. `predecessor` and `predecessor_seq` say what it follows, None and 0 for the first log."""

    checkpoint: Checkpoint
    predecessor: UUID | None
    predecessor_seq: int


async def open_newest(connection: Any, stream: UUID, last_seq: int, pool: str, spare_id: UUID) -> Opened:
    """The log of the stream as it is now: the newest one, or a new one if the stream is not the one it was. Nothing is added
    to a part of another record.

    `last_seq` is the stream's last sequence, `spare_id` names a new log whose stream's identity is used up.
    Errors: OtherPool.
    """
    row = await connection.fetchrow(NEWEST)
    if await connection.fetchval("SELECT EXISTS (SELECT FROM beginnings)"):
        raise OtherPool("the database holds a part of a record, which was imported: give this pool one of its own")
    if row is None:
        await _begin(
            connection, Checkpoint(stream, 1, 0, b"", dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN)), stream, pool, None
        )
    elif row["pool"] != pool:
        raise OtherPool(f"the database holds the record of pool {row['pool']!r}, this is {pool!r}: give each its own")
    elif row["stream"] != stream or last_seq < row["stream_seq"]:
        await begin_next(connection, stream, pool, spare_id)
    row = await connection.fetchrow(NEWEST)
    before = row["predecessor"]
    before_seq = await connection.fetchval("SELECT stream_seq FROM checkpoints WHERE log = $1", before) if before else 0
    return Opened(_checkpoint(row), before, before_seq)


async def begin_next(connection: Any, stream: UUID, pool: str, spare_id: UUID) -> None:
    """Begin a log behind the newest one; its chains go on from there."""
    last = _checkpoint(await connection.fetchrow(NEWEST))
    used = await connection.fetchval("SELECT EXISTS (SELECT FROM logs WHERE log = $1)", stream)
    first = Checkpoint(spare_id if used else stream, last.number + 1, 0, b"", last.heads)
    await _begin(connection, first, stream, pool, last)


async def accepted(connection: Any, checkpoint: Checkpoint, gap: Gap) -> Checkpoint | None:
    """The checkpoint behind `gap`, if an operator has accepted it; else the gap is noted for him to find.

    A gap that was accepted while the stream dropped still more is passed as far as it was accepted.
    """
    async with connection.transaction():
        to_seq = await connection.fetchval(
            "SELECT to_seq FROM gaps WHERE log = $1 AND from_seq = $2 AND to_seq <= $3",
            checkpoint.log,
            gap.from_seq,
            gap.to_seq,
        )
        if to_seq is None:
            await connection.execute("UPDATE checkpoints SET gap_to = $2 WHERE log = $1", checkpoint.log, gap.to_seq)
            return None
        await connection.execute(
            "UPDATE checkpoints SET stream_seq = $2, digest = '', gap_to = NULL WHERE log = $1", checkpoint.log, to_seq
        )
        return checkpoint._replace(stream_seq=to_seq, digest=b"")


async def accept_gap(connection: Any, operator: str, reason: str) -> tuple[UUID, int, int] | None:
    """Accept the gap that the ledger waits at: (log, first and last missing sequence); None if it waits at none."""
    try:
        row = await connection.fetchrow(ACCEPT_GAP, operator, reason)
    except asyncpg.UniqueViolationError:
        # Accepted a moment ago; the ledger looks every second.
        return None
    return (row["log"], row["from_seq"], row["to_seq"]) if row else None


async def restore(connection: Any, first: Checkpoint, pool: str, log: LogBegins) -> None:
    """Begin a log as another database has it, within the caller's transaction."""
    await connection.execute(
        "INSERT INTO logs (log, number, stream, pool, opened_at, predecessor, predecessor_seq) "
        "VALUES ($1, $2, $3, $4, $5, $6, $7)",
        *(log.log, log.number, log.stream, pool, log.opened_at),
        *((None, None) if log.begins else (log.predecessor, log.predecessor_seq)),
    )
    await _insert_checkpoint(connection, first)
    await connection.executemany(
        "INSERT INTO gaps (log, from_seq, to_seq, accepted_at, accepted_by, reason) VALUES ($1, $2, $3, $4, $5, $6)",
        [(log.log, gap.from_seq, gap.to_seq, gap.accepted_at, gap.accepted_by, gap.reason) for gap in log.gaps],
    )


async def move(connection: Any, checkpoint: Checkpoint) -> None:
    """Move a log's checkpoint, within the caller's transaction."""
    await connection.execute(
        "UPDATE checkpoints SET stream_seq = $2, digest = $3, decisions_head = $4, block_events_head = $5, "
        "repeats_head = $6 WHERE log = $1",
        checkpoint.log,
        checkpoint.stream_seq,
        checkpoint.digest,
        *(checkpoint.heads[table] for table in LOG_TABLES),
    )


async def _begin(connection: Any, first: Checkpoint, stream: UUID, pool: str, last: Checkpoint | None) -> None:
    async with connection.transaction():
        await connection.execute(
            "INSERT INTO logs (log, number, stream, pool, predecessor, predecessor_seq) VALUES ($1, $2, $3, $4, $5, $6)",
            first.log,
            first.number,
            stream,
            pool,
            last.log if last else None,
            last.stream_seq if last else None,
        )
        await _insert_checkpoint(connection, first)


async def _insert_checkpoint(connection: Any, first: Checkpoint) -> None:
    await connection.execute(
        "INSERT INTO checkpoints (log, stream_seq, digest, decisions_head, block_events_head, repeats_head) "
        "VALUES ($1, $2, $3, $4, $5, $6)",
        first.log,
        first.stream_seq,
        first.digest,
        *(first.heads[table] for table in LOG_TABLES),
    )


def _checkpoint(row: Any) -> Checkpoint:
    heads = {table: row[f"{table}_head"] for table in LOG_TABLES}
    return Checkpoint(row["log"], row["number"], row["stream_seq"], row["digest"], heads)
