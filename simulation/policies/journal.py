"""The log of a simulation: facts get their number and are told to whoever folds them, at once or a while later."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from uuid import UUID

from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.ids import Source
from simulation.policies.agenda import NS_PER_S, Agenda

POOL, LOG = "simulated", "simulated"

NO_ID = UUID(int=0)
"""No fold reads an event's id: the log is in order and nothing is repeated."""


class _Said(NamedTuple):
    """An `Envelope` to whoever folds it, and a real one once it is copied to be written somewhere. Nothing comes from outside
    here, so nothing is validated before."""

    id: UUID
    type: str
    version: int
    pool: str
    source: Source
    source_seq: int
    time_ns: int
    data: EventData
    correlation: str | None = None
    causation: UUID | None = None
    traceparent: str | None = None

    def model_copy(self, *, update: Mapping[str, Any]) -> Envelope:
        return Envelope(**{**self._asdict(), **update})


Fold = Callable[[Any, Stored], None]


class View:
    """A folded state that its `owners` keep up with at once, and the rest of the log with `age_s` later.

    What is due is folded when the view is next looked at, which makes no difference to anybody.
    """

    def __init__(self, agenda: Agenda, state: Any, fold: Fold, owners: frozenset[Source], age_s: float) -> None:
        self._agenda = agenda
        self._state = state
        self._fold = fold
        self._owners = owners
        self._age_ns = round(age_s * NS_PER_S)
        self._coming: deque[Stored] = deque()
        self.seen_seq = 0

    def tell(self, stored: Stored) -> None:
        """One more event of the log."""
        if not self._age_ns:
            self.seen_seq = stored.stream_seq
            self._fold(self._state, stored)
        elif stored.event.source in self._owners:
            self._fold(self._state, stored._replace(stream_seq=0))
        else:
            self._coming.append(stored)

    def look(self) -> Any:
        """The state as it is known by now."""
        return self._known_at(self._agenda.now_ns - self._age_ns)

    def settle(self) -> Any:
        """The state when everything has come that is on its way."""
        return self._known_at(self._agenda.now_ns)

    def _known_at(self, due_ns: int) -> Any:
        while self._coming and self._coming[0].event.time_ns <= due_ns:
            stored = self._coming.popleft()
            self.seen_seq = stored.stream_seq
            self._fold(self._state, stored)
        return self._state


class Journal:
    """Everybody who listens is told everything, in order. A listener says something more only in a later call of `say`."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._listeners: list[Callable[[Stored], None]] = []
        self._of_source: Counter[Source] = Counter()
        self.events = 0

    def listen(self, listener: Callable[[Stored], None]) -> None:
        """Be told of each fact from now on, after those who listen already."""
        self._listeners.append(listener)

    def say(self, source: Source, facts: Sequence[EventData], own: Callable[[Stored], None] | None = None) -> None:
        """Store facts of one source, in order. `own` is told each before anybody else, as not stored yet."""
        now_ns = self._agenda.now_ns
        for data in facts:
            self.events += 1
            self._of_source[source] += 1
            said = _Said(NO_ID, data.TYPE, data.VERSION, POOL, source, self._of_source[source], now_ns, data)
            envelope = cast(Envelope, said)
            if own is not None:
                own(Stored(LOG, 0, envelope))
            stored = Stored(LOG, self.events, envelope)
            for listener in self._listeners:
                listener(stored)
