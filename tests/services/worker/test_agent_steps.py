"""Packed and chunked steps at an agent, over the in-memory log and bus, with the modelled engine: 1 ms per uncached token."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.composer import StepLimits
from services.worker.engine.modelled import ModelledEngine, ModelledNode
from services.worker.engine.protocol import EngineError, PrefillStep, StepResult
from shared.contracts.commands import Cancel, Drain, Release
from shared.contracts.events import (
    BlocksStored,
    DrainCompleted,
    EpochAborted,
    ParametersChanged,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
)
from shared.contracts.ids import RequestId, WorkerId
from tests.services.worker.scripted import BLOCK_TOKENS, NODE, SMALL, World, prompt, running, worker

ROOMY = replace(SMALL, blocks_per_rank=256)


def starting_in(seconds: float, blocks_per_rank: int = 64) -> ModelledNode:
    """A node whose steps take so long beside their tokens: it pays to share them."""
    return replace(
        SMALL, blocks_per_rank=blocks_per_rank, coefficients=SMALL.coefficients.model_copy(update={"d": seconds})
    )


CHUNKS = StepLimits(step_tokens_max=256, chunk_tokens=128)


def drain(*workers: WorkerId, epoch: int = 2) -> Drain:
    return Drain(term=1, epoch=epoch, workers=workers, deadline_us=15_000_000)


def completed(world: World) -> dict[str, PrefillCompleted]:
    return {each.request: each for each in world.events(PrefillCompleted)}


def aborted(world: World) -> list[tuple[str, int, str]]:
    return [(each.request, each.attempt, each.reason) for each in world.events(PrefillAborted)]


async def test_a_short_request_waits_for_one_chunk_of_a_long_one_and_not_for_all_of_it() -> None:
    world = World(node=ROOMY, step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("long", prompt(1_000)))
        await world.clock.advance(0.01)
        await world.ask(world.assignment("short", prompt(50, seed=1)))
        await world.clock.advance(0.110)
        assert world.events(PrefillStarted)[-1].request == "long", "128 tokens take 0.128 s"
        await world.clock.advance(0.060)
        assert len(world.of("short")) == 1
        assert world.of("long") == []
        await world.clock.advance(1.0)
        long, short = completed(world)["long"], completed(world)["short"]
        assert (long.steps, short.steps) == (8, 1)
        assert (long.computed_tokens, long.cached_own_tokens) == (1_000, 0)
        assert (long.prefill_us, long.predicted_us) == (1_000_000, 1_000_000)
        assert (short.prefill_us, short.predicted_us) == (50_000, 50_000)
        assert long.queue_us == 50_000
        assert short.queue_us == 118_000
        assert [each.request for each in world.events(PrefillStarted)] == ["long", "short"]


async def test_every_chunk_publishes_its_blocks_with_numbers_that_have_no_gap() -> None:
    world = World(step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("long", prompt(300)))
        await world.clock.advance(1.0)
        stored = [(each.number, each.first_depth, each.blocks) for each in world.events(BlocksStored)]
        assert stored == [(1, 0, 8), (2, 8, 8), (3, 16, 2)]


async def test_short_requests_share_a_step() -> None:
    world = World(node=starting_in(0.3), step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("first", prompt(20)))
        for index, length in enumerate((100, 60, 80)):
            await world.ask(world.assignment(f"r{index}", prompt(length, seed=index + 1)))
        await world.clock.advance(1.0)
        done = completed(world)
        assert list(done) == ["first", "r1", "r2", "r0"], "shortest first within the step"
        assert [done[f"r{index}"].prefill_us for index in range(3)] == [200_000, 160_000, 180_000], (
            "a third of 0.3 s each"
        )
        assert len({frame.queue_us + frame.prefill_us for frame in world.frames if frame.request != "first"}) == 1


async def test_requests_with_a_common_prefix_do_not_compute_it_twice() -> None:
    world = World(step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("first", prompt(20, seed=9)))
        await world.ask(world.assignment("a", prompt(96)))
        await world.ask(world.assignment("b", prompt(100)))
        await world.clock.advance(1.0)
        assert (completed(world)["a"].computed_tokens, completed(world)["b"].computed_tokens) == (96, 4)


async def test_under_fcfs_prompts_run_whole_one_by_one_and_in_order() -> None:
    world = World(step_limits=CHUNKS)
    async with running(world):
        await world.decide(
            ParametersChanged(parameters_version=1, changes={"worker_order": "fcfs"}, asked_by="operator")
        )
        for index, length in enumerate((500, 40, 20)):
            await world.ask(world.assignment(f"r{index}", prompt(length, seed=index)))
        await world.clock.advance(1.0)
        assert [(name, each.steps) for name, each in completed(world).items()] == [("r0", 1), ("r1", 1), ("r2", 1)]
        assert [each.queue_us for each in completed(world).values()] == [0, 500_000, 540_000]


async def test_a_request_between_two_chunks_can_be_released_and_finds_its_blocks_again() -> None:
    world = World(node=ROOMY, step_limits=StepLimits(128, 128))
    async with running(world):
        await world.ask(world.assignment("long", prompt(1_000)))
        await world.clock.advance(0.01)
        await world.ask(world.assignment("short", prompt(100, seed=1)))
        await world.clock.advance(0.150)
        assert world.events(PrefillStarted)[-1].request == "short"
        released = await world.ask(Release(request=RequestId("long"), attempt=1))
        assert released.outcome == "released"
        assert aborted(world) == [("long", 1, "released")]
        await world.ask(world.assignment("long", prompt(1_000), attempt=2))
        await world.clock.advance(3.0)
        assert (completed(world)["long"].cached_own_tokens, completed(world)["long"].computed_tokens) == (128, 872)


async def test_a_request_that_is_cancelled_in_a_chunk_ends_with_it_and_the_others_go_on() -> None:
    world = World(node=starting_in(0.2, blocks_per_rank=256), step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("first", prompt(10, seed=5)))
        await world.ask(world.assignment("long", prompt(1_000)))
        await world.ask(world.assignment("short", prompt(50, seed=1)))
        await world.clock.advance(0.25)
        await world.ask(Cancel(request=RequestId("long"), attempt=1))
        await world.clock.advance(0.4)
        assert aborted(world) == [("long", 1, "cancelled")]
        assert set(completed(world)) == {"first", "short"}
        (kept,) = [each for each in world.events(BlocksStored) if each.request == "long"]
        assert (kept.first_depth, kept.blocks) == (0, 8), "its share of the step was computed"


async def test_a_drain_gives_an_unfinished_prompt_back_after_its_chunk() -> None:
    world = World(step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("long", prompt(1_000)))
        await world.clock.advance(0.2)
        await world.ask(drain(worker(0), worker(1)))
        assert aborted(world) == []
        await world.clock.advance(0.1)
        assert aborted(world) == [("long", 1, "draining")]
        (done,) = world.events(DrainCompleted)
        assert done.returned_requests == 1
        assert [frame.error for frame in world.of("long")] == ["draining"]
        assert sum(each.blocks for each in world.events(BlocksStored)) == 16, "a redirect finds two chunks"
        assert (await world.adopt(2, (2, 2))).kind == "accepted"


async def test_a_switch_without_a_drain_gives_unfinished_prompts_back_too() -> None:
    world = World(step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("long", prompt(1_000)))
        await world.clock.advance(0.2)
        assert (await world.adopt(2, (4,))).kind == "accepted"
        assert aborted(world) == [("long", 1, "draining")]


async def test_sigterm_does_not_wait_for_the_rest_of_a_long_prompt() -> None:
    world = World(step_limits=CHUNKS)
    async with running(world) as agent:
        await world.ask(world.assignment("long", prompt(1_000)))
        await world.clock.advance(0.01)
        stopping = asyncio.ensure_future(agent.stop(8.0))
        await world.clock.advance(0.3)
        assert aborted(world) == [("long", 1, "draining")]
        await world.clock.advance(2.0)
        await stopping


async def test_requests_that_find_no_blocks_together_run_one_after_the_other() -> None:
    """A rank has 12 blocks, and each prompt needs 7 of them."""
    world = World(node=replace(SMALL, blocks_per_rank=12), step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("first", prompt(20, seed=9)))
        for index in range(3):
            await world.ask(world.assignment(f"r{index}", prompt(100, seed=index)))
        await world.clock.advance(3.0)
        assert set(completed(world)) == {"first", "r0", "r1", "r2"}
        assert len(world.events(PrefillStarted)) == 4
        assert aborted(world) == []


async def test_a_request_that_finds_no_blocks_waits_for_those_that_were_begun() -> None:
    """The long prompt holds 50 of 64 blocks from its first chunk on; 20 more are not there before it ends."""
    world = World(step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("long", prompt(800)))
        await world.clock.advance(0.01)
        await world.ask(world.assignment("other", prompt(320, seed=1)))
        await world.clock.advance(3.0)
        assert list(completed(world)) == ["long", "other"]
        assert aborted(world) == []


async def test_a_request_that_never_fits_is_told_so() -> None:
    world = World(node=replace(SMALL, blocks_per_rank=12), step_limits=CHUNKS)
    async with running(world):
        await world.ask(world.assignment("big", prompt(300), at=worker(0)))
        await world.ask(world.assignment("small", prompt(50, seed=1), at=worker(0)))
        await world.clock.advance(1.0)
        assert aborted(world) == [("big", 1, "out-of-blocks")]
        assert list(completed(world)) == ["small"]


class Picky(ModelledEngine):
    """It refuses every step with a certain request in it."""

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        if any(item.request.startswith("bad/") for item in step.items):
            raise EngineError("tokens: out of the vocabulary")
        return await super().prefill(step, noted)


async def test_a_step_that_is_refused_costs_only_the_request_that_is_meant() -> None:
    world = World(step_limits=CHUNKS, engine_class=Picky)
    async with running(world):
        await world.ask(world.assignment("first", prompt(20, seed=9)))
        for name, length in (("a", 30), ("bad", 40), ("b", 50), ("c", 60)):
            await world.ask(world.assignment(name, prompt(length, seed=length)))
        await world.clock.advance(1.0)
        assert aborted(world) == [("bad", 1, "engine")]
        assert set(completed(world)) == {"first", "a", "b", "c"}


async def test_a_packed_step_has_the_time_of_all_its_requests() -> None:
    """It pays for 21 of 60 prompts of 300 tokens to share a step. It takes 6.45 s: more than the least limit of 5 s, and than
    ten times the 0.45 s of one of them."""
    world = World(node=starting_in(0.15, blocks_per_rank=512), queue_max=100)
    async with running(world):
        await world.ask(world.assignment("first", prompt(10, seed=99)))
        for index in range(60):
            await world.ask(world.assignment(f"r{index}", prompt(300, seed=index)))
        await world.clock.advance(5.5)
        assert len(world.state.desk.running()[worker(0)]) == 21
        await world.clock.advance(2.0)
        assert len(completed(world)) == 22, "the engine was not taken for hung"


ACTIONS = st.one_of(
    st.tuples(st.just("assign"), st.integers(0, 7), st.integers(1, 700), st.integers(0, 2)),
    st.tuples(st.sampled_from(["cancel", "release"]), st.integers(0, 7)),
    st.tuples(st.just("wait"), st.integers(1, 300)),
    st.tuples(st.sampled_from(["drain", "adopt", "abort"])),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=30), st.sampled_from(["shortest-first", "fcfs"]))
def test_every_accepted_request_ends_exactly_once(actions: list[tuple[str, *tuple[int, ...]]], order: str) -> None:
    asyncio.run(any_life(actions, order))


async def any_life(actions: list[tuple[str, *tuple[int, ...]]], order: str) -> None:
    """Arrivals of three common prefixes, cancels, releases, drains, switches and aborted switches, in any order."""
    world = World(node=replace(SMALL, blocks_per_rank=48), step_limits=CHUNKS)
    accepted: list[tuple[str, int]] = []
    async with running(world):
        await world.decide(ParametersChanged(parameters_version=1, changes={"worker_order": order}, asked_by="o"))
        epoch, attempts, compositions = 1, Counter[int](), [(1, 1, 2), (4,), (2, 2)]
        for action, *numbers in actions:
            workers = list(world.state.desk.workers)
            match action, numbers:
                case "assign", [request, length, seed]:
                    attempts[request] += 1
                    at = workers[length % len(workers)]
                    assign = world.assignment(f"r{request}", prompt(length, seed), at=at, attempt=attempts[request])
                    if (await world.ask(assign)).kind == "accepted":
                        accepted.append((f"r{request}", attempts[request]))
                case "cancel", [request]:
                    await world.ask(Cancel(request=RequestId(f"r{request}"), attempt=max(1, attempts[request])))
                case "release", [request]:
                    await world.ask(Release(request=RequestId(f"r{request}"), attempt=max(1, attempts[request])))
                case "wait", [milliseconds]:
                    await world.clock.advance(milliseconds / 1_000)
                case "drain", _:
                    await world.ask(drain(*workers[:1], epoch=epoch + 1))
                case "adopt", _:
                    epoch += 1
                    await world.adopt(epoch, compositions[epoch % 3])
                case "abort", _:
                    await world.decide(EpochAborted(node=NODE, epoch=epoch + 1, step="draining", reason="test"))
            world.state.desk.check()
        await world.clock.advance(60.0)
        assert len(world.state.desk) == 0, "nothing is left behind"
    ends = Counter((each.request, each.attempt) for each in world.events(PrefillCompleted, PrefillAborted))
    assert ends == Counter(accepted)
    starts = Counter((each.request, each.attempt) for each in world.events(PrefillStarted))
    assert all(count == 1 for count in starts.values())
    numbers: dict[str, list[int]] = {}
    for stored in world.events(BlocksStored):
        numbers.setdefault(stored.worker, []).append(stored.number)
    assert all(each == sorted(set(each)) for each in numbers.values())
    for each in world.events(PrefillCompleted):
        assert each.cached_own_tokens % BLOCK_TOKENS == 0


async def test_a_prompt_waits_for_blocks_that_a_hand_off_from_before_the_switch_still_needs() -> None:
    world = World(node=replace(SMALL, link_bytes_per_s=1e5))
    async with running(world):
        await world.ask(world.assignment("old", prompt(640), decode=True, max_new_tokens=2))
        await world.clock.advance(0.7)
        assert (await world.adopt(2, (1, 1, 1, 1))).kind == "accepted"
        await world.ask(world.assignment("new", prompt(800, seed=1), at=worker(0, epoch=2)))
        await world.clock.advance(1.0)
        assert aborted(world) == [], "there is room for it once the first prompt is on the decode rank"
        await world.clock.advance(6.0)
        assert list(completed(world)) == ["old", "new"]
