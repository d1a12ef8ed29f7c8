"""A bundle into an empty database: the rows as they were, and the read models from the same fold, in one transaction.

Nothing in the file is believed. Which table a row belongs to and its link are made anew from the bytes by the code that
recorded them, and have to be the ones in the file.
"""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple
from uuid import UUID

from services.ledger import database, logbook
from services.ledger.batches import Checkpoint, batch
from services.ledger.bundles import BadBundle, BundleEnds, BundleReader, ChainResumes, LogBegins, LogEnds, Row
from services.ledger.feed import BATCH_BYTES_MAX, BATCH_EVENTS_MAX
from services.ledger.readmodels import ReadModels
from services.ledger.rebuild import LedgerActive
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES, Arrival, record
from services.ledger.tables import TableWriter


class NotEmpty(Exception):
    """The database has a record already."""


class Imported(NamedTuple):
    """What was in the bundle."""

    pool: str
    logs: int
    rows: int


async def import_bundle(database_url: str, file: BinaryIO, progress: Callable[[int], None] | None = None) -> Imported:
    """All of the bundle, or nothing. `progress` is told how many rows so far.

    Errors: BadBundle; NotEmpty; LedgerActive; those of `database.connect`.
    """
    reader = BundleReader(file)
    connection = await database.connect(database_url)
    try:
        if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", database.ACTIVE_LOCK):
            raise LedgerActive("a ledger copies into this database: import into one of its own")
        if await connection.fetchval("SELECT EXISTS (SELECT FROM logs)"):
            raise NotEmpty("the database has a record already: import into an empty one")
        async with connection.transaction():
            copy = _Copy(connection, reader.header.pool, progress)
            for frame in reader.frames():
                match frame:
                    case Row():
                        await copy.row(frame)
                    case LogBegins():
                        await copy.begin(frame)
                    case ChainResumes():
                        await copy.resume(frame)
                    case LogEnds():
                        await copy.end(frame)
                    case BundleEnds():
                        return copy.imported()
            raise AssertionError("frames end with BundleEnds")
    finally:
        await connection.close()


class _Copy:
    """Log after log into the tables, in batches. `_checkpoint` is that of the newest log; None before the first."""

    def __init__(self, connection: Any, pool: str, progress: Callable[[int], None] | None) -> None:
        self._connection = connection
        self._pool = pool
        self._progress = progress
        self._models = ReadModels()
        self._writer = TableWriter(connection)
        self._checkpoint: Checkpoint | None = None
        self._open = False
        """Whether rows of the newest log may follow."""
        self._rows: list[Row] = []
        self._bytes = 0
        self._written = 0

    async def begin(self, log: LogBegins) -> None:
        """The log's rows follow."""
        before = self._checkpoint
        follows = (before.number + 1, before.log, before.stream_seq) if before else (1, None, None)
        if self._open or (log.number, log.predecessor, log.predecessor_seq) != follows:
            raise BadBundle(f"log {log.log}: it does not follow what is before it in the bundle")
        heads = before.heads if before else dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN)
        self._checkpoint = Checkpoint(log.log, log.number, 0, b"", heads)
        self._open = True
        await logbook.restore(self._connection, self._checkpoint, self._pool, log)

    async def row(self, row: Row) -> None:
        """The next row of the log."""
        last = self._rows[-1].stream_seq if self._rows else self._reached().stream_seq
        if row.stream_seq <= last:
            raise BadBundle(f"row {row.stream_seq} follows row {last}")
        if self._rows and (len(self._rows) >= BATCH_EVENTS_MAX or self._bytes + len(row.raw) > BATCH_BYTES_MAX):
            await self._flush()
        self._rows.append(row)
        self._bytes += len(row.raw)

    async def resume(self, frame: ChainResumes) -> None:
        """Rows are gone by policy here."""
        await self._flush()
        reached = self._reached()
        self._checkpoint = reached._replace(heads={**reached.heads, "block_events": frame.head})

    async def end(self, frame: LogEnds) -> None:
        """The log's rows are over."""
        await self._flush()
        reached = self._reached()
        if frame.stream_seq < reached.stream_seq:
            raise BadBundle(f"log {reached.log}: it goes further than to {frame.stream_seq}, where it is said to end")
        if reached.heads != frame.heads:
            raise BadBundle(f"log {reached.log}: its rows do not lead to where its chains are said to end")
        if frame.stream_seq > reached.stream_seq:
            # Behind the last row lies a gap, or rows that are gone: the last message is not known.
            reached = reached._replace(stream_seq=frame.stream_seq, digest=b"")
        await logbook.move(self._connection, reached)
        self._checkpoint, self._open = reached, False

    def imported(self) -> Imported:
        """Everything is written."""
        if self._open or self._checkpoint is None:
            raise BadBundle("the bundle ends within a log, or has none")
        return Imported(self._pool, self._checkpoint.number, self._written)

    def _reached(self) -> Checkpoint:
        if self._checkpoint is None or not self._open:
            raise BadBundle(f"behind {self._written} rows: there is no log to which this belongs")
        return self._checkpoint

    async def _flush(self) -> None:
        if not self._rows:
            return
        rows, self._rows, self._bytes = self._rows, [], 0
        reached = self._reached()
        arrivals = [Arrival(row.stream_seq, row.raw) for row in rows]
        added = batch(self._models, reached, arrivals, _recorded_before(rows))
        made = {each.record.stream_seq: (table, each.chain) for table in LOG_TABLES for each in added.rows[table]}
        for row in rows:
            if made[row.stream_seq] != (row.table, row.chain):
                raise BadBundle(f"{row.table} {reached.log}:{row.stream_seq}: the chain breaks here")
        await self._writer.write_log(added)
        await self._writer.write_read_models(self._models)
        self._checkpoint = added.checkpoint
        self._written += len(rows)
        if self._progress is not None:
            self._progress(self._written)


def _recorded_before(rows: Sequence[Row]) -> set[UUID]:
    """Ids of repeats in `rows` that were recorded in an earlier batch: under another number, a fold cannot know them."""
    repeats = {record(Arrival(row.stream_seq, row.raw)).id for row in rows if row.table == "repeats"}
    if repeats:
        repeats -= {record(Arrival(row.stream_seq, row.raw)).id for row in rows if row.table != "repeats"}
    return {each for each in repeats if each is not None}
