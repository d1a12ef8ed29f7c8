"""Prefixes fetched before the prefills that need them, over the in-memory log and bus, with the modelled engine.

The other node is a script: it has blocks and answers `pin`. A block takes 1 ms to come and 16 ms to compute."""

import asyncio
from dataclasses import replace

import pytest

from services.worker.engine.modelled import ModelledNode
from services.worker.fetches import FETCHES_PER_SOURCE_MAX, LIMIT_S_MIN, Wanted, decide
from shared.contracts.commands import Cancel, Drain, decode_command
from shared.contracts.copy_commands import Pin
from shared.contracts.events import BlocksStored, ParametersChanged, PrefillAborted, PrefillCompleted
from shared.contracts.ids import WorkerId, worker_id
from tests.services.worker.scripted import BLOCK_TOKENS, COSTS, SMALL, SUBJECTS, World, prompt, running, worker
from tests.services.worker.test_agent_copies import OTHER, OtherNode, chain, other

FAST = replace(SMALL, link_bytes_per_s=16e6)
SOURCE = worker_id(OTHER, 1, 0)
FETCH_US = 5_000 + 10 * 1_000
"""Of ten blocks: the latency of a copy, and the bytes."""


async def ask_for(world: World, request: str, tokens: int, seed: int = 0, blocks: int = 10, **changes: object) -> None:
    """Assign a prompt whose first `blocks` blocks the other node is said to hold."""
    fetch = {"fetch_from": SOURCE, "fetch_blocks": blocks, **changes}
    assert (await world.ask(world.assignment(request, prompt(tokens, seed), **fetch))).kind == "accepted"  # type: ignore[arg-type]


def completed(world: World, request: str) -> PrefillCompleted:
    (found,) = [
        each
        for each in world.events(PrefillCompleted)
        if isinstance(each, PrefillCompleted) and each.request == request
    ]
    return found


def split_of(done: PrefillCompleted) -> tuple[int, int, int]:
    return done.computed_tokens, done.cached_own_tokens, done.cached_fetched_tokens


def fetched_at(world: World) -> list[WorkerId]:
    return [
        each.worker for each in world.events(BlocksStored) if isinstance(each, BlocksStored) and each.cause == "fetch"
    ]


def world_of(node: ModelledNode = FAST) -> World:
    return World(node=node)


async def test_a_prefix_is_fetched_and_the_rest_computed() -> None:
    world = world_of()
    async with running(world):
        node = await other(world, chain(10))
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 5)
        await world.clock.advance(1.0)
        done = completed(world, "a")
        assert split_of(done) == (5, 0, 10 * BLOCK_TOKENS)
        assert (done.fetch_us, done.queue_us, done.prefill_us, done.fetch_fallback) == (FETCH_US, 0, 5_000, None)
        (frame,) = world.of("a")
        assert (frame.cached_tokens, frame.fetch_us, frame.queue_us) == (10 * BLOCK_TOKENS, FETCH_US, 0)
        (stored,) = [each for each in world.envelopes() if isinstance(each.data, BlocksStored)]
        assert isinstance(stored.data, BlocksStored)
        assert (stored.correlation, stored.data.cause, stored.data.blocks) == ("a", "fetch", 10)
        assert [unpin.operation for unpin in node.unpins] == [pin.operation for pin in node.pins] == ["fetch a/1"]


async def test_only_what_the_worker_lacks_is_fetched_and_the_rest_is_its_own() -> None:
    world = world_of()
    async with running(world):
        await other(world, chain(10))
        await world.ask(world.assignment("before", prompt(10 * BLOCK_TOKENS)[: 4 * BLOCK_TOKENS]))
        await world.clock.advance(1.0)
        await ask_for(world, "a", 12 * BLOCK_TOKENS)
        await world.clock.advance(1.0)
        assert split_of(completed(world, "a")) == (2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, 6 * BLOCK_TOKENS)


async def test_what_is_on_a_sibling_s_ranks_comes_the_same_way() -> None:
    world = world_of()
    async with running(world):
        await world.ask(world.assignment("there", prompt(10 * BLOCK_TOKENS), at=worker(2)))
        await world.clock.advance(1.0)
        await ask_for(world, "here", 10 * BLOCK_TOKENS + 1, fetch_from=worker(2))
        await world.clock.advance(1.0)
        assert split_of(completed(world, "here")) == (1, 0, 10 * BLOCK_TOKENS)


def reconciled_at(world: World) -> list[tuple[WorkerId, int]]:
    return [
        (each.worker, each.blocks)
        for each in world.events(BlocksStored)
        if isinstance(each, BlocksStored) and each.cause == "reconciliation"
    ]


async def split_world(world: World, blocks: int = 10) -> None:
    """Ranks 0 and 1 served a prompt of so many blocks together, and serve alone now: the even blocks lie on rank 0."""
    await world.adopt(2, (2, 1, 1))
    await world.ask(world.assignment("before", prompt(blocks * BLOCK_TOKENS), at=worker(0, epoch=2)))
    await world.clock.advance(1.0)
    await world.adopt(3, (1, 1, 1, 1))


@pytest.mark.parametrize(("rank", "held"), [(0, 1), (1, 0)])
async def test_what_a_split_left_on_the_sibling_s_ranks_comes_with_the_first_prompt_that_wants_it(
    rank: int, held: int
) -> None:
    world = world_of()
    async with running(world):
        await split_world(world)
        here = worker(rank, epoch=3)
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 5, at=here, fetch_from=here)
        await world.clock.advance(1.0)
        assert split_of(completed(world, "a")) == (5, held * BLOCK_TOKENS, (10 - held) * BLOCK_TOKENS)
        assert reconciled_at(world) == [(here, 10 - held)]
        assert fetched_at(world) == []
        await ask_for(world, "b", 10 * BLOCK_TOKENS + 5, at=here, fetch_from=here)
        await world.clock.advance(1.0)
        assert completed(world, "b").fetch_fallback == "here"


async def test_what_was_pending_and_has_been_evicted_is_computed_and_the_rest_before_it_comes() -> None:
    """A prompt that fills rank 1 pushes out the odd blocks there: nobody holds them, so they are the first to go."""
    world = world_of()
    async with running(world):
        await split_world(world)
        here, there = worker(0, epoch=3), worker(1, epoch=3)
        filling = world.engines[-1].describe().blocks_per_rank * BLOCK_TOKENS - 1
        await world.ask(world.assignment("filling", prompt(filling, seed=5), at=there))
        await world.clock.advance(10.0)
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 5, at=here, fetch_from=here)
        await world.clock.advance(1.0)
        done = completed(world, "a")
        assert (done.fetch_fallback, split_of(done)) == ("no-source", (9 * BLOCK_TOKENS + 5, BLOCK_TOKENS, 0))


async def test_a_second_switch_while_pending_blocks_come_stores_nothing_and_they_come_again_after_it() -> None:
    world = world_of()
    async with running(world):
        await split_world(world)
        here = worker(1, epoch=3)
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 5, at=here, fetch_from=here)
        await world.clock.advance(0.006)
        await world.adopt(4, (1, 1, 2))
        await world.clock.advance(1.0)
        assert reconciled_at(world) == []
        again = worker(1, epoch=4)
        await ask_for(world, "b", 10 * BLOCK_TOKENS + 5, at=again, fetch_from=again)
        await world.clock.advance(1.0)
        assert (split_of(completed(world, "b"))[0], reconciled_at(world)) == (5, [(again, 10)])


async def test_others_go_first_while_a_prefix_is_on_its_way_but_not_in_order_of_arrival() -> None:
    for order, first in (("shortest-first", "b"), ("fcfs", "a")):
        world = world_of()
        async with running(world):
            await world.decide(
                ParametersChanged(parameters_version=1, changes={"worker_order": order}, asked_by="test")
            )
            await other(world, chain(10))
            await ask_for(world, "a", 10 * BLOCK_TOKENS + 5, service_us=20_000)
            await world.ask(world.assignment("b", prompt(40, seed=3)))
            await world.clock.advance(1.0)
            assert next(each.request for each in world.events(PrefillCompleted)) == first  # type: ignore[attr-defined]
            assert split_of(completed(world, "a"))[2] == 10 * BLOCK_TOKENS


async def test_blocks_that_are_here_by_its_turn_are_not_fetched() -> None:
    world = world_of()
    async with running(world):
        node = await other(world, chain(10))
        await world.ask(world.assignment("first", prompt(10 * BLOCK_TOKENS + 1)))
        await world.clock.advance(1.0)
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 1)
        await world.clock.advance(1.0)
        done = completed(world, "a")
        assert split_of(done) == (1, 10 * BLOCK_TOKENS, 0)
        assert (done.fetch_us, done.fetch_fallback, node.pins) == (0, "here", [])


async def test_a_source_that_was_slow_is_not_asked_again_for_a_minute() -> None:
    """At 1 MB/s a block takes as long to come as to compute."""
    world = world_of(SMALL)
    async with running(world):
        node = await other(world, [block for seed in range(3) for block in chain(10, seed)])
        for number, wait_s in enumerate((1.0, 60.0, 1.0)):
            await ask_for(world, f"{number}", 10 * BLOCK_TOKENS + 1, seed=number)
            await world.clock.advance(wait_s)
        assert [completed(world, f"{number}").fetch_fallback for number in range(3)] == [None, "dearer", None]
        assert len(node.pins) == 2


@pytest.mark.parametrize("held", [0, 3])
async def test_what_the_source_has_lost_is_computed(held: int) -> None:
    world = world_of()
    async with running(world):
        await other(world, chain(10)[:held])
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 1)
        await world.clock.advance(1.0)
        done = completed(world, "a")
        assert split_of(done) == ((10 - held) * BLOCK_TOKENS + 1, 0, held * BLOCK_TOKENS)
        assert done.fetch_fallback == "no-source"


async def test_a_source_that_is_silent_costs_a_limit_and_a_late_copy_leaves_what_has_come() -> None:
    world = world_of()

    async def stay_silent(_subject: str, _payload: bytes) -> bytes:
        await world.clock.sleep(60.0)
        return b""

    async with running(world):
        await world.bus.subscribe(SUBJECTS.agent(OTHER), stay_silent)
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 1)
        await world.clock.advance(LIMIT_S_MIN + 1)
        done = completed(world, "a")
        assert (done.fetch_fallback, done.computed_tokens) == ("time-limit", 10 * BLOCK_TOKENS + 1)
        assert done.fetch_us == LIMIT_S_MIN * 1e6
    world = world_of(replace(SMALL, link_bytes_per_s=160e3))
    async with running(world):
        await other(world, chain(10))
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 1)
        await world.clock.advance(3.0)
        assert completed(world, "a").fetch_fallback == "time-limit"
        assert split_of(completed(world, "a")) == (BLOCK_TOKENS + 1, 0, 9 * BLOCK_TOKENS)


async def test_a_source_that_was_silent_is_asked_again_after_a_minute_and_not_before() -> None:
    world, pins = world_of(), 0

    async def stay_silent(_subject: str, payload: bytes) -> bytes:
        nonlocal pins
        pins += isinstance(decode_command(payload), Pin)
        await world.clock.sleep(60.0)
        return b""

    async with running(world):
        await world.bus.subscribe(SUBJECTS.agent(OTHER), stay_silent)
        told = []
        for number, wait_s in enumerate((10.0, 10.0, 60.0, 10.0)):
            await ask_for(world, f"{number}", 10 * BLOCK_TOKENS + 1, seed=number)
            await world.clock.advance(wait_s)
            told.append(completed(world, f"{number}").fetch_fallback)
        assert told == ["time-limit", "silent", "silent", "time-limit"]
        assert pins == 2


async def test_a_request_that_leaves_during_its_fetch_leaves_the_blocks() -> None:
    world = world_of()
    async with running(world):
        await other(world, chain(10))
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 1)
        await world.clock.advance(0.01)
        await world.ask(Cancel(request="a", attempt=1))  # type: ignore[arg-type]
        assert [each.reason for each in world.events(PrefillAborted)] == ["cancelled"]  # type: ignore[attr-defined]
        await world.clock.advance(1.0)
        assert fetched_at(world) == [worker(0)]
        assert world.state.held_blocks[worker(0)] == 10


async def test_a_drain_and_a_switch_during_a_fetch_tell_nothing() -> None:
    world = world_of()
    async with running(world):
        await other(world, chain(10))
        await ask_for(world, "a", 10 * BLOCK_TOKENS + 1)
        await world.clock.advance(0.01)
        await world.ask(Drain(term=1, epoch=2, workers=(worker(0),), deadline_us=10**7))
        assert [each.reason for each in world.events(PrefillAborted)] == ["draining"]  # type: ignore[attr-defined]
        assert (await world.adopt(2, (2, 2))).kind == "accepted"
        await world.clock.advance(1.0)
        assert fetched_at(world) == []


async def test_a_source_is_read_by_two_at_a_time() -> None:
    world = world_of()
    async with running(world):
        node = await other(world, [block for seed in range(5) for block in chain(10, seed)])
        for seed in range(5):
            await ask_for(world, f"{seed}", 10 * BLOCK_TOKENS + 1, seed=seed)
        assert in_flight(node) == FETCHES_PER_SOURCE_MAX
        await world.clock.advance(1.0)
        assert {split_of(completed(world, f"{seed}")) for seed in range(5)} == {(1, 0, 10 * BLOCK_TOKENS)}


async def test_a_fetch_that_waits_for_another_worker_s_begins_when_that_is_over() -> None:
    world = world_of()
    async with running(world):
        await other(world, [block for seed in range(3) for block in chain(10, seed)])
        for seed, at in enumerate((worker(0), worker(0), worker(2))):
            await ask_for(world, f"{seed}", 10 * BLOCK_TOKENS + 1, seed=seed, at=at)
        await world.clock.advance(1.0)
        assert {split_of(completed(world, f"{seed}")) for seed in range(3)} == {(1, 0, 10 * BLOCK_TOKENS)}


async def test_with_its_agent_a_fetch_ends_and_no_other_begins() -> None:
    world, unhandled = world_of(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context["message"]))
    async with running(world):
        node = await other(world, [block for seed in range(5) for block in chain(10, seed)])
        for seed in range(5):
            await ask_for(world, f"{seed}", 10 * BLOCK_TOKENS + 1, seed=seed)
        assert in_flight(node) == FETCHES_PER_SOURCE_MAX
    assert (len(node.pins), unhandled) == (FETCHES_PER_SOURCE_MAX, [])


@pytest.mark.parametrize(("fetch_s", "decided"), [(None, Wanted(0, 9.0)), (8, Wanted(0, 9.0)), (9, "dearer")], ids=str)
def test_a_fetch_may_take_as_long_as_it_saves_however_slow_its_source_is_known_to_be(
    fetch_s: int | None, decided: Wanted | str
) -> None:
    """Nine of ten thousand tokens, at a millisecond each: a limit below what is expected would cut every one short."""
    fetch_us = None if fetch_s is None else fetch_s * 10**6
    assert decide(COSTS, 1, 10_000, (0, 9_000), fetch_us) == decided


def in_flight(node: OtherNode) -> int:
    return len(node.pins) - len(node.unpins)


@pytest.mark.parametrize(
    ("blocks", "source"), [(11, SOURCE), (3, None), (0, SOURCE)], ids=["beyond the prompt", "no source", "no blocks"]
)
async def test_a_fetch_that_makes_no_sense_is_refused(blocks: int, source: WorkerId | None) -> None:
    world = world_of()
    async with running(world):
        command = world.assignment("a", prompt(10 * BLOCK_TOKENS + 1), fetch_from=source, fetch_blocks=blocks)
        refused = await world.ask(command)
        assert (refused.reason, "fetch_blocks" in refused.detail) == ("bad-command", True)  # type: ignore[union-attr]


async def test_what_a_source_was_last_seen_to_do_counts_and_having_lost_blocks_is_no_silence() -> None:
    world = world_of()
    async with running(world):
        node = await other(world, [block for seed in (0, 3) for block in chain(10, seed)])
        told = []
        for number, silent_s in enumerate((0.0, 0.0, 0.0, 60.0, 0.0)):
            node.silent_s = silent_s
            await ask_for(world, f"{number}", 10 * BLOCK_TOKENS + 1, seed=number)
            await world.clock.advance(10.0)
            told.append(completed(world, f"{number}").fetch_fallback)
        assert told == [None, "no-source", "no-source", "time-limit", "silent"]


async def test_who_speaks_again_after_silence_is_as_fast_as_it_was_seen_then() -> None:
    """At a third of its bandwidth a fetch would be dearer than to compute."""
    world = world_of(replace(SMALL, link_bytes_per_s=2e6))
    async with running(world):
        node = await other(world, [block for seed in range(3) for block in chain(10, seed)])
        told = []
        for number, (silent_s, wait_s) in enumerate(((60.0, 130.0), (0.0, 10.0), (0.0, 10.0))):
            node.silent_s = silent_s
            await ask_for(world, f"{number}", 10 * BLOCK_TOKENS + 1, seed=number)
            await world.clock.advance(wait_s)
            told.append(completed(world, f"{number}").fetch_fallback)
        assert told == ["time-limit", None, None]
