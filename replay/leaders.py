"""Leaders as they were: the state that controller and cache manager decided on, and their decisions made again.

A leader appends behind the last event of its subject that it has folded; of all other subjects it may have seen less than lies
before its decision. Where a decision does not say how far it had seen (windows and scans do), one of the states in between must
give it: right after the subject's last event, or after any of the others that came since.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from replay.beginnings import Beginning, Past, Registration
from replay.findings import Findings, Place
from replay.freezing import EARLIER, Fold, Frozen
from replay.routers import DROPPED, HOLE
from shared.contracts.envelope import Channel, EventData, Stored
from shared.contracts.ids import Source
from shared.runtime.ports import APPEND_ENTRIES_MAX

UNSEEN_EVENTS_MAX = 20_000
"""How many events before a decision its leader may not have seen. What is older is folded."""

UNSAID = "the leader did not say what it began with"

Derive = Callable[[Any, Stored], Sequence[EventData]]
"""What is decided on a state; the recorded event gives what came from outside: the clock, an operator's words."""


class Role:
    """What a leader hears and decides. `deciding` holds a way to derive each type of its events, `initial` gives None for a
    beginning that does not say enough."""

    def __init__(
        self,
        channel: Channel,
        hears: frozenset[Channel],
        initial: Callable[[Beginning], Any],
        evolve: Callable[[Any, Stored], None],
        deciding: Mapping[type[EventData], Derive],
    ) -> None:
        self.channel, self.hears, self.initial, self.evolve, self.deciding = channel, hears, initial, evolve, deciding


class LeaderReplica:
    """One fold of a role. Events of the role's own subject wait until all that were appended together are there."""

    def __init__(self, role: Role, state: Any, log: str, findings: Findings) -> None:
        self.state = state
        self.broken: str | None = None
        self._role = role
        self._log = log
        self._findings = findings
        self.is_doubtful = False
        """Whether the next decisions may have been made on less than the state has."""
        self._unseen: list[Stored] = []
        self._run: list[Stored] = []
        self._wanted: set[int] = set()

    def fold(self, stored: Stored, wanted: bool) -> None:
        """The next event that the role hears. `wanted`: decisions in it are to be compared."""
        is_own = self._role.channel == stored.data.CHANNEL
        if self._run and not (is_own and self._continues(stored)):
            self.settle()
        if is_own and type(stored.data) in self._role.deciding:
            # Also what is not wanted: those behind it may have been decided together with it, before it was folded.
            self._run.append(stored)
            if wanted:
                self._wanted.add(stored.stream_seq)
            return
        if is_own:
            self.settle()
            self._catch_up()
            self.is_doubtful = False
            self._role.evolve(self.state, stored)
            return
        self._unseen.append(stored)
        if len(self._unseen) > UNSEEN_EVENTS_MAX:
            for each in self._unseen[: UNSEEN_EVENTS_MAX // 2]:
                self._role.evolve(self.state, each)
            del self._unseen[: UNSEEN_EVENTS_MAX // 2]

    def settle(self) -> None:
        """Compare the decisions that wait."""
        run, self._run = self._run, []
        if not run:
            return
        wanted, self._wanted = self._wanted, set()
        first = next((number for number, each in enumerate(run) if each.stream_seq in wanted), len(run))
        # What follows from a scan is found by making the scan again, so those before it are derived as well.
        compared = deque(run[max(0, first - APPEND_ENTRIES_MAX) :] if wanted else ())
        derived: dict[int, Sequence[EventData]] = {}
        self._derive(compared, derived)
        seen_seq = _said(compared)
        for unseen in self._unseen:
            self._role.evolve(self.state, unseen)
            if seen_seq is None or unseen.stream_seq == seen_seq:
                self._derive(compared, derived)
        self._unseen.clear()
        for each in run:
            # Those behind it may have been appended later, but before anything else was: then they were decided here.
            self._derive(compared, derived)
            if compared and compared[0] is each:
                compared.popleft()
            if each.stream_seq in wanted:
                self._judge(each, derived.get(each.stream_seq, ()))
            self._role.evolve(self.state, each)
        self.is_doubtful = False

    @property
    def pending(self) -> list[Stored]:
        """What is not folded yet."""
        return [*self._unseen, *self._run]

    def _continues(self, stored: Stored) -> bool:
        """Whether it may have been appended together with what waits."""
        last = self._run[-1]
        return stored.event.source == last.event.source and stored.stream_seq == last.stream_seq + 1

    def _catch_up(self) -> None:
        for each in self._unseen:
            self._role.evolve(self.state, each)
        self._unseen.clear()

    def _derive(self, run: Iterable[Stored], derived: dict[int, Sequence[EventData]]) -> None:
        """Decide what is not derived yet on the state as it is now, of what may have been appended together. An outcome that
        differs is kept, to be told if no state gives the recorded one."""
        for each in islice(run, APPEND_ENTRIES_MAX):
            if each.data not in derived.get(each.stream_seq, ()):
                decided = self._role.deciding[type(each.data)](self.state, each)
                derived[each.stream_seq] = decided or derived.get(each.stream_seq, ())

    def _judge(self, stored: Stored, derived: Sequence[EventData]) -> None:
        if self.broken:
            self._findings.skip(stored.event.type, self.broken)
            return
        if self.is_doubtful and stored.data not in derived:
            self._findings.skip(stored.event.type, EARLIER)
            return
        about = stored.event.correlation or stored.event.source
        place = Place(self._log, stored.stream_seq, about)
        self._findings.compare(place, stored.event.type, stored.data, derived)


def _said(run: Sequence[Stored]) -> int | None:
    """How far the only decision of a run had seen, if it says so: no other state gives it."""
    return getattr(run[0].data, "to_seq", None) if len(run) == 1 else None


class Leaders:
    """Every process of a role that has led in one log. Give it every event in order; `past` has folded those before it."""

    def __init__(
        self, role: Role, registrations: Sequence[Registration], past: Past, log: str, findings: Findings
    ) -> None:
        self.role = role
        self._begun = {each.source: each.begun for each in registrations}
        self._waiting = set(self._begun.values())
        self._log = log
        self._findings = findings
        self._past = past
        self._replicas: dict[Beginning, LeaderReplica] = {}
        self._after_hole = False
        self._begins_seq = 0

    def begin_at(self, kind: str, frozen: Frozen) -> None:
        """Begin with what was kept. Errors: BadState."""
        self._begins_seq = frozen.stream_seq
        for begun in [each for each in self._waiting if each.first_seq <= frozen.stream_seq]:
            self._waiting.remove(begun)
            if (kept := frozen.fold_of(kind, begun)) is not None:
                self._replicas[begun] = self._kept(kept)

    def resume(self, kind: str, frozen: Frozen) -> None:
        """Who was in doubt for want of block events goes on with what was kept. Errors: BadState."""
        for begun in [each for each, replica in self._replicas.items() if replica.broken == DROPPED]:
            if (kept := frozen.fold_of(kind, begun)) is not None:
                self._replicas[begun].settle()
                self._replicas[begun] = self._kept(kept)

    def _kept(self, kept: Fold) -> LeaderReplica:
        state, pending = kept.state()
        for each in pending:
            self.role.evolve(state, each)
        replica = LeaderReplica(self.role, state, self._log, self._findings)
        replica.is_doubtful = True
        return replica

    def folds(self) -> Iterator[tuple[Beginning, Any, list[Stored]]]:
        """Every way to begin, with its state and what that has not folded. None where events are missing before."""
        for begun, replica in self._replicas.items():
            if replica.broken is None:
                yield begun, replica.state, replica.pending

    def fold(self, stored: Stored, wanted: bool) -> None:
        """The next event. `wanted`: it lies in the range that is to be verified."""
        for begun in [each for each in self._waiting if each.first_seq <= stored.stream_seq] if self._waiting else ():
            self._waiting.remove(begun)
            self._begin(begun)
        if stored.data.CHANNEL in self.role.hears:
            begun_by = self._begun.get(Source(stored.event.source))
            for begun, replica in self._replicas.items():
                replica.fold(stored, wanted and begun == begun_by)
            is_decision = wanted and type(stored.data) in self.role.deciding
            if is_decision and begun_by not in self._replicas:
                said = self._begins_seq and begun_by is not None
                self._findings.skip(stored.event.type, EARLIER if said else UNSAID)

    def miss(self) -> None:
        """Events are missing here."""
        self._after_hole = True
        for replica in self._replicas.values():
            replica.settle()
            replica.broken = HOLE

    def lose_blocks(self) -> None:
        """Block events went by policy here."""
        for replica in self._replicas.values() if Channel.CACHE in self.role.hears else ():
            replica.settle()
            replica.broken = replica.broken or DROPPED

    def end(self) -> None:
        """The log is over."""
        for replica in self._replicas.values():
            replica.settle()

    @property
    def states(self) -> list[Any]:
        """The folded states, for their own checks."""
        return [replica.state for replica in self._replicas.values()]

    def _begin(self, begun: Beginning) -> None:
        state = self.role.initial(begun)
        if state is None:
            return
        for kept in self._past.kept(begun):
            self.role.evolve(state, kept)
        replica = self._replicas[begun] = LeaderReplica(self.role, state, self._log, self._findings)
        replica.broken = HOLE if self._after_hole else None
