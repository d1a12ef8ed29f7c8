"""What the data-parallel controller knows of geometry: what is in force, and for which units it holds work.

The rules:

1. Work goes to the leader of the unit that it was meant for. In a merged group any unit may be addressed.
2. From `prepare` to `release` work for touched units is held, under a lease that each `prepare` renews and `commit` extends
   beyond the time in which units decide; without a commit for `HELD_S_MAX` altogether, however often it is renewed.
3. An epoch ends once, by `release` or with its lease. If a commit was passed on, the epoch's decision is read and followed,
   and taken (abort) where it has not been; else nothing has happened.
4. Epochs rise. A verb of an epoch that has ended, or that was never prepared, is passed on as lapsed: units refuse it.
"""

from dataclasses import dataclass

from services.worker.engine.sglang.plugin.ballot import Decision
from services.worker.engine.sglang.plugin.places import place, touched
from services.worker.engine.sglang.plugin.wire import LEASE_S_MAX, Commit, InForce, Prepare, Release
from shared.model.lattice import Composition

COMMIT_GRACE_S = 5.0
"""Beyond the time for votes: units read their messages between two steps, and rebuild trees after the decision."""

HELD_S_MAX = LEASE_S_MAX
"""A client that asks for ever, or for one epoch after the other, holds work no longer than one that asks once for the most."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An epoch under way. `since_s`: work has been held for one epoch or another since then. `committing`: units have been
    told to vote."""

    epoch: int
    composition: Composition
    since_s: float
    deadline_s: float
    committing: bool = False


class Desk:
    """One server's. Times are seconds of a clock that only rises."""

    def __init__(self, units: int) -> None:
        self.composition: Composition = (1,) * units
        self.pending: Pending | None = None
        self._ended = 0

    def holds(self, unit: int) -> bool:
        """Whether work for the unit waits."""
        return self.pending is not None and unit in touched(self.composition, self.pending.composition)

    def leader(self, unit: int) -> int:
        """Who reads work for the unit."""
        return place(self.composition, unit).group.first_rank

    def voters(self) -> tuple[int, ...]:
        """The units that decide the pending epoch."""
        assert self.pending is not None, "an epoch is under way"
        return touched(self.composition, self.pending.composition)

    def prepare(self, verb: Prepare, now_s: float) -> InForce:
        """Begin an epoch, or renew its lease. An older epoch that was not committing is given up for it."""
        pending = self.pending
        if pending is not None and (pending.committing or self._differs(pending, verb)):
            return self._lapsed()
        if verb.epoch <= self._ended:
            return self._lapsed()
        if pending is not None and pending.epoch < verb.epoch:
            self._ended = pending.epoch
        since_s = now_s if pending is None else pending.since_s
        deadline_s = min(now_s + verb.lease_s, since_s + HELD_S_MAX)
        self.pending = Pending(verb.epoch, verb.composition, since_s, deadline_s)
        return InForce(self.composition)

    def commit(self, verb: Commit, now_s: float) -> InForce:
        """Let units vote, once per epoch."""
        pending = self.pending
        if (
            pending is None
            or pending.committing
            or (pending.epoch, pending.composition) != (verb.epoch, verb.composition)
        ):
            return self._lapsed()
        deadline_s = now_s + verb.vote_s + COMMIT_GRACE_S
        self.pending = Pending(verb.epoch, verb.composition, pending.since_s, deadline_s, committing=True)
        return InForce(self.composition)

    def ends(self, verb: Release) -> bool:
        """Whether this release is the pending epoch's. Any other is late or was repeated, and changes nothing."""
        return self.pending is not None and self.pending.epoch == verb.epoch

    def expired(self, now_s: float) -> bool:
        """Whether the lease has run out."""
        return self.pending is not None and now_s >= self.pending.deadline_s

    def end(self, decision: Decision) -> None:
        """The pending epoch is over, by this decision (abort, if units never voted)."""
        assert self.pending is not None, "an epoch is under way"
        if decision is Decision.COMMIT:
            self.composition = self.pending.composition
        self._ended = self.pending.epoch
        self.pending = None

    def _differs(self, pending: Pending, verb: Prepare) -> bool:
        return verb.epoch < pending.epoch or (verb.epoch == pending.epoch and verb.composition != pending.composition)

    def _lapsed(self) -> InForce:
        return InForce(self.composition, lapsed=True)
