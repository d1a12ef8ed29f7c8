"""Which snapshots a manager goes on from, and what becomes of those that it cannot."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from cache_world import ROUND, CacheStory
from structlog.testing import capture_logs

from services.cachemgr import freezing, keeper
from services.cachemgr.freezing import Folded
from services.cachemgr.keeper import CODE, Kept, resume
from shared.contracts.codec import encode
from shared.model.cost import Coefficients
from shared.runtime.memory import MemoryCell, MemoryLog
from shared.runtime.ports import Entry, Unavailable
from shared.runtime.projection import Reached
from shared.runtime.snapshots import About, Snapshots, code_of
from tests.support.story import serving

SEEN, LAST = 4, 6


class World:
    """A log of six events, the first four of which are in a snapshot."""

    def __init__(self) -> None:
        self.cells: dict[str, MemoryCell] = defaultdict(MemoryCell)
        self.log = MemoryLog()
        self.coefficients: Coefficients = ROUND
        self.story = CacheStory()
        self.story.tell(*serving("n0", (1, 1)))
        self.story.stores("n0/1/0", "a b c")
        self.story.stores("n0/1/1", "a b x")

    async def append(self, log: MemoryLog, to: int) -> None:
        for each in self.story.events[len(log._messages) : to]:
            await log.append([Entry("x", each.event.id, each.event.type, encode(each.event))], {})

    async def keep(self, seen_seq: int = SEEN, code: str = "", whole: bytes | None = None) -> None:
        await self.append(self.log, LAST)
        folded = Folded(self.story.state, Reached(seen_seq, 1, 0, {}, {}), ROUND)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"".join(freezing.pieces(folded)) if whole is None else whole

        about = About("memory", seen_seq, code or code_of(*CODE))
        await Snapshots(self.cells.__getitem__, "cachemgr").write(about, pieces())

    async def resumed(self, cell_of: Callable[[str], Any] | None = None) -> Folded | None:
        return await resume(Kept(Snapshots(cell_of or self.cells.__getitem__, "cachemgr"), self.log, self.coefficients))


async def refused(world: World, **how: Any) -> str:
    """Why it does not go on from what is there."""
    with capture_logs() as logged:
        assert await world.resumed(**how) is None
    [told] = [each for each in logged if each["event"] == "not resumed"]
    return str(told["reason"])


async def test_without_a_snapshot_nothing_is_said() -> None:
    world = World()
    with capture_logs() as logged:
        assert await world.resumed() is None
    assert logged == []


@pytest.mark.parametrize("first_seq", [1, SEEN, SEEN + 1])
async def test_it_goes_on_from_one_behind_which_the_log_has_everything(first_seq: int) -> None:
    world = World()
    await world.keep()
    world.log.drop_before(first_seq)
    folded = await world.resumed()
    assert folded is not None
    assert folded.reached.seen_seq == SEEN
    assert folded.state.trie.nodes.keys() == world.story.state.trie.nodes.keys()


async def test_it_does_not_without_what_follows() -> None:
    world = World()
    await world.keep()
    world.log.drop_before(SEEN + 2)
    assert await refused(world) == "it has seen 4, and the log begins at 6"


async def test_it_does_not_in_another_log_or_in_one_that_went_back() -> None:
    world = World()
    await world.keep()
    world.log = MemoryLog("another")
    await world.append(world.log, LAST)
    assert await refused(world) == "it is of log memory"
    world.log = MemoryLog()
    await world.append(world.log, 3)
    assert await refused(world) == "it has seen 4, and the log ends at 3"


async def test_it_does_not_by_other_code_or_under_another_cost_model() -> None:
    world = World()
    world.coefficients = ROUND.model_copy(update={"d": 0.5, "version": "slow"})
    await world.keep()
    assert await refused(world) == "it began with the cost model round"
    await world.keep(code="older")
    assert await refused(world) == "other code has folded it"


async def test_it_does_not_from_what_is_damaged_or_no_state() -> None:
    world = World()
    await world.keep()
    await world.cells["cachemgr.0.0"].write(b"something else", 1)
    assert await refused(world) == "its pieces are not those that were written"
    whats = {
        b"": "no state of a cache manager",
        b"no state at all": "ends in the middle",
        b"\x08" + bytes(15): "no state",
    }
    for whole, what in whats.items():
        await world.keep(whole=whole)
        assert what in await refused(world)


async def test_it_does_not_while_the_bucket_is_away() -> None:
    class Away(MemoryCell):
        async def read(self) -> tuple[int, bytes] | None:
            raise Unavailable("the bucket has no leader")

    assert await refused(World(), cell_of=lambda key: Away()) == "the bucket has no leader"


def test_the_code_is_that_which_folds() -> None:
    assert {keeper.__name__.rpartition(".")[0], "shared.model"} <= set(CODE)
