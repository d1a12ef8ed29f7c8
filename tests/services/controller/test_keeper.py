"""Who stores the keepsake, and when, with a clock that stands still until told."""

import asyncio
import random

from structlog.testing import capture_logs

from services.controller import decider
from services.controller.keeper import Keeper
from shared.contracts.events import WindowClosed
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import NO_ORIGIN, Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.fence import Fence
from shared.runtime.keepsake import pack, unpack
from shared.runtime.leadership import Leadership
from shared.runtime.lease import CellLease
from shared.runtime.memory import ManualClock, MemoryCell, MemoryLog
from shared.runtime.ports import Unavailable
from shared.runtime.projection import Projection
from tests.support.story import adopted, committed, received, registered

SUBJECTS = Subjects("main")


class CountingCell(MemoryCell):
    """Counts what is written; may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.away = False

    async def read(self) -> tuple[int, bytes] | None:
        if self.away:
            raise Unavailable("test")
        return await super().read()

    async def write(self, value: bytes, revision: int) -> int:
        if self.away:
            raise Unavailable("test")
        self.writes += 1
        return await super().write(value, revision)


class World:
    def __init__(self) -> None:
        self.clock, self.log, self.lease, self.cell = ManualClock(), MemoryLog(), MemoryCell(), CountingCell()
        self._agent = self._sealer("n0")

    def _sealer(self, name: str) -> Sealer:
        return Sealer(Identity("main", Source(name), name), SUBJECTS, self.clock, Ids(self.clock, random.Random(name)))

    async def controller(self, name: str) -> tuple[decider.State, Leadership, "asyncio.Task[object]"]:
        """One started process, and its keeper."""
        state = decider.initial()
        projection = Projection(self.log, [SUBJECTS.all_events], state, decider.evolve, self.cell)
        leadership = Leadership(
            CellLease(self.lease, name, self.clock),
            projection,
            Fence(projection, self._sealer(name), SUBJECTS.control, self.clock),
            lambda lease_term: [decider.take_leadership(state, name, lease_term)],
            self.clock,
        )
        await projection.start()
        await leadership.start()
        keeper = Keeper(state.keepsake, leadership, self.cell, self.log.identity, self.clock)
        task = asyncio.create_task(keeper.run())
        await self.clock.advance(0)
        return state, leadership, task

    async def tell(self, *facts: object) -> None:
        entries = [entry for _, entry in self._agent.seal(facts, NO_ORIGIN)]  # type: ignore[arg-type]
        await self.log.append(entries, {})

    async def kept(self) -> tuple[int, list[str]]:
        found = await self.cell.read()
        assert found is not None
        recalled = unpack(found[1], self.log.identity)
        return recalled.seen_seq, [each.event.type for each in recalled.events]


def window(k: int) -> WindowClosed:
    nothing = {"long_request_share": 0.0, "long_token_share": 0.0, "capacity_us": 1, "long_tokens": 1, "length_us": 1}
    counts = {"requests": 0, "completed": 0, "prompt_tokens": 0, "demand_us": 0}
    return WindowClosed(k=k, from_seq=0, to_seq=0, **nothing, **counts)  # type: ignore[arg-type]


async def test_a_change_is_stored_within_a_second_and_the_rest_now_and_then() -> None:
    world = World()
    await world.controller("c1")
    await world.clock.advance(0.5)
    assert await world.kept() == (1, ["leadership-taken"])
    await world.tell(registered("n0"), *adopted("n0"), committed("n0"))
    await world.clock.advance(0.5)
    assert await world.kept() == (
        11,
        ["leadership-taken", "node-registered", *["rank-adopted-epoch"] * 8, "epoch-committed"],
    )
    writes = world.cell.writes
    await world.tell(received("r", 1), window(1))
    await world.clock.advance(9)
    assert world.cell.writes == writes, "nobody starts wrong without these"
    await world.clock.advance(1.5)
    seen_seq, kept = await world.kept()
    assert (seen_seq, kept[-1], world.cell.writes) == (13, "window-closed", writes + 1)
    await world.clock.advance(60)
    assert world.cell.writes == writes + 1, "nothing has happened"


async def test_a_standby_stores_nothing() -> None:
    world = World()
    await world.controller("c1")
    await world.controller("c2")
    await world.clock.advance(0.5)
    writes = world.cell.writes
    await world.tell(registered("n0"))
    await world.clock.advance(0.5)
    assert world.cell.writes == writes + 1


async def test_a_new_leader_stores_on_and_an_overtaken_one_cannot() -> None:
    world = World()
    _, first, keeping = await world.controller("c1")
    state, second, _ = await world.controller("c2")
    await world.clock.advance(0.5)
    await first.stop()
    await world.clock.advance(1)
    assert second.term == 2
    # The first does not know that it was overtaken, and has folded less.
    first.term = 1
    await world.tell(registered("n0"))
    await world.clock.advance(20)
    assert not keeping.done()
    seen_seq, kept = await world.kept()
    assert kept == ["leadership-taken", "node-registered"]
    assert seen_seq == state.seen_seq

    behind = decider.initial()
    late = Keeper(behind.keepsake, first, world.cell, world.log.identity, world.clock)
    await late._store()
    assert await world.kept() == (seen_seq, kept), "what was kept is newer"


async def test_a_bucket_that_is_away_is_tried_again() -> None:
    world = World()
    _, _, keeping = await world.controller("c1")
    await world.clock.advance(0.5)
    world.cell.away = True
    await world.tell(registered("n0"))
    with capture_logs() as logged:
        await world.clock.advance(5)
    said = [each for each in logged if each["event"] == "not kept"]
    assert 1 <= len(said) <= 3
    assert said[0]["kept_to_seq"] == 1
    world.cell.away = False
    await world.clock.advance(2.5)
    assert await world.kept() == (2, ["leadership-taken", "node-registered"])
    assert not keeping.done()


async def test_a_new_log_is_kept_under_its_own_name() -> None:
    world = World()
    await world.cell.write(pack(decider.initial().keepsake, "an older log"), 0)
    await world.controller("c1")
    await world.clock.advance(0.5)
    assert await world.kept() == (1, ["leadership-taken"])
