"""The ledger's place in a world without Postgres: rows in stream order behind a checkpoint that outlives its processes."""

from typing import NamedTuple

from services.ledger.records import Arrival
from simulation.faults.process import Process
from simulation.faults.roles import Service


class Copier(NamedTuple):
    """A ledger at work."""

    copied: "Record"


class Record:
    """What the database holds. A message is copied once, whoever copies it."""

    def __init__(self) -> None:
        self.rows: list[Arrival] = []

    @property
    def checkpoint(self) -> int:
        return self.rows[-1].stream_seq if self.rows else 0

    async def host(self, process: Process, subject: str) -> Service:
        """Copy from the checkpoint on. Errors: Unavailable."""
        tail = await process.log.tail([subject], self.checkpoint, self._take)
        return Service(Copier(self), [tail.failed()], tail.stop)

    def _take(self, _subject: str, seq: int, raw: bytes) -> None:
        assert seq == self.checkpoint + 1, f"the ledger got {seq} after {self.checkpoint}"
        self.rows.append(Arrival(seq, raw))
