"""A service's state as the fold of the log: one ordered consumer over every subject the service needs, one cursor.

Each event is folded once: a (source, source_seq) that was folded is skipped, so a repeated append does no harm. A process's
own recorded events are folded when they are recorded (`outbox.py`), and so skipped when the consumer brings them back.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

from shared.contracts.codec import BadEvent, decode
from shared.contracts.envelope import Envelope, Stored
from shared.contracts.ids import Source
from shared.runtime.ports import EventLog, Tail

FOLD_WAIT_S = 10.0

S = TypeVar("S")
Evolve = Callable[[S, Stored], None]
Listener = Callable[[Stored], None]


class Projection(Generic[S]):
    """`state` is the log folded to `seen_seq`, plus what the process has recorded itself.

    `evolve` changes the state it owns and never refuses. `last_on` holds the last folded sequence per subject.
    """

    def __init__(self, log: EventLog, filters: Sequence[str], state: S, evolve: Evolve[S]) -> None:
        self.state = state
        self.log = log
        self.seen_seq = 0
        self.last_on: dict[str, int] = {}
        self.own_recorded: Source | None = None
        self._filters = tuple(filters)
        self._evolve = evolve
        self._listeners: list[Listener] = []
        self._folded_of: dict[Source, int] = {}
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._tail: Tail | None = None
        self._logger = structlog.get_logger("projection")

    async def start(self) -> None:
        """Fold what the log holds, then every new event. Returns when everything that was there is folded.

        Errors: Unavailable; TimeoutError if the log does not deliver.
        """
        lasts = [await self.log.last_on(each) for each in self._filters]
        self._tail = await self.log.tail(self._filters, self.seen_seq, self._deliver)
        await self.folded(max((found[0] for found in lasts if found), default=0))

    async def stop(self) -> None:
        """Nothing is folded after this returns."""
        if self._tail is not None:
            await self._tail.stop()

    async def failed(self) -> Exception:
        """Returns when the log can be followed no longer: the state is stale and the process must end."""
        assert self._tail is not None, "failed() before start()"
        return await self._tail.failed()

    async def folded(self, seq: int) -> None:
        """Returns when every event up to `seq` is folded. TimeoutError after 10 s without one of them."""
        if self.seen_seq >= seq:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((seq, reached))
        while not reached.done():
            seen = self.seen_seq
            await asyncio.wait([reached], timeout=FOLD_WAIT_S)
            if not reached.done() and self.seen_seq == seen:
                raise TimeoutError(f"the log delivered nothing for {FOLD_WAIT_S:g} s; at {seen}, waiting for {seq}")

    def listen(self, listener: Listener) -> None:
        """Call `listener` after each event the consumer brings, own recorded ones included. For effects, not for state."""
        self._listeners.append(listener)

    def fold_own(self, event: Envelope) -> None:
        """Fold an event of this process before it is stored (`stream_seq` 0)."""
        self._evolve(self.state, Stored(self.log.identity, 0, event))

    def _deliver(self, subject: str, seq: int, raw: bytes) -> None:
        self.seen_seq = seq
        self.last_on[subject] = seq
        try:
            self._fold(Stored(self.log.identity, seq, decode(raw)))
        except BadEvent as error:
            # The ledger keeps its bytes; nobody folds it. Going on is right: stopping would stop every service at once.
            self._logger.error("unreadable event", stream_seq=seq, subject=subject, error=str(error)[:200])
        self._wake(seq)

    def _fold(self, stored: Stored) -> None:
        event = stored.event
        if event.source_seq <= self._folded_of.get(event.source, 0):
            return
        self._folded_of[event.source] = event.source_seq
        if event.source != self.own_recorded:
            self._evolve(self.state, stored)
        for listener in self._listeners:
            listener(stored)

    def _wake(self, seq: int) -> None:
        if not self._waiters:
            return
        for wanted, reached in self._waiters:
            if seq >= wanted and not reached.done():
                reached.set_result(None)
        self._waiters = [(wanted, reached) for wanted, reached in self._waiters if not reached.done()]
