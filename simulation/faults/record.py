"""The ledger's place in a world without Postgres: its own batches, chains and read models, committed to tables in memory.

What is left out is the database: rows are in lists, and the lock of the active ledger is a number. As `services.ledger.copier`
does, a session that anything goes wrong in ends, and the next one starts from what the database says.
"""

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from services.ledger.audit import Audit, Examiner
from services.ledger.batches import Batch, Checkpoint, Link, batch
from services.ledger.patches import Place
from services.ledger.promises import Dropped, Published
from services.ledger.reading import LogInfo, LogRow
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES, Arrival, LogTable, Record
from shared.runtime.ports import Unavailable
from simulation.faults.distant import ask
from simulation.faults.process import Process
from simulation.faults.roles import Service

LOG = UUID(int=1)

BATCH_EVERY_S = 0.05
"""Between two transactions; whatever has arrived in the meantime is one batch."""

NEXT_SESSION_S = 1.0


class Tables:
    """What the database holds. `away` counts the faults that keep it from answering."""

    def __init__(self) -> None:
        self.rows: dict[LogTable, list[Link]] = {table: [] for table in LOG_TABLES}
        self.checkpoint = Checkpoint(LOG, 1, 0, b"", dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN))
        self.away = 0
        self._session = 0
        self._folded = ReadModels()
        self._unfolded: list[Record] = []

    async def host(self, process: Process, subject: str) -> Service:
        """A ledger at work, from the checkpoint on."""
        copier = Copier(self, process, subject)
        work = process.run(copier.run())

        async def stop() -> None:
            work.cancel()

        return Service(copier, [asyncio.shield(work)], stop)

    # --- as its sessions see it

    async def open(self) -> int:
        """The lock of the active ledger, for a new session: whoever had it before has lost it. Errors: Unavailable."""
        self._answer()
        self._session += 1
        return self._session

    async def commit(self, session: int, added: Batch) -> None:
        """One transaction. Errors: Unavailable, also for a session whose connection is gone with its lock."""
        self._answer()
        if session != self._session:
            raise Unavailable(f"session {session} has lost its lock")
        for table, links in added.rows.items():
            self.rows[table] += links
            self._unfolded += [link.record for link in links if table != "repeats"]
        self.checkpoint = added.checkpoint

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("the database is away")

    # --- as its readers see it

    def in_order(self) -> list[tuple[LogTable, Link]]:
        """Every row, as the stream had them."""
        rows = [(table, link) for table, links in self.rows.items() for link in links]
        return sorted(rows, key=lambda row: row[1].record.stream_seq)

    def models(self) -> ReadModels:
        """The read models of what is recorded."""
        for record in sorted(self._unfolded, key=lambda record: record.stream_seq):
            evolve(self._folded, str(LOG), Place(1, record.stream_seq), record)
        self._unfolded.clear()
        self._folded.take()
        return deepcopy(self._folded)

    def audit(self) -> Audit:
        """`vertumnus verify --chain` of the rows."""
        examiner = Examiner(Published(()), Dropped(()))
        at = self.checkpoint
        examiner.begin(LogInfo(LOG, 1, None, None, at.stream_seq, dict(at.heads), ()))
        for table, (record, chain) in self.in_order():
            examiner.row(LogRow(table, record.stream_seq, record.raw, chain, {"id": record.id, "type": record.type}))
        examiner.end()
        return examiner.verdict(settled=True)


@dataclass(slots=True)
class Copier:
    """A ledger's process. `models` are None between two sessions."""

    record: Tables
    process: Process
    subject: str
    models: ReadModels | None = None
    _arrived: list[Arrival] = field(default_factory=list)

    async def run(self) -> Exception:
        """Session after session, for as long as the process lives."""
        while True:
            try:
                await self._session()
            except Unavailable:
                self.models = None
            await self.process.clock.sleep(NEXT_SESSION_S)

    async def _session(self) -> None:
        """Never returns but by an exception. Errors: Unavailable."""
        session = await ask(self.process.link, self.record.open, writes=True)
        checkpoint, self.models, self._arrived = self.record.checkpoint, self.record.models(), []
        tail = await self.process.log.tail([self.subject], checkpoint.stream_seq, self._take)
        try:
            while True:
                await self.process.clock.sleep(BATCH_EVERY_S)
                if self._arrived:
                    checkpoint = await self._write(session, self.models, checkpoint, self._taken())
        finally:
            await tail.stop()

    async def _write(
        self, session: int, models: ReadModels, after: Checkpoint, arrivals: Sequence[Arrival]
    ) -> Checkpoint:
        added = batch(models, after, arrivals, ())
        models.take()
        await ask(self.process.link, partial(self.record.commit, session, added), writes=True)
        return added.checkpoint

    def _take(self, _subject: str, seq: int, raw: bytes) -> None:
        self._arrived.append(Arrival(seq, raw))

    def _taken(self) -> list[Arrival]:
        taken, self._arrived = self._arrived, []
        return taken
