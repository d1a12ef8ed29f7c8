import random
from collections.abc import AsyncIterator, Iterable

import pytest

from bench.ledger_publisher import pieces
from bench.ledger_traffic import NODE, SENDERS, Told, Traffic
from services.ledger.records import Arrival
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Identity, Origin, Sealer
from shared.runtime.clock import Ids
from shared.runtime.memory import ManualClock
from tests.services.ledger.record_writer import RecordWriter


class Seals:
    """Published bytes of made-up facts, in a stream of their own."""

    def __init__(self, seed: int = 0, first_seq: int = 1) -> None:
        clock = ManualClock()
        ids = Ids(clock, random.Random(seed))
        self._next_seq = first_seq
        self._sealers = {
            sender: Sealer(
                Identity("main", Source(f"{sender}-1-{seed}"), NODE if sender == "worker" else sender),
                Subjects("main"),
                clock,
                ids,
            )
            for sender in SENDERS
        }

    def arrivals(self, told: Iterable[Told]) -> list[Arrival]:
        found = []
        for sender, fact, correlation in told:
            for _, entry in self._sealers[sender].seal([fact], Origin(correlation)):
                found.append(self.arrival(entry.payload))
        return found

    def arrival(self, raw: bytes) -> Arrival:
        self._next_seq += 1
        return Arrival(self._next_seq - 1, raw)


@pytest.fixture
def seals() -> Seals:
    return Seals()


def story(seals: Seals, requests: int, seed: int = 1) -> list[Arrival]:
    """A pool's start and `requests` requests."""
    return seals.arrivals(told for piece in pieces(Traffic(seed), requests) for told in piece)


@pytest.fixture
async def writer(record_url: str) -> AsyncIterator[RecordWriter]:
    """An empty record, ready to be written."""
    writing = RecordWriter(record_url)
    await writing.restart()
    yield writing
    await writing.close()
