"""A bundle into an empty database: the rows as they were, and the read models from the same fold, in one transaction.

Nothing in the file is believed. Which table a row belongs to and its link are made anew from the bytes by the code that
recorded them, and have to be the ones in the file. Where a bundle begins in the middle of a record, a seal within it has to say
the chains' heads and the snapshot of the beginning, and that snapshot the state of the read models.
"""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple
from uuid import UUID

import asyncpg

from services.ledger import database, logbook, partial, snapshots
from services.ledger.batches import Checkpoint, batch
from services.ledger.bundles import (
    SNAPSHOT_ROWS_MAX,
    STATE_BYTES_MAX,
    BadBundle,
    BundleEnds,
    BundleReader,
    ChainResumes,
    LogBegins,
    LogEnds,
    Row,
    SnapshotRow,
    StatePiece,
)
from services.ledger.feed import BATCH_BYTES_MAX, BATCH_EVENTS_MAX
from services.ledger.partial import Beginning
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels
from services.ledger.rebuild import LedgerActive
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES, Arrival, LogTable, Record, record
from services.ledger.seals import head
from services.ledger.tables import TableWriter
from shared.contracts.events import LogSealed


class NotEmpty(Exception):
    """The database has a record already."""


class Imported(NamedTuple):
    """What was in the bundle."""

    pool: str
    logs: int
    rows: int


Check = Callable[[Beginning, ReadModels], None]
"""Whether what the deciders had folded at a beginning agrees with the read models there. Errors: BadState."""


async def import_bundle(
    database_url: str, file: BinaryIO, progress: Callable[[int], None] | None = None, check: Check | None = None
) -> Imported:
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
            copy = _Copy(connection, reader.header.pool, progress, check)
            for frame in reader.frames():
                match frame:
                    case Row():
                        await copy.row(frame)
                    case LogBegins():
                        await copy.begin(frame)
                    case SnapshotRow() | StatePiece():
                        copy.state(frame)
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

    def __init__(self, connection: Any, pool: str, progress: Callable[[int], None] | None, check: Check | None) -> None:
        self._connection = connection
        self._pool = pool
        self._progress = progress
        self._check = check
        self._part: _Part | None = None
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
        is_part = log.begins is not None and before is None
        if self._open or not (is_part or (log.number, log.predecessor, log.predecessor_seq) == follows):
            raise BadBundle(f"log {log.log}: it does not follow what is before it in the bundle")
        heads = before.heads if before else dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN)
        self._checkpoint = Checkpoint(log.log, log.number, 0, b"", heads)
        if log.begins is not None:
            if log.begins.heads.keys() != heads.keys() or log.begins.stream_seq < 1:
                raise BadBundle(
                    f"log {log.log}: begins: a sequence and the heads of {', '.join(LOG_TABLES)} are needed"
                )
            self._part = _Part(Place(log.number, log.begins.stream_seq))
            self._checkpoint = self._checkpoint._replace(stream_seq=log.begins.stream_seq, heads=log.begins.heads)
        self._open = True
        await logbook.restore(self._connection, self._checkpoint, self._pool, log)

    def state(self, frame: SnapshotRow | StatePiece) -> None:
        """What stands for everything before a bundle that begins in the middle."""
        if self._part is None or self._part.is_taken or self._rows:
            raise BadBundle("a state lies where no log begins in its middle")
        self._part.add(frame)

    async def _take_part(self) -> None:
        """The state is complete when rows begin."""
        if self._part is not None and not self._part.is_taken:
            heads = dict(self._reached().heads)
            self._models = await self._part.take(self._connection, self._writer, heads, self._check)

    async def row(self, row: Row) -> None:
        """The next row of the log."""
        await self._take_part()
        last = self._rows[-1].stream_seq if self._rows else self._reached().stream_seq
        if row.stream_seq <= last:
            raise BadBundle(f"row {row.stream_seq} follows row {last}")
        if self._rows and (len(self._rows) >= BATCH_EVENTS_MAX or self._bytes + len(row.raw) > BATCH_BYTES_MAX):
            await self._flush()
        self._rows.append(row)
        self._bytes += len(row.raw)

    async def resume(self, frame: ChainResumes) -> None:
        """Rows are gone by policy here."""
        await self._take_part()
        await self._flush()
        reached = self._reached()
        self._checkpoint = reached._replace(heads={**reached.heads, "block_events": frame.head})

    async def end(self, frame: LogEnds) -> None:
        """The log's rows are over."""
        await self._take_part()
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
        if self._part is not None and not self._part.is_sealed:
            raise BadBundle(f"begins: no seal in the bundle vouches for its beginning behind {self._part.place.seq}")
        logs = self._checkpoint.number - (self._part.place.log - 1 if self._part else 0)
        return Imported(self._pool, logs, self._written)

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
        if self._part is not None:
            self._part.look_for_seal(reached.log, [each.record for each in added.rows["decisions"]])
        await self._writer.write_log(added)
        await self._writer.write_read_models(self._models)
        self._checkpoint = added.checkpoint
        self._written += len(rows)
        if self._progress is not None:
            self._progress(self._written)


class _Part:
    """The state at the beginning of a bundle that begins in the middle, and whether a seal has vouched for it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_taken = self.is_sealed = False
        self._rows: list[tuple[str, str]] = []
        self._states = {"models": bytearray(), "deciders": bytearray()}
        self._head = self._digest = b""

    def add(self, frame: SnapshotRow | StatePiece) -> None:
        """The next piece."""
        if isinstance(frame, SnapshotRow):
            self._rows.append((frame.model, frame.value))
            if len(self._rows) > SNAPSHOT_ROWS_MAX:
                raise BadBundle(f"the snapshot has more than {SNAPSHOT_ROWS_MAX} rows")
            return
        self._states[frame.of] += frame.content
        if len(self._states[frame.of]) > STATE_BYTES_MAX:
            raise BadBundle(f"the state of {frame.of} has more than {STATE_BYTES_MAX} bytes")

    async def take(
        self, connection: Any, writer: TableWriter, heads: dict[LogTable, bytes], check: Check | None
    ) -> ReadModels:
        """Store it; the read models there. Errors: BadBundle."""
        begun = Beginning(self.place, bytes(self._states["models"]), bytes(self._states["deciders"]))
        try:
            models = partial.thawed(begun.models)
            models.check()
            await partial.keep(connection, begun, heads, self._rows)
            await partial.write(connection, writer, models, self.place)
            if check is not None:
                check(begun, models)
        except (ValueError, AssertionError, LookupError, AttributeError, TypeError, asyncpg.DataError) as error:
            raise BadBundle(f"the state at its beginning: {error}") from error
        if (model := await partial.differing(connection, models, self.place)) is not None:
            raise BadBundle(f"the state at its beginning: {model} is not what the snapshot says")
        self._head, self._digest = head(heads), await snapshots.digest(connection, self.place)
        self.is_taken = True
        return models

    def look_for_seal(self, log: UUID, rows: Sequence[Record]) -> None:
        """Errors: BadBundle if a seal of the beginning says otherwise."""
        for sealed in (each.event.data for each in rows if each.event is not None):
            if not isinstance(sealed, LogSealed) or (sealed.sealed_log, sealed.to_seq) != (str(log), self.place.seq):
                continue
            if (sealed.head, sealed.snapshot) != (self._head, self._digest):
                wrong = "the chains' heads" if sealed.head != self._head else "the snapshot"
                raise BadBundle(f"begins: what was sealed at {self.place.seq} is not {wrong} of the bundle")
            self.is_sealed = True


def _recorded_before(rows: Sequence[Row]) -> set[UUID]:
    """Ids of repeats in `rows` that were recorded in an earlier batch: under another number, a fold cannot know them."""
    repeats = {record(Arrival(row.stream_seq, row.raw)).id for row in rows if row.table == "repeats"}
    if repeats:
        repeats -= {record(Arrival(row.stream_seq, row.raw)).id for row in rows if row.table != "repeats"}
    return {each for each in repeats if each is not None}
