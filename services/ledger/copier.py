"""The copy: stream → record, by one active ledger, for as long as the process lives.

All of it happens on one database connection, which holds the advisory lock of the active ledger. Whatever goes wrong ends
the connection and with it the lock, and the next one starts from what the database says: whether a last commit took effect
never has to be guessed, and two ledgers can never both write.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from services.ledger import database, logbook
from services.ledger.batches import Checkpoint, batch
from services.ledger.database import AWAY, SchemaMissing
from services.ledger.feed import Feed, Gap, WentBack
from services.ledger.loading import load
from services.ledger.logbook import Opened, OtherPool
from services.ledger.metrics import LedgerMetrics
from services.ledger.readmodels import ReadModels
from services.ledger.records import Arrival
from services.ledger.tables import TableWriter
from services.ledger.voice import Voice
from shared.contracts.events import LogReset
from shared.runtime.appending import Fenced
from shared.runtime.ports import LogLost, Unavailable
from shared.runtime.service import Runtime

LOOK_EVERY_S = 1.0
"""Between two tries: for the lock, for the database, for an operator's word on a gap. Also how long an idle copy waits
before it makes sure that it still has its connection."""


class Copier:
    """One per process. `trouble` is why the record does not follow the stream, None while it does (or another ledger does)."""

    def __init__(self, runtime: Runtime, database_url: str, voice: Voice, metrics: LedgerMetrics) -> None:
        self.trouble: str | None = "starting"
        self.active = False
        self._runtime = runtime
        self._log = runtime.log
        self._database_url = database_url
        self._metrics = metrics
        self._copied_seq = 0
        self._voice = voice
        self._recorded_ids: set[UUID] = set()
        self._logger = structlog.get_logger(component="copier")

    async def run(self) -> Exception:
        """Returns when this process can copy no more: its stream is another one now, and a new process has to open it."""
        while True:
            try:
                await self._session()
            except LogLost as lost:
                if await self._is_gone():
                    return lost
                self._say(lost)
            except (*AWAY, SchemaMissing, OtherPool, Unavailable, Fenced, WentBack) as error:
                self._say(error)
            await self._runtime.clock.sleep(LOOK_EVERY_S)

    async def watch_lag(self) -> Exception:
        """Measure the lag every second. Returns when the stream is another one."""
        while True:
            try:
                first, last = await self._log.bounds()
            except LogLost as lost:
                return lost
            except Unavailable:
                # The stream cannot be read either, so the lag stays what it was.
                self._logger.debug("lag not measured")
            else:
                lag = max(last - self._copied_seq, 0) if self.active or self.trouble else 0
                self._metrics.lag_events.set(lag)
                self._metrics.unread_share.set(min(lag / max(last - first + 1, 1), 1.0))
            await self._runtime.clock.sleep(LOOK_EVERY_S)

    async def _session(self) -> None:
        """Wait for the lock, then copy until something goes wrong. Never returns but by an exception."""
        connection = await database.connect(self._database_url)
        try:
            await self._wait_for_lock(connection)
            self._set_active(True)
            await self._copy(connection)
        finally:
            self._set_active(False)
            # Not `close`, which waits for the server; the lock goes with the connection either way.
            connection.terminate()

    async def _wait_for_lock(self, connection: Any) -> None:
        while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", database.ACTIVE_LOCK):
            self.trouble = None
            await self._runtime.clock.sleep(LOOK_EVERY_S)

    async def _copy(self, connection: Any) -> None:
        opened = await self._open_log(connection)
        await self._announce(connection, opened)
        checkpoint, writer = opened.checkpoint, TableWriter(connection)
        models = await load(connection)
        feed = Feed(self._log, (self._runtime.subjects.all_events,))
        try:
            await feed.start(checkpoint.stream_seq, checkpoint.digest)
            while True:
                self._copied_seq = checkpoint.stream_seq
                try:
                    arrivals = await feed.batch(LOOK_EVERY_S)
                except Gap as gap:
                    checkpoint = await self._pass_gap(connection, checkpoint, gap)
                    await feed.start(checkpoint.stream_seq, checkpoint.digest)
                    continue
                self.trouble = None
                if arrivals:
                    checkpoint = await self._write(connection, writer, models, checkpoint, arrivals)
                else:
                    await connection.execute("SELECT 1")
        except WentBack:
            await logbook.begin_next(connection, self._stream, self._runtime.settings.pool, self._runtime.ids.next())
            raise
        finally:
            await feed.stop()

    async def _open_log(self, connection: Any) -> Opened:
        _, last_seq = await self._log.bounds()
        pool, spare_id = self._runtime.settings.pool, self._runtime.ids.next()
        opened = await logbook.open_newest(connection, self._stream, last_seq, pool, spare_id)
        self._logger.info("copying", log=str(opened.checkpoint.log), after_seq=opened.checkpoint.stream_seq)
        return opened

    async def _write(
        self, connection: Any, writer: TableWriter, models: ReadModels, after: Checkpoint, arrivals: Sequence[Arrival]
    ) -> Checkpoint:
        """One transaction. The folds are ahead of the database if it fails; then the session ends and they go with it."""
        begun_ns = self._runtime.clock.monotonic_ns()
        added = batch(models, after, arrivals, self._recorded_ids)
        try:
            async with connection.transaction():
                await writer.write_log(added)
                await writer.write_read_models(models)
        except asyncpg.UniqueViolationError:
            await self._learn_recorded_ids(
                connection, [link.record.id for rows in added.rows.values() for link in rows]
            )
            raise
        self._metrics.count(added, (self._runtime.clock.monotonic_ns() - begun_ns) / 1e9)
        return added.checkpoint

    async def _learn_recorded_ids(self, connection: Any, ids: Sequence[UUID | None]) -> None:
        """An id under a new number is a sender's fault: the next session records the message as a repeat."""
        rows = await connection.fetch(
            "SELECT id FROM decisions WHERE id = ANY($1::uuid[]) UNION SELECT id FROM block_events WHERE id = ANY($1::uuid[])",
            [each for each in ids if each is not None],
        )
        found = {row["id"] for row in rows} - self._recorded_ids
        assert found, "a row was refused as recorded already, but no id of the batch is in the record"
        self._recorded_ids |= found
        self._logger.error("ids recorded already under another number", ids=sorted(map(str, found)))

    async def _pass_gap(self, connection: Any, checkpoint: Checkpoint, gap: Gap) -> Checkpoint:
        """Returns the checkpoint behind the gap once an operator has accepted it."""
        self._logger.error("gap", log=str(checkpoint.log), from_seq=gap.from_seq, to_seq=gap.to_seq)
        while (behind := await logbook.accepted(connection, checkpoint, gap)) is None:
            self.trouble = f"{gap}; `vertumnus ledger accept-gap` goes on after them"
            await self._runtime.clock.sleep(LOOK_EVERY_S)
        self._logger.warning("gap accepted", log=str(checkpoint.log), from_seq=gap.from_seq, to_seq=behind.stream_seq)
        return behind

    async def _announce(self, connection: Any, opened: Opened) -> None:
        """Say `log-reset` in the new log, once: it may have been said before a crash."""
        if opened.predecessor is None:
            return
        checkpoint = opened.checkpoint
        recorded = "SELECT EXISTS (SELECT FROM decisions WHERE log = $1 AND type = 'log-reset')"
        reset = LogReset(
            old_log=str(opened.predecessor), new_log=str(checkpoint.log), old_last_seq=opened.predecessor_seq
        )
        last = await self._voice.last_said()
        said = last is not None and last.event is not None and last.event.data == reset
        if said or await connection.fetchval(recorded, checkpoint.log):
            return
        await self._voice.say(reset)
        self._logger.warning("log reset", **reset.model_dump())

    async def _is_gone(self) -> bool:
        """Whether the stream is another one; else it only went back or dropped messages, which a new session finds."""
        try:
            await self._log.bounds()
        except LogLost:
            return True
        except Unavailable:
            return False
        return False

    def _set_active(self, active: bool) -> None:
        self.active = active
        self._metrics.active.set(active)

    def _say(self, error: BaseException) -> None:
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self.trouble:
            self._logger.error("copy interrupted", error=trouble)
        self.trouble = trouble

    @property
    def _stream(self) -> UUID:
        return UUID(self._log.identity)
