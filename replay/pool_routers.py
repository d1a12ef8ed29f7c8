"""Every router process of one log, from where its fold began to where the log has forgotten it."""

from collections.abc import Callable, Sequence
from copy import deepcopy

from replay.beginnings import Beginning, Past, Registration
from replay.routers import BACKLOG_EVENTS_MAX, DROPPED, HOLE, Backlog, Decided, Judge, RouterReplica
from services.router import decider
from services.router.decider import State
from shared.contracts.envelope import Stored
from shared.contracts.events import RequestAssigned, RequestRedirected, RequestRejected, RouterLost
from shared.contracts.ids import Source
from shared.model.holders import Holders

UNSAID = "the router did not say what it began with"

DECISIONS = (RequestAssigned, RequestRedirected, RequestRejected)


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
        self._replicas: dict[Source, RouterReplica] = {}
        self._without_blocks: set[Beginning] = set()
        self._after_hole = False

    def fold(self, stored: Stored) -> None:
        """The next event."""
        self._begin(stored.stream_seq)
        self._register(stored.stream_seq)
        for state in self._shared.values():
            decider.evolve(state, stored)
        self._backlog.append(stored)
        if replica := self._replicas.get(stored.event.source):
            replica.own(stored)
        elif isinstance(stored.data, DECISIONS) and self._mine(stored.event.source):
            self._judge(Decided(stored, None, UNSAID))
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
            replica = self._replicas[each.source] = RouterReplica(each.source, state, self._backlog, self._judge)
            replica.broken = HOLE if self._after_hole else DROPPED if each.begun in self._without_blocks else None

    def _forget_oldest(self) -> None:
        """A router that was lost so long ago writes nothing more."""
        oldest = self._backlog.drop_first()
        for replica in self._replicas.values():
            replica.fall_behind(oldest)
        if isinstance(oldest.data, RouterLost):
            self._replicas.pop(Source(oldest.data.source), None)
