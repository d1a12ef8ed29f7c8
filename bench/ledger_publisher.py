"""Publishes made-up traffic as the services would: one source per sender, atomic batches, each event once."""

from collections.abc import Iterable, Iterator
from itertools import islice

from bench.ledger_traffic import NODE, SENDERS, Told, Traffic
from shared.contracts.ids import Source
from shared.runtime.appending import Identity, Origin, Sealer, append_once, last_sequence
from shared.runtime.ports import APPEND_ENTRIES_MAX, Entry
from shared.runtime.service import Runtime


class Publisher:
    """The only writer of its subjects. `events` counts what the stream has acknowledged."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.events = 0
        self.last_seq = 0
        self._runtime = runtime
        self._last_on: dict[str, int] = {}
        self._sealers: dict[str, Sealer] = {}
        for sender in SENDERS:
            source = Source(f"{sender}-{name}")
            identity = Identity(runtime.settings.pool, source, NODE if sender == "worker" else source)
            self._sealers[sender] = Sealer(identity, runtime.subjects, runtime.clock, runtime.ids)

    def sealed(self, told: Iterable[Told]) -> list[Entry]:
        """What `append` takes. Told apart so that a measurement can leave it out."""
        entries = []
        for sender, fact, correlation in told:
            entries += [entry for _, entry in self._sealers[sender].seal([fact], Origin(correlation))]
        return entries

    async def append(self, entries: list[Entry]) -> None:
        """Store them in order, `APPEND_ENTRIES_MAX` at a time, for as long as the log is away."""
        runtime = self._runtime
        for start in range(0, len(entries), APPEND_ENTRIES_MAX):
            piece = entries[start : start + APPEND_ENTRIES_MAX]
            expected = {}
            for subject in {entry.subject for entry in piece}:
                if subject not in self._last_on:
                    self._last_on[subject] = await last_sequence(runtime.log, subject, runtime.clock)
                expected[subject] = self._last_on[subject]
            last = await append_once(runtime.log, piece, expected, runtime.clock)
            self._last_on |= {entry.subject: seq for seq, entry in enumerate(piece, last - len(piece) + 1)}
            self.events += len(piece)
            self.last_seq = last


def pieces(traffic: Traffic, requests: int) -> Iterator[list[Told]]:
    """The start of the pool and then `requests` requests, one after the other, in pieces of one append."""
    yield traffic.start()
    rows = (told for _ in range(requests) for told in traffic.request())
    while piece := list(islice(rows, APPEND_ENTRIES_MAX)):
        yield piece
