"""A service's state as the fold of the log: one ordered consumer over every subject the service needs, one cursor.

Each event is folded once: a (source, source_seq) that was folded is skipped, so a repeated append does no harm. A process's
own recorded events are folded when they are recorded (`outbox.py`), and so skipped when the consumer brings them back.

A state that was kept (`snapshots.py`) is gone on from by `resume`; who does not has the log's beginning to fold.

The log drops old events. Given a keepsake, a projection folds what is kept of those that lie before the log's first one, and
then everything the log has: requests and blocks as far back as it goes.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from shared.contracts.codec import BadEvent, decode_at
from shared.contracts.envelope import Envelope, Stored
from shared.contracts.ids import Source
from shared.runtime.keepsake import recall
from shared.runtime.ports import Cell, EventLog, LogLost, Tail

CATCH_UP_SILENCE_S = 10.0
"""At start: a log that delivers nothing for so long, although there is more, is broken."""

OWN_MAX = 256
"""Own events on their way to the log and back that need not be read again: more than come in a tenth of a second."""

S = TypeVar("S")
Evolve = Callable[[S, Stored], None]
Listener = Callable[[Stored], None]


class Place(NamedTuple):
    """The newest folded event of one source: its number, and where it lies in the log."""

    source_seq: int
    stream_seq: int


NOWHERE = Place(0, 0)


class Reached(NamedTuple):
    """How far a fold has come, and with what it began: all that a projection knows besides its state."""

    seen_seq: int
    first_seq: int
    kept_events: int
    last_on: dict[str, int]
    last_of: dict[Source, Place]


class Projection(Generic[S]):
    """`state` is the log folded to `seen_seq`, plus what the process has recorded itself.

    `evolve` changes the state it owns and never refuses. `last_on` holds the last folded sequence per subject, `first_seq` is
    the log's first one when the fold began, `kept_events` how many were folded that it had dropped, `folded_events` how many of
    the log this process has folded itself.
    """

    def __init__(
        self, log: EventLog, filters: Sequence[str], state: S, evolve: Evolve[S], keepsake: Cell | None = None
    ) -> None:
        self.state = state
        self.log = log
        self.seen_seq = 0
        self.first_seq = 1
        self.kept_events = 0
        self.folded_events = 0
        self.last_on: dict[str, int] = {}
        self.own_recorded: Source | None = None
        self._filters = tuple(filters)
        self._evolve = evolve
        self._keepsake = keepsake
        self._own: dict[bytes, Envelope] = {}
        self._listeners: list[Listener] = []
        self._last_of: dict[Source, Place] = {}
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._tail: Tail | None = None
        self._resumed = False
        self._logger = structlog.get_logger(component="projection")

    async def start(self) -> None:
        """Fold what the log holds, then every new event. Returns when everything that was there is folded.

        Errors: Unavailable; LogLost; BadKeepsake; TimeoutError after 10 s in which the log delivered nothing; whatever
        `evolve` raised.
        """
        needed_seq = self.seen_seq + 1 if self._resumed else None
        if self._keepsake is not None and not self._resumed:
            needed_seq = await self._recall(self._keepsake)
        lasts = [await self.log.last_on(each) for each in self._filters]
        self._tail = await self.log.tail(self._filters, self.seen_seq, self._deliver)
        if needed_seq is not None:
            await self._check_nothing_slipped(needed_seq)
        await self._catch_up(max((found[0] for found in lasts if found), default=0))

    def resume(self, reached: Reached) -> None:
        """Go on behind what the state has folded already, which is all up to `reached`. Before `start`, which then raises
        LogLost if the log no longer has what follows."""
        assert self._tail is None, "a projection resumes before it starts"
        self._resumed = True
        self.seen_seq, self.first_seq, self.kept_events = reached.seen_seq, reached.first_seq, reached.kept_events
        self.last_on, self._last_of = reached.last_on.copy(), reached.last_of.copy()

    @property
    def reached(self) -> Reached:
        """What `resume` needs, besides the state."""
        return Reached(self.seen_seq, self.first_seq, self.kept_events, self.last_on.copy(), self._last_of.copy())

    async def stop(self) -> None:
        """Nothing is folded after this returns."""
        if self._tail is not None:
            await self._tail.stop()

    async def failed(self) -> Exception:
        """Returns when the log can be followed no longer: the state is stale and the process must end."""
        assert self._tail is not None, "failed() before start()"
        return await self._tail.failed()

    async def folded(self, seq: int) -> None:
        """Returns when every event up to `seq`, the place of one that the filters let through, is folded.

        Waits for as long as the log is away.
        """
        if self.seen_seq < seq:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((seq, reached))
            await reached

    def last_of(self, source: Source) -> Place:
        """The newest folded event of `source`; number 0 for none."""
        return self._last_of.get(source, NOWHERE)

    def listen(self, listener: Listener) -> None:
        """Call `listener` after each event the consumer brings, own recorded ones included. For effects, not for state."""
        self._listeners.append(listener)

    def fold_own(self, event: Envelope, raw: bytes) -> None:
        """Fold an event of this process before it is stored (`stream_seq` 0). When the log brings its bytes, `raw`, it is known
        what they say."""
        self._evolve(self.state, Stored(self.log.identity, 0, event))
        self._own[raw] = event
        if len(self._own) > OWN_MAX:
            del self._own[next(iter(self._own))]

    async def _recall(self, keepsake: Cell) -> int | None:
        """Fold the kept events that the log has dropped; listeners hear of the log's own alone. Returns the first
        of the others, which the log has to have when it is read."""
        recalled = await recall(keepsake, self.log.identity)
        first_seq, _ = await self.log.bounds()
        if recalled.seen_seq < first_seq - 1:
            self._logger.error("dropped events are not kept", from_seq=recalled.seen_seq + 1, to_seq=first_seq - 1)
        for stored in recalled.events:
            if stored.stream_seq < first_seq:
                self.kept_events += 1
                self._note(stored)
                self._evolve(self.state, stored)
        # A decision on an empty log has seen what is kept: its assignments are not older than a kept loss of their node.
        self.seen_seq = max(self.seen_seq, first_seq - 1)
        self.first_seq = first_seq
        return next((stored.stream_seq for stored in recalled.events if stored.stream_seq >= first_seq), None)

    async def _check_nothing_slipped(self, needed_seq: int) -> None:
        """LogLost if the log has dropped this event in the meantime: the tail may have begun behind it."""
        first_seq, _ = await self.log.bounds()
        if needed_seq < first_seq:
            raise LogLost(f"the log dropped {needed_seq} while this process started")

    async def _catch_up(self, there: int) -> None:
        reached = asyncio.ensure_future(self.folded(there))
        failed = asyncio.ensure_future(self.failed())
        first: list[asyncio.Future[Any]] = [reached, failed]
        try:
            while not reached.done():
                seen = self.seen_seq
                await asyncio.wait(first, timeout=CATCH_UP_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    raise failed.result()
                if not reached.done() and self.seen_seq == seen:
                    raise TimeoutError(f"folded to {seen}, the log holds {there}, but delivers nothing")
        finally:
            for each in first:
                each.cancel()

    def _deliver(self, subject: str, seq: int, raw: bytes) -> None:
        self.seen_seq = seq
        self.last_on[subject] = seq
        own = self._own.pop(raw, None)
        try:
            self._fold(Stored(self.log.identity, seq, own or decode_at(subject, raw)))
        except BadEvent as error:
            # The ledger keeps its bytes; nobody folds it. Going on is right: stopping would stop every service at once.
            self._logger.error("unreadable event", stream_seq=seq, subject=subject, error=str(error)[:200])
        self._wake(seq)

    def _fold(self, stored: Stored) -> None:
        event = stored.event
        if event.source_seq <= self.last_of(event.source).source_seq:
            return
        self._note(stored)
        self.folded_events += 1
        if event.source != self.own_recorded:
            self._evolve(self.state, stored)
        for listener in self._listeners:
            listener(stored)

    def _note(self, stored: Stored) -> None:
        self._last_of[stored.event.source] = Place(stored.event.source_seq, stored.stream_seq)

    def _wake(self, seq: int) -> None:
        if not self._waiters:
            return
        for wanted, reached in self._waiters:
            if seq >= wanted and not reached.done():
                reached.set_result(None)
        self._waiters = [(wanted, reached) for wanted, reached in self._waiters if not reached.done()]
