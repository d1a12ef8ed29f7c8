"""What every engine must do with blocks that come from another worker, are lent to one, or are to go.

Like `contract.EngineContract`, whose `new_engine` fixture it uses; a test may make two engines, which are two nodes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from services.worker.engine.copy_plan import CopyPlan, HandOffPlan
from services.worker.engine.protocol import (
    Engine,
    EngineError,
    OutOfBlocks,
    PrefillItem,
    PrefillStep,
    Sampling,
    StaleEpoch,
    StepResult,
)
from shared.contracts.ids import BlockId, NodeId, RequestId
from shared.model.lattice import Composition, Group
from tests.services.worker.engine.contract import DEADLINE_S, Node, first_token, prompt

OTHER = NodeId("other")


async def stored(node: Node, group: Group, blocks: int, seed: int = 0) -> list[BlockId]:
    """The chain of a prompt that the worker has computed and nobody needs."""
    item = node.item(prompt(blocks * node.block_tokens, seed))
    await node.prefill(group, item)
    node.engine.release(item.request)
    return list(item.chain)


async def plan_from(
    source: Node, node: Node, group: Group, chain: Sequence[BlockId], below: int = 0, lease: str = "lease"
) -> CopyPlan:
    """A plan that reads all of `chain` from `below` on at `source`, and pins it there."""
    pinned = await source.engine.pin(lease, chain[below:])
    foreign = None if source is node else OTHER
    sources = tuple(replace(each, node=foreign) for each in pinned.sources if each is not None)
    return CopyPlan(
        operation=f"copy {lease}",
        epoch=node.epoch,
        group=group,
        parent=chain[below - 1] if below else None,
        blocks=tuple(chain[below : below + len(sources)]),
        sources=sources,
        limit_s=DEADLINE_S,
        access={} if foreign is None else {foreign: pinned.access},
    )


async def offered(source: Node, item: PrefillItem) -> HandOffPlan:
    """A plan that reads the item's KV at `source`."""
    lent = await source.engine.offer(item.request)
    sources = tuple(replace(each, node=OTHER) for each in lent.sources if each is not None)
    return HandOffPlan(len(item.tokens), sources, DEADLINE_S, {OTHER: lent.access})


class CopyContract:
    """See the module docstring."""

    @pytest.fixture
    async def nodes(self, new_engine: Callable[[], Engine]) -> AsyncIterator[tuple[Node, Node]]:
        engines = [new_engine(), new_engine()]
        for engine in engines:
            await engine.start()
        try:
            async with asyncio.timeout(2 * DEADLINE_S):
                yield Node(engines[0]), Node(engines[1])
        finally:
            for engine in engines:
                await engine.close()

    @pytest.mark.parametrize(("there", "here"), [((1, 1, 2), (4,)), ((4,), (2, 2)), ((2, 2), (1, 1, 1, 1))])
    async def test_a_copy_from_another_node_and_degree_is_as_good_as_computed(
        self, nodes: tuple[Node, Node], there: Composition, here: Composition
    ) -> None:
        source, node = nodes
        far, near = (await source.adopt(*there))[0], (await node.adopt(*here))[0]
        tokens = prompt(6 * node.block_tokens + 3)
        item = source.item(tokens)
        expected = first_token(await source.prefill(far, item))
        source.engine.release(item.request)
        plan = await plan_from(source, node, near, item.chain)
        copied = await node.engine.copy_blocks(plan)
        source.engine.unpin("lease")
        assert (copied.failure, copied.parent, copied.first_depth) == (None, None, 0)
        assert copied.blocks == item.chain
        assert copied.bytes >= 6 * node.block_tokens * node.engine.describe().kv_bytes_per_token
        assert node.engine.cached_blocks(near, item.chain) == 6
        warm = await node.prefill(near, node.item(tokens))
        assert warm.cached_tokens == 6 * node.block_tokens
        assert first_token(warm) == expected

    async def test_a_copy_brings_what_is_missing_and_a_repetition_nothing(self, nodes: tuple[Node, Node]) -> None:
        source, node = nodes
        (far,), (near,) = await source.adopt(4), await node.adopt(4)
        chain = await stored(source, far, 6)
        await stored(node, near, 2)
        plan = await plan_from(source, node, near, chain)
        copied = await node.engine.copy_blocks(plan)
        assert (copied.parent, copied.first_depth, copied.blocks) == (chain[1], 2, tuple(chain[2:]))
        again = await node.engine.copy_blocks(plan)
        assert (again.blocks, again.failure, again.bytes) == ((), None, 0)

    async def test_a_plan_may_read_from_several_nodes(self, nodes: tuple[Node, Node]) -> None:
        """After a split the blocks lie on both sides of the node, and one has gone: it comes from elsewhere."""
        source, node = nodes
        *_, far = await source.adopt(1, 1, 2)
        chain = await stored(source, far, 6)
        (whole,) = await node.adopt(4)
        await stored(node, whole, 6)
        (left, _) = await node.adopt(2, 2)
        assert node.engine.cached_blocks(left, chain) == 2
        own = await plan_from(node, node, left, chain, below=2, lease="own")
        other = await plan_from(source, node, left, chain, below=2, lease="other")
        mixed = replace(own, sources=(*own.sources[:2], *other.sources[2:]), access=other.access)
        copied = await node.engine.copy_blocks(mixed)
        assert (copied.failure, copied.first_depth, copied.blocks) == (None, 2, tuple(chain[2:]))
        expected = first_token(await source.prefill(far, source.item(prompt(6 * node.block_tokens))))
        assert first_token(await node.prefill(left, node.item(prompt(6 * node.block_tokens)))) == expected

    async def test_a_path_that_hangs_in_the_air_or_an_epoch_that_was_left_is_refused(
        self, nodes: tuple[Node, Node]
    ) -> None:
        source, node = nodes
        (far,), (near,) = await source.adopt(4), await node.adopt(4)
        chain = await stored(source, far, 4)
        with pytest.raises(EngineError, match="does not hold it"):
            await node.engine.copy_blocks(await plan_from(source, node, near, chain, below=2))
        plan = await plan_from(source, node, near, chain, lease="whole")
        for epoch in (node.epoch - 1, node.epoch + 1):
            with pytest.raises(StaleEpoch):
                await node.engine.copy_blocks(replace(plan, epoch=epoch))
        with pytest.raises(EngineError, match="not one of the workers"):
            await node.engine.copy_blocks(replace(plan, group=Group(0, 2)))

    async def test_a_switch_during_the_copy_installs_nothing(self, nodes: tuple[Node, Node]) -> None:
        source, node = nodes
        (far,), (near,) = await source.adopt(4), await node.adopt(4)
        chain = await stored(source, far, 6)
        copying = asyncio.create_task(node.engine.copy_blocks(await plan_from(source, node, near, chain)))
        await asyncio.sleep(0)
        left, right = await node.adopt(2, 2)
        copied = await copying
        if copied.failure is None:
            return  # the copy was faster than the switch, so it was no copy across one
        assert (copied.failure, copied.blocks) == ("stale-epoch", ())
        assert node.engine.resident(left).runs == node.engine.resident(right).runs == ()

    async def test_a_caller_that_leaves_leaves_nothing_behind(self, nodes: tuple[Node, Node]) -> None:
        source, node = nodes
        (far,), (near, *_) = await source.adopt(4), await node.adopt(1, 1, 2)
        room = node.engine.describe().blocks_per_rank
        chain = await stored(source, far, room)
        copying = asyncio.create_task(node.engine.copy_blocks(await plan_from(source, node, near, chain)))
        await asyncio.sleep(0)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        while True:  # something may still be written for a moment
            try:
                await stored(node, near, room, seed=1)
                break
            except OutOfBlocks:
                await asyncio.sleep(0.01)
        assert node.engine.cached_blocks(near, chain) == 0

    async def test_a_copy_without_room_changes_nothing_and_one_with_says_what_it_pushed_out(
        self, nodes: tuple[Node, Node]
    ) -> None:
        source, node = nodes
        (far,), (near, *_) = await source.adopt(4), await node.adopt(1, 1, 2)
        room = node.engine.describe().blocks_per_rank
        chain = await stored(source, far, room)
        item = node.item(prompt(room * node.block_tokens, seed=1))
        await node.prefill(near, item)
        plan = await plan_from(source, node, near, chain)
        with pytest.raises(OutOfBlocks):
            await node.engine.copy_blocks(plan)
        assert node.engine.cached_blocks(near, item.chain) == room
        node.engine.release(item.request)
        copied = await node.engine.copy_blocks(plan)
        assert copied.evicted == tuple(reversed(item.chain))
        assert node.engine.cached_blocks(near, chain) == room

    async def test_what_is_lent_stays_until_the_lease_ends(self, nodes: tuple[Node, Node]) -> None:
        _, node = nodes
        near, *_ = await node.adopt(1, 1, 2)
        room = node.engine.describe().blocks_per_rank
        chain = await stored(node, near, room)
        once = await node.engine.pin("lease", [*chain[: room // 2], BlockId(b"?" * 16)])
        assert [source is None for source in once.sources] == [False] * (room // 2) + [True]
        assert await node.engine.pin("lease", chain) == once
        assert len((await node.engine.evict(near, chain)).freed) == room - room // 2
        with pytest.raises(OutOfBlocks):
            await stored(node, near, room, seed=1)
        node.engine.unpin("lease")
        node.engine.unpin("lease")
        await stored(node, near, room, seed=1)

    async def test_a_source_that_has_changed_ends_the_copy_before_it(self, nodes: tuple[Node, Node]) -> None:
        """Nobody holds a lease any more: the last rank's slots were taken for another prompt."""
        _, node = nodes
        (whole,) = await node.adopt(4)
        chain = await stored(node, whole, 8)
        *_, last = await node.adopt(1, 1, 1, 1)
        near = Group(0, 1)
        plan = await plan_from(node, node, near, chain, below=1)
        node.engine.unpin("lease")
        await stored(node, last, node.engine.describe().blocks_per_rank, seed=1)
        copied = await node.engine.copy_blocks(plan)
        assert (copied.failure, copied.blocks) in [("stale-source", tuple(chain[1:3])), ("stale-source", ())]
        assert node.engine.cached_blocks(near, chain) == 1 + len(copied.blocks)

    async def test_eviction_on_demand_goes_leaf_first_and_spares_what_is_needed(self, nodes: tuple[Node, Node]) -> None:
        _, node = nodes
        (near,) = await node.adopt(4)
        chain = await stored(node, near, 5)
        pinned = node.item(prompt(2 * node.block_tokens + 1))
        await node.prefill(near, pinned)
        gone = await node.engine.evict(near, chain)
        assert gone.freed == tuple(reversed(chain[2:]))
        assert {reason for _, reason in gone.kept} == {"pinned"}
        node.engine.release(pinned.request)
        assert (await node.engine.evict(near, chain[:1])).kept == ((chain[0], "has-descendants"),)
        assert (await node.engine.evict(near, chain)).freed == tuple(reversed(chain[:2]))
        with pytest.raises(EngineError, match="not one of the workers"):
            await node.engine.evict(Group(0, 1), chain)

    async def test_a_step_that_lacks_room_goes_before_copies_and_waits_for_leases(
        self, nodes: tuple[Node, Node]
    ) -> None:
        source, node = nodes
        (far,), (near, *_) = await source.adopt(4), await node.adopt(1, 1, 2)
        room = node.engine.describe().blocks_per_rank
        chain, item = await stored(source, far, room), node.item(prompt(room * node.block_tokens, seed=1))
        plan = await plan_from(source, node, near, chain)
        copying = asyncio.create_task(node.engine.copy_blocks(plan))
        await asyncio.sleep(0)
        with pytest.raises(OutOfBlocks) as refused:
            await node.prefill(near, item)
        assert refused.value.passing
        copied = await copying
        assert copied.failure in ("cancelled", None), "it may have been faster"
        await node.engine.pin("reader", chain)
        if copied.blocks:
            with pytest.raises(OutOfBlocks) as refused:
                await node.prefill(near, item)
            assert refused.value.passing
        node.engine.unpin("reader")
        await node.prefill(near, item)
        with pytest.raises(OutOfBlocks) as refused:
            await node.prefill(near, node.item(prompt(node.block_tokens, seed=2)))
        assert not refused.value.passing, "a finished prefill lets go when it is told to"

    async def test_what_a_cancelled_step_has_stored_is_noted_before_it_can_be_evicted(
        self, nodes: tuple[Node, Node]
    ) -> None:
        _, node = nodes
        (near,) = await node.adopt(4)
        item, other = node.item(prompt(3 * node.block_tokens)), node.item(prompt(9, seed=1))
        noted: list[StepResult] = []
        step = asyncio.create_task(node.engine.prefill(PrefillStep(node.epoch, near, (item, other)), noted.append))
        await asyncio.sleep(0)
        node.engine.cancel(item.request)
        while node.engine.cached_blocks(near, item.chain) == 0:
            assert not noted
            await asyncio.sleep(0)
        assert [each.stored.blocks for each in noted[0].items] == [3, len(other.chain)]
        assert (await node.engine.evict(near, item.chain)).freed == tuple(reversed(item.chain))
        assert await step == noted[0]

    # --- a prefill that goes on at another node

    async def test_a_prefill_goes_on_at_another_node_as_it_would_at_home(self, nodes: tuple[Node, Node]) -> None:
        """Prompts of whole blocks, with a partial last one, and of less than one; computed at several degrees."""
        source, node = nodes
        groups = await source.adopt(2, 1, 1)
        sampling = Sampling(temperature=0.8, seed=5)
        for seed, length in enumerate((4 * source.block_tokens, 2 * source.block_tokens + 3, 2)):
            item = source.item(prompt(length, seed), sampling)
            first = first_token(await source.prefill(groups[seed], item))
            plan = await offered(source, item)
            there = RequestId(f"guest {seed}")
            handed = await node.engine.hand_off(there, plan)
            assert handed.bytes > 0
            assert (await node.engine.hand_off(there, plan)).bytes == handed.bytes, "it is safe to repeat"
            await source.engine.hand_off(item.request)
            source.engine.release(item.request)
            at_home = await source.decode(item.request, first, 6, sampling=sampling)
            assert await node.decode(there, first, 6, sampling=sampling) == at_home
            assert len(at_home) == 6

    async def test_an_offer_needs_a_finished_prefill_and_a_hand_off_a_reader_of_the_same_kv(
        self, nodes: tuple[Node, Node]
    ) -> None:
        source, node = nodes
        (group,) = await source.adopt(4)
        with pytest.raises(EngineError, match="no finished prefill"):
            await source.engine.offer(RequestId("unknown"))
        item = source.item(prompt(3 * source.block_tokens))
        await source.engine.prefill(PrefillStep(source.epoch, group, (replace(item, until=source.block_tokens),)))
        with pytest.raises(EngineError, match="no finished prefill"):
            await source.engine.offer(item.request)
        await source.prefill(group, item)
        plan = await offered(source, item)
        with pytest.raises(EngineError, match="guest"):
            await node.engine.hand_off(RequestId("guest"), replace(plan, access={OTHER: b"junk"}))
        with pytest.raises(EngineError):
            await node.decode(RequestId("guest"), 1, 3)  # nothing is left of it
        await node.engine.hand_off(RequestId("guest"), plan)
        assert len(await node.decode(RequestId("guest"), 1, 3)) == 3
