"""Which snapshots a manager goes on from, and what becomes of those that it cannot."""

import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
from cache_world import ROUND, CacheStory
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.cachemgr import decider, freezing, keeper
from services.cachemgr.decider import State
from services.cachemgr.freezing import Folded
from services.cachemgr.keeper import CODE, Keeper, Kept, resume
from services.cachemgr.metrics import Metrics
from shared.contracts.codec import encode
from shared.model.cost import Coefficients
from shared.runtime.background import Background
from shared.runtime.clock import SystemClock
from shared.runtime.leadership import Leadership
from shared.runtime.memory import MemoryCell, MemoryLog
from shared.runtime.ports import Entry, Unavailable
from shared.runtime.process_copy import ProcessCopy, Work
from shared.runtime.projection import Projection, Reached
from shared.runtime.snapshots import About, Snapshots, announced, code_of
from tests.support.replica import eventually
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
            for each in announced(freezing.pieces(folded) if whole is None else [whole]):
                yield each

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


class Leading:
    term = 1


class Standing(Projection[State]):
    """At one place of the log, which goes on while nobody folds it."""

    async def start(self) -> None:
        self.seen_seq = SEEN


async def test_a_copy_of_the_process_that_stands_still_is_ended_and_the_next_one_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real copies of this process; the first is stopped as it begins."""
    monkeypatch.setattr(keeper, "KEEP_S_MAX", 1.0)
    world = World()
    await world.append(world.log, LAST)
    copies: list[ProcessCopy] = []

    def elsewhere(work: Work) -> ProcessCopy:
        copies.append(ProcessCopy(stops_at_once if not copies else work))
        return copies[-1]

    projection = Standing(world.log, ["x"], world.story.state, decider.evolve)
    kept = Kept(Snapshots(world.cells.__getitem__, "cachemgr"), world.log, ROUND)
    leadership, metrics = cast(Leadership, Leading()), Metrics(CollectorRegistry())
    keeping = Keeper(kept, projection, leadership, elsewhere, SystemClock(), metrics)
    await projection.start()
    running = Background("keeper")
    with capture_logs() as logged:
        running.start(keeping.run(0.01))
        await eventually(lambda: any(each["event"] == "kept" for each in logged))
        await running.stop()
    assert logged[0]["event"] == "not kept"
    assert "TimeoutError" in logged[0]["error"]
    assert await world.resumed() is not None
    with pytest.raises(ChildProcessError):
        copies[0]._status(0)


def stops_at_once() -> Iterator[bytes]:
    os.kill(os.getpid(), signal.SIGSTOP)
    yield b"never"


def test_the_code_is_that_which_folds() -> None:
    assert {keeper.__name__.rpartition(".")[0], "shared.model"} <= set(CODE)
