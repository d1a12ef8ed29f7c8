"""What every engine must do, whatever it is made of. Subclass `EngineContract` and give it a `new_engine` fixture.

    class TestTorch(EngineContract):
        @pytest.fixture
        def new_engine(self) -> Callable[[], Engine]: ...

Engines under test have 4 prefill ranks, at least 1 decode rank, and at least 8 and at most 64 blocks per rank.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import (
    STEP_ITEMS_MAX,
    Busy,
    Engine,
    EngineDied,
    EngineError,
    ItemResult,
    OutOfBlocks,
    PrefillItem,
    PrefillStep,
    Sampling,
    StaleEpoch,
)
from shared.contracts.ids import BlockId, RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import Composition, Group, groups_of

KEY = b"k" * 32
DEADLINE_S = 30
NEW_TOKENS_MAX = 64
GREEDY = Sampling()


class Node:
    """An engine with a memory for epochs and request ids, so that a test says only what it is about."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.epoch = 0
        self.block_tokens = engine.describe().block_tokens
        self._names = count()

    async def adopt(self, *composition: int) -> tuple[Group, ...]:
        self.epoch += 1
        await self.engine.adopt(self.epoch, composition)
        return groups_of(composition)

    def item(self, tokens: Tokens, sampling: Sampling = GREEDY) -> PrefillItem:
        then = Continuation(NEW_TOKENS_MAX, frozenset(), decode_rank=0)
        return PrefillItem(RequestId(f"r{next(self._names)}"), tokens, tuple(self.chain(tokens)), sampling, then=then)

    def chain(self, tokens: Tokens) -> list[BlockId]:
        return block_chain(tokens, self.block_tokens, KEY)

    async def prefill(self, group: Group, item: PrefillItem) -> ItemResult:
        return (await self.prefill_packed(group, item))[0]

    async def prefill_packed(self, group: Group, *items: PrefillItem) -> tuple[ItemResult, ...]:
        return (await self.engine.prefill(PrefillStep(self.epoch, group, items))).items

    async def serve(self, group: Group, tokens: Tokens, new_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
        """The whole life of a request: prefill, hand-off, release, decode."""
        item = self.item(tokens, sampling)
        first = first_token(await self.prefill(group, item))
        await self.engine.hand_off(item.request)
        self.engine.release(item.request)
        return [first, *await self.decode(item.request, first, new_tokens - 1, sampling=sampling)]

    async def decode(
        self,
        request: RequestId,
        first: int,
        new_tokens: int,
        stop: frozenset[int] = frozenset(),
        sampling: Sampling = GREEDY,
    ) -> list[int]:
        return [token.token async for token in self.engine.decode(request, first, new_tokens, stop, sampling)]


def first_token(result: ItemResult) -> int:
    assert result.first_token is not None, result
    return result.first_token.token


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 200, length).astype(np.uint32)


class EngineContract:
    """See the module docstring. `deadline_s` is of one test."""

    deadline_s = DEADLINE_S

    @pytest.fixture
    async def node(self, new_engine: Callable[[], Engine]) -> AsyncIterator[Node]:
        engine = new_engine()
        await engine.start()
        try:
            async with asyncio.timeout(self.deadline_s):
                yield Node(engine)
        finally:
            await engine.close()

    async def test_describes_itself_before_it_starts(self, new_engine: Callable[[], Engine]) -> None:
        engine = new_engine()
        before = engine.describe()
        assert (before.prefill_ranks, before.degrees) == (4, (1, 2, 4))
        assert not engine.health().ok
        with pytest.raises(EngineError):
            await engine.adopt(1, (4,))
        await engine.start()
        assert engine.describe() == before
        assert engine.health().ok
        assert engine.health().ranks_alive == 4 + before.decode_ranks
        await engine.close()

    async def test_serves_nothing_before_the_first_epoch(self, node: Node) -> None:
        with pytest.raises(StaleEpoch):
            await node.engine.prefill(PrefillStep(1, Group(0, 4), (node.item(prompt(10)),)))

    async def test_adopts_forward_only_and_answers_again(self, node: Node) -> None:
        engine = node.engine
        adopted = await engine.adopt(3, (2, 2))
        assert [each.rank for each in adopted] == [0, 1, 2, 3]
        assert len(await engine.adopt(3, (2, 2))) == 4
        with pytest.raises(StaleEpoch):
            await engine.adopt(2, (4,))
        for composition in [(2,), (4, 4), (3, 1), (1, 2, 1)]:
            with pytest.raises(ValueError, match="composition"):
                await engine.adopt(4, composition)
        assert engine.cached_blocks(Group(0, 2), []) == 0
        with pytest.raises(EngineError):
            engine.cached_blocks(Group(0, 4), [])

    async def test_a_step_of_another_epoch_is_refused(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        item = node.item(prompt(20))
        for epoch in (node.epoch - 1, node.epoch + 1):
            with pytest.raises(StaleEpoch):
                await node.engine.prefill(PrefillStep(epoch, group, (item,)))
        await node.prefill(group, item)

    async def test_a_step_of_no_worker_is_refused(self, node: Node) -> None:
        await node.adopt(2, 2)
        item = node.item(prompt(20))
        with pytest.raises(EngineError):
            await node.prefill(Group(0, 4), item)
        await node.prefill(Group(0, 2), item)

    @pytest.mark.parametrize("composition", [(1, 1, 1, 1), (2, 2), (4,)])
    async def test_reuses_whole_blocks_and_computes_the_rest(self, node: Node, composition: Composition) -> None:
        group = (await node.adopt(*composition))[0]
        block = node.block_tokens
        long, first = prompt(5 * block + 1), node.item(prompt(5 * block + 1))
        cold = await node.prefill(group, first)
        assert (cold.cached_tokens, cold.computed_tokens) == (0, 5 * block + 1)
        assert (cold.stored.first_depth, cold.stored.blocks) == (0, 5)
        assert node.engine.cached_blocks(group, node.chain(long)) == 5
        node.engine.release(first.request)
        warm = await node.prefill(group, node.item(long))
        assert (warm.cached_tokens, warm.computed_tokens, warm.stored.blocks) == (5 * block, 1, 0)
        assert first_token(warm) == first_token(cold)
        branch = np.concatenate([long[: 3 * block], prompt(2 * block, seed=1)])
        branched = await node.prefill(group, node.item(branch))
        assert (branched.cached_tokens, branched.stored.first_depth, branched.stored.blocks) == (3 * block, 3, 2)

    async def test_computes_at_least_one_token_of_a_fully_held_prompt(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        tokens = prompt(4 * node.block_tokens)
        cold = await node.prefill(group, node.item(tokens))
        warm = await node.prefill(group, node.item(tokens))
        assert warm.cached_tokens == 3 * node.block_tokens
        assert warm.computed_tokens == node.block_tokens
        assert warm.stored.blocks == 0
        assert first_token(warm) == first_token(cold)

    async def test_blocks_without_an_id_are_computed_and_not_stored(self, node: Node) -> None:
        """The prompt of a request that goes on elsewhere ends with generated tokens, whose blocks have no ids."""
        (group,) = await node.adopt(4)
        tokens = prompt(5 * node.block_tokens + 1)
        whole = node.item(tokens)
        named = replace(node.item(tokens), chain=whole.chain[:2])
        first = await node.prefill(group, named)
        assert (first.cached_tokens, first.stored.blocks) == (0, 2)
        node.engine.release(named.request)
        assert node.engine.cached_blocks(group, whole.chain) == 2
        again = await node.prefill(group, whole)
        assert (again.cached_tokens, again.stored.first_depth) == (2 * node.block_tokens, 2)
        assert first_token(again) == first_token(first)

    @pytest.mark.parametrize("composition", [(1, 1, 1, 1), (2, 2), (4,)])
    async def test_a_packed_step_gives_each_request_what_a_step_of_its_own_would(
        self, node: Node, composition: Composition
    ) -> None:
        group = (await node.adopt(*composition))[0]
        block = node.block_tokens
        lengths = (1, 3 * block + 1, 5, 2 * block, 4 * block - 1)
        prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
        alone = []
        for tokens in prompts:
            item = node.item(tokens)
            alone.append(first_token(await node.prefill(group, item)))
            node.engine.release(item.request)
        assert node.engine.cached_blocks(group, node.chain(prompts[1])) == 3
        (group,) = await node.adopt(4)
        # Now some of it is cached, and the last two are not.
        items = [node.item(tokens) for tokens in (*prompts, prompt(3 * block, seed=8), prompt(3, seed=9))]
        held = [node.engine.cached_blocks(group, item.chain) for item in items]
        results = await node.prefill_packed(group, *items)
        assert [result.request for result in results] == [item.request for item in items]
        assert [first_token(result) for result in results[: len(alone)]] == alone
        for item, result, blocks in zip(items, results, held, strict=True):
            assert result.cached_tokens == min(blocks, (len(item.tokens) - 1) // block) * block
            assert result.cached_tokens + result.computed_tokens == len(item.tokens)
            assert (result.stored.first_depth, result.stored.blocks) == (blocks, len(item.chain) - blocks)
            assert node.engine.cached_blocks(group, item.chain) == len(item.chain)

    async def test_a_prefix_that_two_requests_of_a_step_share_is_stored_once(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        block = node.block_tokens
        stem = prompt(3 * block)
        items = [node.item(np.concatenate([stem, prompt(2 * block + 1, seed)])) for seed in (1, 2)]
        first, second = await node.prefill_packed(group, *items)
        assert (first.cached_tokens, second.cached_tokens) == (0, 0)
        assert (first.stored.first_depth, first.stored.blocks) == (0, 5)
        assert (second.stored.first_depth, second.stored.blocks) == (3, 2)
        assert sum(len(run) for _, run in node.engine.resident(group).runs) == 7
        for item, result in zip(items, (first, second), strict=True):
            alone = await node.serve(group, item.tokens, 6)
            await node.engine.hand_off(item.request)
            assert [first_token(result), *await node.decode(item.request, first_token(result), 5)] == alone

    async def test_a_step_is_refused_whole_if_one_prompt_has_no_room(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        blocks, block = node.engine.describe().blocks_per_rank, node.block_tokens
        items = [node.item(prompt(length * block, seed)) for seed, length in enumerate((1, blocks - 2, 2))]
        with pytest.raises(OutOfBlocks):
            await node.prefill_packed(group, *items)
        assert node.engine.resident(group).runs == ()
        await node.prefill_packed(group, *items[:2])
        for item in items[:2]:
            node.engine.release(item.request)
        await node.prefill(group, items[2])

    async def test_a_step_of_no_request_too_many_or_one_twice_is_refused(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        item = node.item(prompt(5))
        for items in [
            (),
            (item, node.item(prompt(5)), item),
            tuple(node.item(prompt(1)) for _ in range(STEP_ITEMS_MAX + 1)),
        ]:
            with pytest.raises(EngineError):
                await node.prefill_packed(group, *items)
        await node.prefill(group, item)

    async def test_the_others_of_a_step_go_on_when_one_is_cancelled(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        block = node.block_tokens
        items = [node.item(prompt(3 * block + 1, seed)) for seed in range(3)]
        alone = [first_token(await node.prefill(group, node.item(item.tokens))) for item in items]
        running = asyncio.create_task(node.prefill_packed(group, *items))
        await asyncio.sleep(0)
        node.engine.cancel(items[1].request)
        results = await running
        assert [result.outcome for result in results] == ["finished", "cancelled", "finished"]
        assert [first_token(results[0]), results[1].first_token, first_token(results[2])] == [alone[0], None, alone[2]]
        with pytest.raises(EngineError):
            await node.engine.hand_off(items[1].request)
        await node.engine.hand_off(items[2].request)

    @pytest.mark.parametrize("composition", [(1, 1, 1, 1), (2, 2), (4,)])
    async def test_a_prompt_in_chunks_ends_as_a_whole_one_does(self, node: Node, composition: Composition) -> None:
        """Others have the steps between its own, and one of them uses what the first chunk has stored."""
        group = (await node.adopt(*composition))[0]
        block = node.block_tokens
        whole = node.item(prompt(5 * block + 3))
        generated = await node.serve(group, whole.tokens, 6)
        await self._push_out(node, group)
        assert node.engine.cached_blocks(group, whole.chain) == 0
        first = await node.prefill(group, replace(whole, until=2 * block))
        assert (first.outcome, first.first_token) == ("unfinished", None)
        assert (first.cached_tokens, first.computed_tokens) == (0, 2 * block)
        assert (first.stored.first_depth, first.stored.blocks) == (0, 2)
        with pytest.raises(EngineError):
            await node.engine.hand_off(whole.request)
        other = node.item(np.concatenate([whole.tokens[: 2 * block], prompt(3, seed=5)]))
        assert (await node.prefill(group, other)).cached_tokens == 2 * block
        second = await node.prefill(group, replace(whole, until=4 * block))
        assert (second.cached_tokens, second.computed_tokens) == (2 * block, 2 * block)
        assert node.engine.cached_blocks(group, whole.chain) == 4
        last = await node.prefill(group, whole)
        assert (last.outcome, last.cached_tokens, last.computed_tokens) == ("finished", 4 * block, block + 3)
        assert (last.stored.first_depth, last.stored.blocks) == (4, 1)
        await node.engine.hand_off(whole.request)
        assert [first_token(last), *await node.decode(whole.request, first_token(last), 5)] == generated

    @staticmethod
    async def _push_out(node: Node, group: Group) -> None:
        """Fill the worker with other blocks."""
        blocks = group.degree * node.engine.describe().blocks_per_rank
        filler = node.item(prompt(blocks * node.block_tokens, seed=99))
        await node.prefill(group, filler)
        node.engine.release(filler.request)

    async def test_a_step_may_end_one_prompt_and_begin_another(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        block = node.block_tokens
        long, short = node.item(prompt(6 * block)), node.item(prompt(5, seed=1))
        begun, done = await node.prefill_packed(group, replace(long, until=4 * block), short)
        assert (begun.outcome, done.outcome) == ("unfinished", "finished")
        again, ended = await node.prefill_packed(group, node.item(short.tokens), long)
        assert first_token(again) == first_token(done)
        assert (ended.cached_tokens, ended.computed_tokens) == (4 * block, 2 * block)
        assert first_token(ended) == first_token(await node.prefill(group, node.item(long.tokens)))

    async def test_a_begun_prompt_has_room_for_its_end(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        blocks, block = node.engine.describe().blocks_per_rank, node.block_tokens
        long = node.item(prompt((blocks - 1) * block))
        await node.prefill(group, replace(long, until=block))
        two = node.item(prompt(2 * block, seed=1))
        with pytest.raises(OutOfBlocks):
            await node.prefill_packed(group, replace(long, until=2 * block), two)
        assert node.engine.cached_blocks(group, long.chain) == 1, "a step that is refused does nothing"
        assert (await node.prefill(group, long)).cached_tokens == block
        node.engine.release(long.request)
        await node.prefill(group, two)

    async def test_a_prompt_cancelled_between_or_in_its_chunks_keeps_whole_blocks(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        blocks, block = node.engine.describe().blocks_per_rank, node.block_tokens
        between, during = (node.item(prompt((blocks - 1) * block, seed)) for seed in range(2))
        await node.prefill(group, replace(between, until=2 * block))
        node.engine.cancel(between.request)
        assert node.engine.cached_blocks(group, between.chain) == 2
        await node.prefill(group, replace(during, until=block))
        running = asyncio.create_task(node.prefill(group, replace(during, until=3 * block)))
        await asyncio.sleep(0)
        node.engine.cancel(during.request)
        result = await running
        assert (result.outcome, result.first_token) == ("cancelled", None)
        assert node.engine.cached_blocks(group, during.chain) == 1 + result.stored.blocks
        await node.prefill(group, node.item(prompt(blocks * block - 1, seed=2)))

    async def test_an_unfinished_prompt_goes_on_after_a_switch(self, node: Node) -> None:
        left, _ = await node.adopt(2, 2)
        block = node.block_tokens
        item = node.item(prompt(6 * block + 1))
        await node.prefill(left, replace(item, until=4 * block))
        (merged,) = await node.adopt(4)
        ended = await node.prefill(merged, item)
        assert (ended.cached_tokens, ended.computed_tokens) == (4 * block, 2 * block + 1)
        assert first_token(ended) == first_token(await node.prefill(merged, node.item(item.tokens)))
        await node.engine.hand_off(item.request)

    async def test_a_chunk_ends_with_a_block_inside_the_prompt(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        block = node.block_tokens
        item = node.item(prompt(3 * block))
        for until in (0, block + 1, 3 * block, 4 * block):
            with pytest.raises(EngineError, match="until"):
                await node.prefill(group, replace(item, until=until))
        await node.prefill(group, item)

    async def test_resident_lists_parents_before_children(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        block = node.block_tokens
        stem = prompt(3 * block)
        for seed in (1, 2):
            await node.prefill(group, node.item(np.concatenate([stem, prompt(2 * block, seed)])))
        known: set[BlockId | None] = {None}
        for parent, run in node.engine.resident(group).runs:
            assert parent in known
            assert not known & set(run)
            known |= set(run)
        assert len(known) - 1 == 3 + 2 + 2
        assert set(node.chain(stem)) <= known

    async def test_a_worker_runs_one_step_and_workers_run_side_by_side(self, node: Node) -> None:
        left, right = await node.adopt(2, 2)
        length = 10 * node.block_tokens
        items = [node.item(prompt(length, seed)) for seed in range(3)]
        first = asyncio.create_task(node.prefill(left, items[0]))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await node.prefill(left, items[1])
        with pytest.raises(Busy):
            await node.engine.adopt(node.epoch + 1, (4,))
        other = await node.prefill(right, items[2])
        assert other.computed_tokens == length
        await first
        await node.prefill(left, items[1])

    async def test_a_prompt_without_room_changes_nothing(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        blocks = node.engine.describe().blocks_per_rank
        small = prompt(2 * node.block_tokens)
        await node.prefill(group, node.item(small))
        with pytest.raises(OutOfBlocks):
            await node.prefill(group, node.item(prompt((blocks + 1) * node.block_tokens, seed=1)))
        assert node.engine.cached_blocks(group, node.chain(small)) == 2
        await node.prefill(group, node.item(prompt(2 * node.block_tokens, seed=2)))

    async def test_evicts_under_pressure_and_says_what(self, node: Node) -> None:
        group = (await node.adopt(2, 2))[0]
        room = 2 * node.engine.describe().blocks_per_rank
        held: set[BlockId] = set()
        for seed in range(6):
            item = node.item(prompt((room // 3) * node.block_tokens + 1, seed))
            result = await node.engine.prefill(PrefillStep(node.epoch, group, (item,)))
            held = held - set(result.evicted) | set(item.chain)
            node.engine.release(item.request)
            runs = node.engine.resident(group).runs
            assert held == {block for _, run in runs for block in run}
        assert len(held) <= room
        assert node.engine.resident(Group(2, 2)).runs == ()

    async def test_a_finished_prefill_stays_pinned_until_release(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        half = (node.engine.describe().blocks_per_rank // 2 + 1) * node.block_tokens
        pinned = node.item(prompt(half))
        await node.prefill(group, pinned)
        with pytest.raises(OutOfBlocks):
            await node.prefill(group, node.item(prompt(half, seed=1)))
        node.engine.release(pinned.request)
        node.engine.release(pinned.request)
        await node.prefill(group, node.item(prompt(half, seed=1)))

    async def test_a_cancelled_prefill_leaves_nothing_pinned(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        length = (node.engine.describe().blocks_per_rank - 1) * node.block_tokens
        item = node.item(prompt(length))
        running = asyncio.create_task(node.prefill(group, item))
        await asyncio.sleep(0)
        node.engine.cancel(item.request)
        result = await running
        assert (result.outcome, result.first_token) == ("cancelled", None)
        assert node.engine.cached_blocks(group, item.chain) == result.stored.blocks
        await node.prefill(group, node.item(prompt(length, seed=1)))

    async def test_a_caller_that_leaves_a_prefill_leaves_nothing_pinned(self, node: Node) -> None:
        group = (await node.adopt(1, 1, 2))[0]
        length = (node.engine.describe().blocks_per_rank - 1) * node.block_tokens
        running = asyncio.create_task(node.prefill(group, node.item(prompt(length))))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        other = node.item(prompt(length, seed=1))
        while True:  # the step may still be ending
            try:
                await node.prefill(group, other)
                break
            except Busy:
                await asyncio.sleep(0.01)

    async def test_hand_off_needs_a_finished_prefill(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        with pytest.raises(EngineError):
            await node.engine.hand_off(RequestId("unknown"))
        item = node.item(prompt(3 * node.block_tokens + 1))
        await node.prefill(group, item)
        once = await node.engine.hand_off(item.request)
        assert once.bytes >= (3 * node.block_tokens + 1) * node.engine.describe().kv_bytes_per_token
        assert (await node.engine.hand_off(item.request)).bytes == once.bytes

    async def test_decode_needs_a_hand_off(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        item = node.item(prompt(9))
        await node.prefill(group, item)
        with pytest.raises(EngineError):
            await node.decode(item.request, 1, 5)

    async def test_decode_ends_at_its_limit_or_after_a_stop_token(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        tokens = prompt(9)
        generated = await node.serve(group, tokens, 12)
        assert len(generated) == 12
        assert await node.serve(group, tokens, 5) == generated[:5]
        assert await node.serve(group, tokens, 1) == generated[:1]
        item = node.item(tokens)
        await node.prefill(group, item)
        await node.engine.hand_off(item.request)
        stop = generated[4]
        until = generated.index(stop, 1) + 1
        assert await node.decode(item.request, generated[0], 11, frozenset({stop})) == generated[1:until]

    async def test_a_closed_decode_makes_room_for_the_same_request(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        item = node.item(prompt(9))
        result = await node.prefill(group, item)
        seen: list[list[int]] = []
        for _ in range(3):
            await node.engine.hand_off(item.request)
            decoding = node.engine.decode(item.request, first_token(result), 20, frozenset(), GREEDY)
            async with aclosing(decoding):
                seen.append([(await anext(decoding)).token for _ in range(4)])
            with pytest.raises(EngineError):
                await node.decode(item.request, first_token(result), 20)
        assert seen[0] == seen[1] == seen[2]

    async def test_sequences_decode_side_by_side_and_beside_prefill(self, node: Node) -> None:
        left, right = await node.adopt(2, 2)
        alone = [await node.serve(left, prompt(20, seed), 8) for seed in range(3)]
        together = await asyncio.gather(
            *(self._late_decode(node, left, prompt(20, seed), seed) for seed in range(3)),
            node.serve(right, prompt(60, seed=9), 4),
        )
        assert together[:3] == alone

    @staticmethod
    async def _late_decode(node: Node, group: Group, tokens: Tokens, turn: int) -> list[int]:
        item = node.item(tokens)
        while True:
            try:
                result = await node.prefill(group, item)
                break
            except Busy:
                await asyncio.sleep(0.002 * (turn + 1))
        await node.engine.hand_off(item.request)
        first = first_token(result)
        return [first, *await node.decode(item.request, first, 7)]

    async def test_sampling_depends_on_the_seed_and_nothing_else(self, node: Node) -> None:
        left, right = await node.adopt(2, 2)
        tokens, hot = prompt(30), Sampling(temperature=1.5, top_p=0.95, seed=7)
        generated = await node.serve(left, tokens, 10, hot)
        assert await node.serve(left, tokens, 10, hot) == generated
        assert await node.serve(right, tokens, 10, hot) == generated
        other = Sampling(temperature=1.5, top_p=0.95, seed=8)
        assert await node.serve(left, tokens, 10, other) != generated

    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.2, top_p=0.9, seed=3)])
    async def test_a_request_goes_on_elsewhere_as_it_began(self, node: Node, sampling: Sampling) -> None:
        """A node is lost after five tokens: prompt and tokens are prefilled on another worker."""
        left, right = await node.adopt(2, 2)
        tokens = prompt(30)
        generated = await node.serve(left, tokens, 12, sampling)
        moved = np.concatenate([tokens, np.array(generated[:5], dtype=np.uint32)])
        assert await node.serve(right, moved, 7, sampling) == generated[5:]

    async def test_logprobs_name_the_chosen_token_first(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        item = node.item(prompt(10), Sampling(logprobs=3))
        result = await node.prefill(group, item)
        assert len(result.first_token.logprobs) == 4
        assert result.first_token.logprobs[0][0] == first_token(result)
        assert len({token for token, _ in result.first_token.logprobs}) == 4
        assert all(logprob <= 0 for _, logprob in result.first_token.logprobs)

    async def test_a_switch_keeps_what_the_new_workers_can_reach(self, node: Node) -> None:
        left, right = await node.adopt(2, 2)
        block = node.block_tokens
        a, b = prompt(6 * block + 1), prompt(5 * block + 1, seed=1)
        tokens = [
            (await node.prefill(left, node.item(a))).first_token,
            (await node.prefill(right, node.item(b))).first_token,
        ]
        (merged,) = await node.adopt(4)
        results = [await node.prefill(merged, node.item(each)) for each in (a, b)]
        assert [each.cached_tokens for each in results] == [6 * block, 5 * block]
        assert [first_token(each) for each in results] == [each.token for each in tokens]
        await node.adopt(1, 1, 1, 1)
        assert [node.engine.cached_blocks(Group(rank, 1), node.chain(a)) for rank in range(4)] == [1, 0, 0, 0]
        (merged,) = await node.adopt(4)
        assert node.engine.cached_blocks(merged, node.chain(a)) == 6
        again = await node.prefill(merged, node.item(a))
        assert first_token(again) == tokens[0].token

    async def test_hand_off_reads_right_through_a_switch(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        tokens = prompt(5 * node.block_tokens + 3)
        generated = await node.serve(group, tokens, 6)
        item = node.item(tokens)
        result = await node.prefill(group, item)
        await node.adopt(1, 1, 2)
        await node.engine.hand_off(item.request)
        assert await node.decode(item.request, first_token(result), 5) == generated[1:]

    async def test_releasing_or_cancelling_the_unknown_is_ignored(self, node: Node) -> None:
        await node.adopt(4)
        node.engine.release(RequestId("unknown"))
        node.engine.cancel(RequestId("unknown"))

    async def test_a_closed_engine_has_died(self, node: Node) -> None:
        (group,) = await node.adopt(4)
        watcher = asyncio.create_task(node.engine.wait_died())
        await asyncio.sleep(0)
        assert not watcher.done()
        await node.engine.close()
        await node.engine.close()
        assert await watcher
        assert not node.engine.health().ok
        for refused in (node.prefill(group, node.item(prompt(9))), node.engine.adopt(9, (4,))):
            with pytest.raises(EngineDied):
                await refused
