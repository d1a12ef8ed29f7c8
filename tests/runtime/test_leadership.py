"""Leaders and standbys over the in-memory log, bus and lease, with a clock that stands still until told."""

import random
from collections.abc import Mapping, Sequence

import pytest

from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import Frozen, LeadershipTaken, Thawed
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership, NotLeading
from shared.runtime.lease import LEASE_S, CellLease
from shared.runtime.memory import ManualClock, MemoryCell, MemoryLog
from shared.runtime.ports import Entry, Unavailable
from shared.runtime.projection import Projection

SUBJECTS = Subjects("main")


class Terms:
    """The fold: every term taken, and whether the pool is frozen."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.frozen = False

    def evolve(self, stored: Stored) -> None:
        match stored.data:
            case LeadershipTaken() as data:
                self.taken.append(data.term)
            case Frozen():
                self.frozen = True
            case Thawed():
                self.frozen = False


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog()
        self.cell = MemoryCell()
        self.projections: list[Projection[Terms]] = []

    async def process(self, name: str, at_least: int = 1, *together: EventData) -> tuple[Leadership, Terms]:
        """One started process, whose terms are at least this, and announced `together` with these."""
        terms = Terms()
        projection = Projection(self.log, [SUBJECTS.control], terms, lambda state, stored: state.evolve(stored))
        sealer = Sealer(
            Identity("main", Source(name), name), SUBJECTS, self.clock, Ids(self.clock, random.Random(name))
        )
        leadership = Leadership(
            CellLease(self.cell, name, self.clock),
            projection,
            Fence(projection, sealer, SUBJECTS.control, self.clock),
            lambda lease_term: [LeadershipTaken(leader=name, term=max(lease_term, at_least)), *together],
            self.clock,
        )
        self.projections.append(projection)
        await projection.start()
        await leadership.start()
        await self.clock.advance(0)
        return leadership, terms


FREEZE = [Frozen(asked_by="me")]


async def test_a_leader_decides_and_a_standby_does_not() -> None:
    world = World()
    first, seen = await world.process("a")
    second, _ = await world.process("b")
    assert (first.term, second.term, first.in_touch) == (1, None, True)
    assert await first.decide(lambda: FREEZE) == FREEZE
    assert seen.frozen, "folded before decide returns"
    with pytest.raises(NotLeading):
        await second.decide(lambda: FREEZE)


async def test_what_goes_with_a_term_is_stored_in_its_batch_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    batches = []
    append = world.log.append

    async def counted(entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        batches.append([entry.type for entry in entries])
        return await append(entries, expected)

    monkeypatch.setattr(world.log, "append", counted)
    first, seen = await world.process("a", 1, *FREEZE)
    assert (first.term, seen.taken, seen.frozen) == (1, [1], True)
    assert batches == [["leadership-taken", "frozen"]]
    elsewhere = World()  # a lease of its own, and a view that is older than the first term
    elsewhere.log, elsewhere.clock = world.log, world.clock
    late, _ = await elsewhere.process("b", 2, Thawed(asked_by="me"))
    assert (late.term, seen.taken, seen.frozen) == (2, [1, 2], False)


async def test_nothing_is_stored_when_there_is_nothing_to_decide() -> None:
    world = World()
    first, _ = await world.process("a")
    before = await world.log.bounds()
    assert await first.decide(list) == []
    assert await world.log.bounds() == before


async def test_a_stopped_leader_hands_over() -> None:
    world = World()
    first, _ = await world.process("a")
    second, seen = await world.process("b")
    await first.stop()
    await world.clock.advance(0.5)
    assert (first.term, second.term, seen.taken) == (None, 2, [1, 2])


@pytest.mark.parametrize("phase_s", [0.0, 0.3, 0.9])
async def test_a_dead_leader_is_replaced_in_less_than_five_seconds(phase_s: float) -> None:
    """Wherever between two renewals it dies: it gives nothing back, and the standby leads with its term on the log."""
    world = World()
    first, _ = await world.process("a")
    second, seen = await world.process("b")
    await world.clock.advance(10 + phase_s)
    assert first._keeper._task is not None
    first._keeper._task.cancel()
    waited_s = 0.0
    while second.term is None:
        await world.clock.advance(0.25)
        waited_s += 0.25
    assert LEASE_S - 1 <= waited_s <= 4.0
    assert seen.taken == [1, 2]


async def test_a_newer_term_on_the_log_ends_the_lead_before_the_lease_is_asked() -> None:
    world = World()
    first, seen = await world.process("a")
    elsewhere = World()  # another lease over the same log: two leaders at once
    elsewhere.log, elsewhere.clock = world.log, world.clock
    other, _ = await elsewhere.process("b", at_least=2)
    assert (other.term, first.term) == (2, None)
    with pytest.raises(NotLeading):
        await first.decide(lambda: FREEZE)
    assert not seen.frozen


async def test_a_decision_behind_somebody_elses_is_refused_and_costs_the_lead() -> None:
    world = World()
    first, seen = await world.process("a")

    def decide_late() -> list[Frozen]:
        first_projection.last_on[SUBJECTS.control] -= 1  # as if the newest event had not been folded yet
        return FREEZE

    first_projection = world.projections[0]
    with pytest.raises(NotLeading, match="another process has written"):
        await first.decide(decide_late)
    assert (first.term, seen.frozen) == (None, False)
    first_projection.last_on[SUBJECTS.control] += 1
    await world.clock.advance(1.0)
    assert first.term == 2, "it had let the lease go, and nobody else wants it"


async def test_a_lost_lease_ends_the_lead() -> None:
    world = World()
    first, _ = await world.process("a")
    revision, _ = await world.cell.read()
    await world.cell.write(b'{"holder":"b","term":2}', revision)
    await world.clock.advance(1.0)
    assert first.term is None
    await world.clock.advance(LEASE_S + 1)
    assert first.term == 3, "b never renewed: a leads again, under a new term"


async def test_a_leader_that_cannot_renew_is_out_of_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    first, _ = await world.process("a")

    async def away(*_: object) -> int:
        raise Unavailable("the server is away")

    monkeypatch.setattr(MemoryCell, "write", away)
    await world.clock.advance(2.5)
    assert (first.term, first.in_touch) == (1, False)
