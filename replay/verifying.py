"""Every decision of the record made again by the code that made it, and compared.

A placement is checked twice: with the inputs that it recorded, and on the state that is folded from the log up to what its
router had seen. Leaders' decisions are checked on the folded state. Nothing of what a service remembered is used.

What cannot be derived again is counted with its reason, never taken for right: after an accepted gap, or where a process did
not say what it began with.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from replay.beginnings import Past, Registration
from replay.findings import RECORDED_INPUTS, Findings, Place
from replay.freezing import Frozen, fold
from replay.leaders import Leaders
from replay.parts import WHOLE, Part
from replay.pool_routers import UNSAID, Routers
from replay.recorded_inputs import from_recorded_inputs
from replay.roles import CACHE_MANAGER, controller_role
from replay.routers import Decided
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    SERVING,
    CacheLeadershipTaken,
    CalibrationUpdated,
    LeadershipTaken,
    RequestAssigned,
    RouterRegistered,
    WindowClosed,
)
from shared.contracts.ids import Source
from shared.model import cost
from shared.model.cost import Coefficients
from shared.model.holders import Holders

SEQ_MAX = 2**63 - 1


class Span(NamedTuple):
    """Which decisions are compared: by sequence within each log, or by the sender's clock. Everything before is folded."""

    from_seq: int = 0
    to_seq: int = SEQ_MAX
    from_ns: int = -(2**63)
    to_ns: int = 2**63 - 1

    def in_older_log(self) -> "Span":
        """What it means for logs before the newest: nothing, if it names sequences."""
        named = (self.from_seq, self.to_seq) != (0, SEQ_MAX)
        return self._replace(from_seq=SEQ_MAX) if named else self

    def holds(self, stored: Stored) -> bool:
        return self.from_seq <= stored.stream_seq <= self.to_seq and self.from_ns <= stored.event.time_ns <= self.to_ns


EVERYTHING = Span()


class LogVerifier:
    """Is given every event of one log in order. Pure."""

    def __init__(
        self,
        log: str,
        begun: Sequence[Registration],
        span: Span,
        findings: Findings,
        *,
        inherited: Iterable[Stored] = (),
        deep: bool = False,
        part: Part = WHOLE,
        frozen: Frozen | None = None,
    ) -> None:
        """`part`: decisions outside of it are folded, and not derived. `frozen`: the log is given from there on.

        Errors: BadState if that is not what it should be.
        """
        self.past = Past(inherited) if frozen is None else frozen.past
        self._log = log
        self._span = span
        self._findings = findings
        self._deep = deep
        self._part = part
        self._coefficients = {each.source: each.begun.cost_model() for each in begun}
        self._refits: dict[str, Coefficients] = {}
        for each in self.past.events:
            self._note_refit(each)
        routers = [each for each in begun if each.kind == RouterRegistered.TYPE]
        self._routers = Routers(routers, self.past, self._placed, part.has)
        leading = {LeadershipTaken.TYPE: controller_role(deep=deep), CacheLeadershipTaken.TYPE: CACHE_MANAGER}
        self._leaders = [
            Leaders(role, [each for each in begun if each.kind == kind], self.past, log, findings)
            for kind, role in leading.items()
            if part.leads(kind)
        ]
        self._begun = begun
        if frozen is not None:
            self._routers.begin_at(frozen)
            for kind, leaders in self._kinds():
                leaders.begin_at(kind, frozen)
            self.check()

    def frozen(self, stream_seq: int) -> Frozen:
        """What was folded, up to the last event that was given, which is that of `stream_seq`."""
        folds = [fold(RouterRegistered.TYPE, *each) for each in self._routers.folds()]
        for kind, leaders in self._kinds():
            folds += [fold(kind, *each) for each in leaders.folds()]
        begun = tuple(each for each in self._begun if each.seen_seq < stream_seq)
        living, undecided = self._routers.living, self._routers.undecided
        return Frozen(stream_seq, self.past, begun, living, undecided, tuple(folds))

    def _kinds(self) -> Iterator[tuple[str, Leaders]]:
        """The leaders, with the type of the event that begins a term of theirs."""
        for leaders in self._leaders:
            manages = leaders.role is CACHE_MANAGER
            yield (CacheLeadershipTaken if manages else LeadershipTaken).TYPE, leaders

    def fold(self, stored: Stored) -> None:
        """The next event."""
        wanted = self._span.holds(stored)
        if self._part.inputs and wanted and isinstance(stored.data, RequestAssigned):
            self._check_inputs(stored, stored.data)
        if self._part.routers is not None:
            self._routers.fold(stored, wanted)
        for each in self._leaders:
            each.fold(stored, wanted)
        self.past.fold(stored)
        if type(stored.data) not in SERVING:
            self._note_refit(stored)
        if self._deep and isinstance(stored.data, WindowClosed):
            self.check()

    def miss(self) -> None:
        """Events are missing here."""
        self._routers.miss()
        for each in self._leaders:
            each.miss()

    def lose_blocks(self) -> None:
        """Block events went by policy here; every decision is still there."""
        self._routers.lose_blocks()
        for each in self._leaders:
            each.lose_blocks()

    def regain_blocks(self, held: Holders) -> None:
        """What workers held here is known again. The cache manager's statistics of demand are not."""
        self._routers.regain_blocks(held)

    def resume(self, frozen: Frozen) -> None:
        """What deciders had folded here is known again: who was in doubt for want of block events goes on with it. Errors:
        BadState."""
        self._routers.resume(frozen)
        for kind, leaders in self._kinds():
            leaders.resume(kind, frozen)

    def end(self) -> None:
        """The log is over."""
        for each in self._leaders:
            each.end()

    def check(self) -> None:
        """Every folded state agrees with itself. AssertionError says where it does not."""
        self._routers.check()
        for state in (state for leaders in self._leaders if leaders.role is CACHE_MANAGER for state in leaders.states):
            state.holders.check()
            state.trie.check(state.holders)

    def _check_inputs(self, stored: Stored, data: RequestAssigned) -> None:
        refit = self._refits.get(data.coefficients_version)
        coefficients = refit or self._coefficients.get(Source(stored.event.source))
        if coefficients is None or coefficients.version != data.coefficients_version:
            self._findings.skip(RECORDED_INPUTS, UNSAID)
            return
        derived = [from_recorded_inputs(data, coefficients)]
        self._findings.compare(self._place(stored), RECORDED_INPUTS, data, derived)

    def _note_refit(self, stored: Stored) -> None:
        # No router can have priced by what none could read.
        if isinstance(stored.data, CalibrationUpdated) and (fitted := cost.read(stored.data)) is not None:
            self._refits[fitted.version] = fitted

    def _placed(self, decided: Decided) -> None:
        stored = decided.recorded
        if decided.derived is None:
            self._findings.skip(stored.event.type, decided.why_not)
        else:
            self._findings.compare(self._place(stored), stored.event.type, stored.data, decided.derived)

    def _place(self, stored: Stored) -> Place:
        return Place(self._log, stored.stream_seq, stored.event.correlation or stored.event.source)
