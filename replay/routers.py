"""Router processes as they were: the state that each of their decisions was made on, and that decision made again.

A router decides on the log folded to `seen_seq` plus its own events so far, which it folds when it records them. The order
between those two makes no difference to a decision (`services/router/loads.py`), so a state is rebuilt like this: its own
events in their order, and before each decision the events of everybody else up to what the decision has seen.
"""

from collections import deque
from collections.abc import Callable, Collection
from copy import deepcopy
from typing import NamedTuple

from replay.freezing import EARLIER
from services.router import decider, turns
from services.router.decider import Arrival, Moment, State
from services.router.placement import Question
from services.router.roster import DIGEST_VERSION
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import (
    ENDS,
    RequestAssigned,
    RequestHeld,
    RequestReceived,
    RequestRedirected,
    RequestRejected,
)
from shared.contracts.ids import RequestId, Source, unpack_block_ids
from shared.model.holders import Holders

BACKLOG_EVENTS_MAX = 20_000
"""How far a router may lag behind the log when it decides: twice what its outbox holds. What is older is folded."""

TOO_OLD = f"the router had seen less than all but the last {BACKLOG_EVENTS_MAX:,} events"
HOLE = "events before it are missing"
DROPPED = "block events before it were dropped by policy"


class Decided(NamedTuple):
    """A decision of the record, and what the router's code decides on the same state. `derived` is None if that state cannot be
    rebuilt, for the reason in `why_not`. `question` is what a placement answered."""

    recorded: Stored
    derived: list[EventData] | None
    why_not: str = ""
    state: State | None = None
    question: Question | None = None


Judge = Callable[[Decided], None]


class Backlog:
    """The newest events of the log, for routers that lag behind. Positions count from the first event."""

    def __init__(self) -> None:
        self._events: deque[Stored] = deque()
        self.end = 0

    @property
    def begin(self) -> int:
        return self.end - len(self._events)

    def append(self, stored: Stored) -> None:
        self._events.append(stored)
        self.end += 1

    def at(self, position: int) -> Stored:
        return self._events[position - self.begin]

    def drop_first(self) -> Stored:
        return self._events.popleft()

    def __len__(self) -> int:
        return len(self._events)


class RouterReplica:
    """One router process. Give it its own events in order."""

    def __init__(self, source: Source, state: State, backlog: Backlog, judge: Judge) -> None:
        self.source = source
        self.state = state
        self.broken: str | None = None
        """Why nothing more can be derived from this state."""
        self.position = backlog.end
        self._backlog = backlog
        self._judge = judge
        self._folded_seq = self._begins_seq = 0
        self._undecided: set[RequestId] = set()
        self._unsure: set[tuple[RequestId, int]] | None = None
        """Attempts that ran when caches were known again: blocks that they had stored by then are missing from the loads."""
        self._received: Stored | None = None
        """A request whose placement is the next own event: both were decided at once."""

    def own(self, stored: Stored, wanted: bool = True) -> None:
        """The next event of this router. `wanted`: if it is a decision, it is derived."""
        received, self._received = self._received, None
        self._recover()
        if not wanted and not isinstance(stored.data, RequestReceived):
            self._skip(received, stored)
            return
        match stored.data:
            case RequestReceived():
                self._received = stored
                return
            case RequestAssigned() | RequestRejected() | RequestHeld() as data if data.request in self._undecided:
                self._undecided.discard(data.request)
                self._told(stored, None)
            case RequestAssigned() | RequestRejected() | RequestHeld() if received is not None:
                self._first_decision(received, stored)
                self._fold_own(received.event)
            case RequestAssigned() | RequestRejected() as data if data.request in self.state.usage.waits:
                self._turn(stored, data)
            case RequestAssigned(attempt=attempt) if attempt > 1:
                self._next_decision(stored, stored.data)
            case RequestAssigned() | RequestRejected() | RequestHeld():
                self._told(stored, [])
            case RequestRedirected() as data:
                redirected = decider.redirect(
                    self.state, data.request, data.attempt, data.reason, node_silent=data.node_silent
                )
                self._told(stored, redirected[:1])
            case ended if isinstance(ended, ENDS) and not isinstance(ended, RequestRejected):
                self._told(stored, decider.end(self.state, ended))
            case _:
                pass
        self._fold_own(stored.event)

    def begin_at(self, seq: int, undecided: Collection[RequestId]) -> None:
        """The state is that of the log up to `seq`, own events included. `undecided`: received by then, and not placed."""
        self._begins_seq = self._folded_seq = seq
        self._undecided = set(undecided)

    @property
    def pending(self) -> list[Stored]:
        """What lies before and is not folded yet."""
        others = (
            self._backlog.at(position) for position in range(max(self.position, self._backlog.begin), self._backlog.end)
        )
        received = [Stored("", 0, self._received.event)] if self._received is not None else []
        return [*(each for each in others if each.event.source != self.source), *received]

    @property
    def undecided(self) -> set[RequestId]:
        """Requests that were received, and whose placement is the next event."""
        waits = isinstance(self._received.data, RequestReceived) if self._received is not None else False
        return {*self._undecided, *([self._received.data.request] if waits else [])}  # type: ignore[union-attr]

    def _skip(self, received: Stored | None, stored: Stored) -> None:
        """Fold it without deciding anything again."""
        if isinstance(stored.data, RequestAssigned):
            self._see(stored.data.seen_seq)
        for each in (received, stored):
            if each is not None:
                self._fold_own(each.event)

    def fall_behind(self, stored: Stored) -> None:
        """The backlog drops its oldest event, `stored`: fold it if that was not done yet."""
        if self.position < self._backlog.begin:
            self._fold_other(stored)
            self.position = self._backlog.begin

    def lose_blocks(self) -> None:
        """Block events went by policy here."""
        self.broken, self._unsure = self.broken or DROPPED, None

    def regain_blocks(self, held: Holders) -> None:
        """Take what workers held here, and believe it once what runs now has ended.

        Unless this router knew nothing of a worker's cache: whether it had been told by then went with the dropped events.
        """
        while self.position < self._backlog.end:
            self._fold_other(self._backlog.at(self.position))
            self.position += 1
        holders = self.state.holders
        if any(each.trust == "blind" and held.trust(worker) != "blind" for worker, each in holders.workers.items()):
            return
        known = deepcopy(held)
        holders.workers, holders.index = known.workers, known.index
        self._unsure = self._running()

    def _recover(self) -> None:
        if self.broken == DROPPED and self._unsure is not None:
            self._unsure &= self._running()
            if not self._unsure:
                self.broken = self._unsure = None

    def _running(self) -> set[tuple[RequestId, int]]:
        return {
            (request, each.attempt)
            for request, each in self.state.loads.open.items()
            if each.assignment is not None and each.assignment.started and not each.assignment.prefilled
        }

    def _first_decision(self, received: Stored, stored: Stored) -> None:
        asked = received.data
        assert isinstance(asked, RequestReceived), "what is kept as received was received"
        now_ns = getattr(stored.data, "now_ns", None) or stored.event.time_ns
        chain = tuple(unpack_block_ids(asked.block_ids))
        if not self._see(asked.seen_seq):
            self._told(stored, None)
            return
        question = Question(asked.prompt_tokens, chain, now_ns)
        moment = Moment(now_ns, asked.seen_seq, getattr(stored.data, "digest_version", DIGEST_VERSION))
        arrival = Arrival(
            request=asked.request,
            tenant=asked.tenant,
            model=asked.model,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
            slo_us=asked.slo_us,
            stream=asked.stream,
            chain=chain,
            client_digest=asked.client_digest,
            placed_only=asked.placed_only,
            hard_slo=asked.hard_slo,
            priority=asked.priority,
        )
        self._told(stored, decider.receive(self.state, arrival, moment), question)

    def _next_decision(self, stored: Stored, data: RequestAssigned) -> None:
        opened = self.state.loads.open.get(data.request)
        if opened is None or not self._see(data.seen_seq):
            self._told(stored, None if opened else [])
            return
        generated_tokens = data.uncached_tokens + data.cached_tokens - opened.prompt_tokens
        question = Question.again(opened, self.state.holders.chains[data.request], generated_tokens, data.now_ns)
        moment = Moment(data.now_ns, data.seen_seq, data.digest_version)
        self._told(stored, decider.assign_again(self.state, data.request, generated_tokens, moment), question)

    def _turn(self, stored: Stored, data: RequestAssigned | RequestRejected) -> None:
        """Whose turn it was, or whose time was up."""
        assert data.seen_seq is not None and data.now_ns is not None, "a turn says when"  # noqa: PT018
        prompt_tokens = self.state.loads.open[data.request].prompt_tokens
        question = Question(prompt_tokens, self.state.holders.chains[data.request], data.now_ns)
        if not self._see(data.seen_seq):
            self._told(stored, None)
            return
        moment = Moment(data.now_ns, data.seen_seq, getattr(data, "digest_version", DIGEST_VERSION))
        derived: list[EventData] = [*turns.next_turn(self.state, self.source, moment)]
        if data not in derived and isinstance(data, RequestRejected):
            derived = [*turns.overdue(self.state, self.source, moment)]
        self._told(stored, derived, question if isinstance(data, RequestAssigned) else None)

    def _told(self, stored: Stored, derived: list[EventData] | None, question: Question | None = None) -> None:
        too_old = EARLIER if self._folded_seq == self._begins_seq else TOO_OLD
        why_not = self.broken or ("" if derived is not None else too_old)
        self._judge(Decided(stored, None if why_not else derived, why_not, self.state, question))

    def _see(self, seq: int) -> bool:
        """Fold the others up to `seq`; False if more than that was folded already."""
        if self._folded_seq > seq:
            return False
        while self.position < self._backlog.end and (stored := self._backlog.at(self.position)).stream_seq <= seq:
            self._fold_other(stored)
            self.position += 1
        return True

    def _fold_other(self, stored: Stored) -> None:
        if stored.event.source != self.source:
            decider.evolve(self.state, stored)
        self._folded_seq = stored.stream_seq

    def _fold_own(self, event: Envelope) -> None:
        decider.evolve(self.state, Stored("", 0, event))
