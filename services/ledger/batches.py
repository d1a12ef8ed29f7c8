"""A batch of messages as rows with their links, and the checkpoint after it. Pure but for the read models it folds."""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import LOG_TABLES, Arrival, LogTable, Record, digest, link, record


class Checkpoint(NamedTuple):
    """How far a log has been copied: `digest` is that of the last message, `heads` are the chains' heads."""

    log: UUID
    number: int
    stream_seq: int
    digest: bytes
    heads: Mapping[LogTable, bytes]


class Link(NamedTuple):
    """A row and its chain value."""

    record: Record
    chain: bytes


class Batch(NamedTuple):
    """What one transaction adds to the log tables."""

    rows: Mapping[LogTable, list[Link]]
    checkpoint: Checkpoint


def batch(models: ReadModels, after: Checkpoint, arrivals: Sequence[Arrival], recorded_ids: Container[UUID]) -> Batch:
    """Fold `arrivals`, which follow the checkpoint without a gap, and link their rows.

    `recorded_ids` are ids that are known to be in the record although their number is new: a sender's fault.
    """
    heads = dict(after.heads)
    rows: dict[LogTable, list[Link]] = {table: [] for table in LOG_TABLES}
    ids: set[UUID] = set()
    for arrival in arrivals:
        row = record(arrival)
        repeated = models.is_repeat(row) or (row.id is not None and (row.id in ids or row.id in recorded_ids))
        table: LogTable = "repeats" if repeated else row.table
        heads[table] = link(heads[table], row.raw)
        rows[table].append(Link(row, heads[table]))
        if repeated:
            continue
        if row.id is not None:
            ids.add(row.id)
        evolve(models, str(after.log), Place(after.number, row.stream_seq), row)
    last = arrivals[-1]
    return Batch(rows, Checkpoint(after.log, after.number, last.stream_seq, digest(last.raw), heads))
