"""Every router process of one log, from where its fold began to where the log has forgotten it."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

from replay.beginnings import Beginning, Past, Registration
from replay.freezing import EARLIER, Fold, Frozen
from replay.routers import BACKLOG_EVENTS_MAX, DROPPED, HOLE, Backlog, Decided, Judge, RouterReplica
from services.router import decider
from services.router.decider import State
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    RequestAssigned,
    RequestHeld,
    RequestRedirected,
    RequestRejected,
    RouterLost,
    RouterRegistered,
)
from shared.contracts.ids import RequestId, Source
from shared.model.holders import Holders
from shared.runtime.states import BadState

UNSAID = "the router did not say what it began with"

DECISIONS = frozenset({RequestAssigned, RequestHeld, RequestRedirected, RequestRejected})


class Routers:
    """Give it every event of a log in order. `past` has folded what lies before it; `judge` is told of each decision, in the
    order of the log.

    Processes that began alike share one fold until they have registered: from then on each has decisions of its own. Those of
    which `mine` is false are not folded: somebody else judges their decisions.
    """

    def __init__(
        self,
        registrations: Sequence[Registration],
        past: Past,
        judge: Judge,
        mine: Callable[[Source], bool] = lambda _: True,
    ) -> None:
        self._judge = judge
        self._mine = mine
        self._past = past
        self._backlog = Backlog()
        self._waiting = [each for each in registrations if each.begun.cost_model() is not None and mine(each.source)]
        self._shared: dict[Beginning, State] = {}
        self._begun = {each.source: each.begun for each in self._waiting}
        self._begins_seq = 0
        self._replicas: dict[Source, RouterReplica] = {}
        self._without_blocks: set[Beginning] = set()
        self._after_hole = False

    def begin_at(self, frozen: Frozen) -> None:
        """Begin with what was kept. Errors: BadState."""
        seq = frozen.stream_seq
        for each in list(self._waiting):
            if each.begun.first_seq > seq:
                continue
            kept = frozen.fold_of(each.kind, each.begun)
            if each.source in frozen.living and kept is not None:
                self._waiting.remove(each)
                replica = self._replica(each, _folded(kept))
                replica.begin_at(seq, frozen.undecided)
            elif (each.seen_seq < seq and each.source not in frozen.living) or kept is None:
                self._waiting.remove(each)
            elif each.begun not in self._shared:
                self._shared[each.begun] = _folded(kept)
        self._begins_seq = seq

    def resume(self, frozen: Frozen) -> None:
        """Who was in doubt for want of block events goes on with what was kept. Errors: BadState."""
        for begun in list(self._without_blocks & self._shared.keys()):
            if (kept := frozen.fold_of(RouterRegistered.TYPE, begun)) is not None:
                self._shared[begun] = _folded(kept)
                self._without_blocks.discard(begun)
        for source, replica in list(self._replicas.items()):
            kept = frozen.fold_of(RouterRegistered.TYPE, self._begun[source])
            if replica.broken == DROPPED and source in frozen.living and kept is not None:
                again = self._replicas[source] = RouterReplica(source, _folded(kept), self._backlog, self._judge)
                again.begin_at(frozen.stream_seq, frozen.undecided)

    def folds(self) -> Iterator[tuple[Beginning, State, list[Stored]]]:
        """Every way to begin, with a state of it and what that has not folded. None where events are missing before."""
        told = set[Beginning]()
        for begun, state in self._shared.items() if not self._after_hole else ():
            if begun not in self._without_blocks:
                told.add(begun)
                yield begun, state, []
        for source, replica in self._replicas.items():
            begun = self._begun[source]
            if begun not in told and replica.broken is None:
                told.add(begun)
                yield begun, replica.state, replica.pending

    @property
    def living(self) -> frozenset[Source]:
        """The router processes that may still decide."""
        return frozenset(self._replicas)

    @property
    def undecided(self) -> frozenset[RequestId]:
        """Requests between their receipt and their placement."""
        return frozenset(each for replica in self._replicas.values() for each in replica.undecided)

    def fold(self, stored: Stored, wanted: bool = True) -> None:
        """The next event. `wanted`: if it is a decision, it is derived."""
        if self._waiting:
            self._begin(stored.stream_seq)
            self._register(stored.stream_seq)
        for state in self._shared.values():
            decider.evolve(state, stored)
        self._backlog.append(stored)
        if replica := self._replicas.get(stored.event.source):
            replica.own(stored, wanted)
        elif wanted and type(stored.data) in DECISIONS and self._mine(stored.event.source):
            began = self._begins_seq and stored.event.source in self._begun
            self._judge(Decided(stored, None, EARLIER if began else UNSAID))
        if len(self._backlog) > BACKLOG_EVENTS_MAX:
            self._forget_oldest()

    def miss(self) -> None:
        """Events are missing here: what is folded from now on is not what the routers folded."""
        self._after_hole = True
        for replica in self._replicas.values():
            replica.broken = HOLE

    def lose_blocks(self) -> None:
        """Block events went by policy here. Folds that begin later take caches for unknown, as their processes did."""
        self._without_blocks |= self._shared.keys()
        for replica in self._replicas.values():
            replica.lose_blocks()

    def regain_blocks(self, held: Holders) -> None:
        """What workers held here is known again."""
        for replica in self._replicas.values():
            if replica.broken == DROPPED:
                replica.regain_blocks(held)

    def check(self) -> None:
        """Every state agrees with itself. AssertionError says where it does not."""
        for replica in self._replicas.values():
            replica.state.loads.check()
            replica.state.holders.check()
            replica.state.usage.check(replica.state.loads)

    def _begin(self, seq: int) -> None:
        """Begin the folds whose first event this is."""
        for each in self._waiting:
            if each.begun.first_seq <= seq and each.begun not in self._shared:
                coefficients = each.begun.cost_model()
                assert coefficients is not None, "only those wait that said"
                state = self._shared[each.begun] = decider.initial(coefficients)
                for kept in self._past.kept(each.begun):
                    decider.evolve(state, kept)

    def _register(self, seq: int) -> None:
        """Take the processes out of the shared folds that had seen what is folded now when they registered."""
        for each in [each for each in self._waiting if each.seen_seq < seq]:
            self._waiting.remove(each)
            state = self._shared[each.begun]
            if any(other.begun == each.begun for other in self._waiting):
                state = deepcopy(state)
            else:
                del self._shared[each.begun]
            replica = self._replica(each, state)
            if each.begun.first_seq <= self._begins_seq:
                replica.begin_at(self._begins_seq, ())
            replica.broken = HOLE if self._after_hole else DROPPED if each.begun in self._without_blocks else None

    def _replica(self, registered: Registration, state: State) -> RouterReplica:
        source = registered.source
        replica = self._replicas[source] = RouterReplica(source, state, self._backlog, self._judge)
        return replica

    def _forget_oldest(self) -> None:
        """A router that was lost so long ago writes nothing more."""
        oldest = self._backlog.drop_first()
        for replica in self._replicas.values():
            replica.fall_behind(oldest)
        if isinstance(oldest.data, RouterLost):
            self._replicas.pop(Source(oldest.data.source), None)


def _folded(kept: Fold) -> State:
    state, pending = kept.state()
    if not isinstance(state, State):
        raise BadState("what a router has folded is not its state")
    for each in pending:
        decider.evolve(state, each)
    return state
