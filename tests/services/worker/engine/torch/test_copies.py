"""Copies between the pools of real nodes, byte by byte, and what becomes of them when one side fails.

Two engines are two nodes: their movers share nothing, and read each other over NIXL.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.worker.engine.copy_plan import Copied, CopyPlan, Source
from services.worker.engine.protocol import Busy, EngineDied, EngineError
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch import mover_side
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.kv_memory import KvMemory, plan_of
from services.worker.engine.torch.messages import Command, Reply
from services.worker.engine.torch.move_messages import Sum
from services.worker.engine.torch.mover import COPIES_MAX
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import BlockId
from shared.model.lattice import Group
from tests.services.worker.engine.contract import Node
from tests.services.worker.engine.copy_contract import OTHER, plan_from, stored
from tests.services.worker.engine.torch.test_faults import all_gone

SLOW_BYTES_PER_S = 1e5
"""A block of the tiny model is worth 60 ms: time enough to meet a copy on its way."""

BLOCKS = 24


def memory(node: Node) -> KvMemory:
    """The node's pools, as any of its processes sees them."""
    engine = node.engine
    assert isinstance(engine, TorchEngine)
    settings = engine._settings
    layout = KvLayout.of(engine._config, settings.block_tokens, settings.blocks_per_rank)
    return KvMemory(layout, engine._ranks.files[: settings.prefill_ranks])


def content(node: Node, lease: str, chain: list[BlockId]) -> torch.Tensor:
    """Every byte of the blocks, wherever they lie; also that their generations are those of the index."""
    refs = node.engine._pool.copies.lend(lease, chain)  # type: ignore[attr-defined]
    node.engine._pool.copies.end_lease(lease)  # type: ignore[attr-defined]
    view = memory(node)
    view.check(plan_of(enumerate(refs)))
    return torch.stack([view._pools_BL2TGD[ref.rank][ref.index].clone() for ref in refs])


def mover_pid(node: Node) -> int:
    return node.engine._mover_side._mover.pid  # type: ignore[attr-defined, no-any-return]


class Nodes:
    """Makes engines of one model and ends them."""

    def __init__(self, model: Path, zygote: Zygote) -> None:
        self._model, self._zygote = model, zygote
        self.made: list[Node] = []

    async def new(self, *composition: int, **changes: object) -> tuple[Node, Group]:
        """A node that serves `composition`, and its first worker."""
        given = {
            "prefill_ranks": sum(composition),
            "decode_ranks": 0,
            "block_tokens": 8,
            "blocks_per_rank": 32,
            "hung_s": 600,
        } | changes
        engine = TorchEngine(TorchSettings(self._model, **given), self._zygote)  # type: ignore[arg-type]
        self.made.append(Node(engine))
        await engine.start()
        return self.made[-1], (await self.made[-1].adopt(*composition))[0]


@pytest.fixture
async def nodes(tiny_llama: Path, zygote: Zygote) -> AsyncIterator[Nodes]:
    nodes = Nodes(tiny_llama, zygote)
    yield nodes
    for node in nodes.made:
        await node.engine.close()


async def copied_some(node: Node, group: Group, chain: list[BlockId], slots: Iterator[SlotRef]) -> None:
    """Returns when the first block of a copy is in its slot and the last is not."""
    first = next(slots)
    view = memory(node)
    while int(view._generations[first.rank][first.index]) != first.generation:  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.001)
    assert node.engine.cached_blocks(group, chain) == 0, "nothing is held before the copy ends"


def slots_of(node: Node, plan: CopyPlan) -> Iterator[SlotRef]:
    return iter(node.engine._pool.copies._installations[plan.operation].slots)  # type: ignore[attr-defined]


async def begun(node: Node, group: Group, plan: CopyPlan) -> asyncio.Task[Copied]:
    """A copy that is on its way."""
    copying = asyncio.create_task(node.engine.copy_blocks(plan))
    await asyncio.sleep(0)
    await copied_some(node, group, list(plan.blocks), slots_of(node, plan))
    return copying


def is_free(node: Node) -> bool:
    """Nothing is pinned."""
    pool = node.engine._pool  # type: ignore[attr-defined]
    pool.check()
    return all(pool.counts(rank)[2] == 0 for rank in range(node.engine.describe().prefill_ranks))


@pytest.mark.parametrize(("there", "here"), [((1,), (4,)), ((4,), (2, 2)), ((2,), (1,))])
async def test_every_byte_is_the_sources_whatever_the_degrees(
    nodes: Nodes, there: tuple[int, ...], here: tuple[int, ...]
) -> None:
    source, far = await nodes.new(*there, copy_checksums=True)
    node, near = await nodes.new(*here)
    chain = await stored(source, far, BLOCKS)
    plan = await plan_from(source, node, near, chain)
    assert all(each.checksum is not None for each in plan.sources)
    copied = await node.engine.copy_blocks(plan)
    assert (copied.failure, copied.blocks) == (None, tuple(chain))
    assert torch.equal(content(node, "new", chain), content(source, "old", chain))
    refs = node.engine._pool.copies.lend("look", chain)  # type: ignore[attr-defined]
    assert [ref.rank for ref in refs] == [near.first_rank + depth % near.degree for depth in range(BLOCKS)]


async def test_sources_on_two_nodes_and_at_home_make_one_prefix(nodes: Nodes) -> None:
    """A third lies on a sibling of this very node, two thirds elsewhere: chunks of three origins take turns."""
    (one, far_1), (two, far_2), (node, whole) = await nodes.new(1), await nodes.new(2), await nodes.new(4)
    chain = await stored(one, far_1, BLOCKS)
    await stored(two, far_2, BLOCKS)
    await stored(node, whole, BLOCKS)
    expected = content(one, "look", chain)
    *_, near = await node.adopt(1, 1, 1, 1)
    plans = [
        await plan_from(each, node, near, chain, lease=f"of {number}") for number, each in enumerate((one, two, node))
    ]
    names = (OTHER, "third", None)
    sources = tuple(replace(plans[depth % 3].sources[depth], node=names[depth % 3]) for depth in range(BLOCKS))
    access = {OTHER: plans[0].access[OTHER], "third": plans[1].access[OTHER]}
    copied = await node.engine.copy_blocks(replace(plans[0], sources=sources, access=access))
    assert (copied.failure, len(copied.blocks)) == (None, BLOCKS)
    # Degrees round differently, so each block is compared with the node that it came from.
    for depth in range(BLOCKS):
        origin = (one, two)[depth % 3] if depth % 3 < 2 else None
        if origin is not None:
            there = content(origin, "there", chain)[depth]
            assert torch.equal(content(node, "here", chain[: depth + 1])[depth], there)
    assert torch.allclose(content(node, "here", chain), expected, atol=1e-4)


async def test_a_source_that_dies_ends_the_copy_and_what_came_stays(nodes: Nodes) -> None:
    source, far = await nodes.new(1)
    node, near = await nodes.new(1, copy_bytes_per_s=SLOW_BYTES_PER_S)
    chain = await stored(source, far, BLOCKS)
    expected = content(source, "look", chain)
    plan = await plan_from(source, node, near, chain)
    copying = await begun(node, near, plan)
    os.kill(mover_pid(source), signal.SIGKILL)
    copied = await copying
    assert copied.failure == "source-lost", copied
    arrived = len(copied.blocks)
    assert 0 < arrived < BLOCKS
    assert node.engine.cached_blocks(near, chain) == arrived
    assert torch.equal(content(node, "look", chain[:arrived]), expected[:arrived])
    assert is_free(node)
    again = await plan_from(source, node, near, chain, lease="again")  # the source starts another mover for it
    assert (await node.engine.copy_blocks(again)).blocks == tuple(chain[arrived:])
    assert torch.equal(content(node, "look", chain), expected)


async def test_a_source_that_is_gone_before_the_copy_is_said_to_be_lost(nodes: Nodes) -> None:
    source, far = await nodes.new(1)
    node, near = await nodes.new(1)
    chain = await stored(source, far, 4)
    plan = await plan_from(source, node, near, chain)
    await source.engine.close()
    copied = await node.engine.copy_blocks(plan)
    assert (copied.failure, copied.blocks) == ("source-lost", ())
    assert is_free(node)
    with pytest.raises(EngineDied):
        await source.engine.pin("late", chain)


async def test_a_source_that_does_not_answer_is_given_up_and_nothing_is_written_later(nodes: Nodes) -> None:
    """A read that was begun cannot be called back, so the mover that began it is replaced, and others are not held up."""
    source, far = await nodes.new(1)
    node, near = await nodes.new(1)
    chain = await stored(source, far, 4)
    await stored(node, near, 3, seed=5)
    plan = replace(await plan_from(source, node, near, chain), limit_s=0.3)
    pid = mover_pid(source)
    await node.engine.pin("warm", [])  # so that the limit is the copy's and not the start's
    node.engine.unpin("warm")
    before = mover_pid(node)
    os.kill(pid, signal.SIGSTOP)
    try:
        copied = await node.engine.copy_blocks(plan)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (copied.failure, copied.blocks) == ("time-limit", ())
    assert await all_gone([before])
    assert is_free(node)
    again = await node.engine.copy_blocks(replace(plan, limit_s=30.0))
    assert (again.failure, again.blocks) == (None, tuple(chain))
    assert mover_pid(node) != before
    assert torch.equal(content(node, "look", chain), content(source, "look", chain))


async def test_a_source_evicted_on_the_way_ends_the_copy_before_it(nodes: Nodes) -> None:
    """The lease is over and the source takes its slots for another prompt, the deepest block's last."""
    source, far = await nodes.new(1, blocks_per_rank=BLOCKS)
    node, near = await nodes.new(1, copy_bytes_per_s=SLOW_BYTES_PER_S)
    chain = await stored(source, far, BLOCKS)
    expected = content(source, "look", chain)
    plan = await plan_from(source, node, near, chain)
    source.engine.unpin("lease")
    copying = await begun(node, near, plan)
    os.kill(mover_pid(node), signal.SIGSTOP)  # so that the source is quicker on any machine
    await stored(source, far, BLOCKS, seed=1)
    os.kill(mover_pid(node), signal.SIGCONT)
    copied = await copying
    assert copied.failure == "stale-source", copied
    arrived = len(copied.blocks)
    assert 0 < arrived < BLOCKS
    assert torch.equal(content(node, "here", chain[:arrived]), expected[:arrived])
    assert is_free(node)


async def test_a_wrong_checksum_or_another_model_or_a_slot_out_of_bounds_installs_nothing(
    nodes: Nodes, tiny_qwen3: Path, zygote: Zygote
) -> None:
    source, far = await nodes.new(1, copy_checksums=True)
    node, near = await nodes.new(1)
    chain = await stored(source, far, 4)
    plan = await plan_from(source, node, near, chain)
    wrong = replace(plan.sources[2], checksum=1)
    copied = await node.engine.copy_blocks(replace(plan, sources=(*plan.sources[:2], wrong, *plan.sources[3:])))
    assert (copied.failure, copied.blocks) == ("bad-checksum", ())
    beyond = tuple(Source(SlotRef(7, 0, 1), OTHER) for _ in chain)
    copied = await node.engine.copy_blocks(replace(plan, sources=beyond))
    assert (copied.failure, copied.blocks) == ("stale-source", ())
    foreign, there = await Nodes(tiny_qwen3, zygote).new(1)
    nodes.made.append(foreign)
    access = (await foreign.engine.pin("lease", await stored(foreign, there, 1))).access
    copied = await node.engine.copy_blocks(replace(plan, access={OTHER: access}))
    assert copied.failure == "source-lost"
    assert "keeps KV of" in copied.detail
    assert (await node.engine.copy_blocks(replace(plan, access={OTHER: b"junk"}))).failure == "source-lost"
    assert (await node.engine.copy_blocks(plan)).blocks == tuple(chain)


async def test_checksums_of_much_memory_are_asked_for_in_parts(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over tens of gigabytes takes longer than a mover may be silent, and no copy goes on meanwhile."""
    source, far = await nodes.new(1, copy_checksums=True)
    chain = await stored(source, far, 5)
    whole = (await source.engine.pin("whole", chain)).sources
    asked: list[int] = []
    ask = RankProcess.ask

    def seen(process: RankProcess, command: Command) -> asyncio.Future[Reply]:
        if isinstance(command, Sum):
            asked.append(len(command.slots))
        return ask(process, command)

    monkeypatch.setattr(RankProcess, "ask", seen)
    monkeypatch.setattr(mover_side, "SUM_BYTES", 2 * memory(source).layout.block_bytes + 1)
    assert (await source.engine.pin("in parts", chain)).sources == whole
    assert asked == [2, 2, 1]
    monkeypatch.setattr(mover_side, "SUM_BYTES", 1)
    assert (await source.engine.pin("one by one", chain)).sources == whole


async def test_a_call_off_or_a_dead_mover_frees_the_slots_and_the_next_copy_works(nodes: Nodes) -> None:
    source, far = await nodes.new(1)
    node, near = await nodes.new(1, copy_bytes_per_s=SLOW_BYTES_PER_S)
    chain = await stored(source, far, BLOCKS)
    plan = await plan_from(source, node, near, chain)
    copying = await begun(node, near, plan)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    while not is_free(node):  # noqa: ASYNC110 - the mover is to answer
        await asyncio.sleep(0.005)
    assert node.engine.cached_blocks(near, chain) == 0
    copying = await begun(node, near, plan)
    os.kill(mover_pid(node), signal.SIGKILL)
    copied = await copying
    assert (copied.failure, copied.blocks) == ("source-lost", ())
    assert "the mover ended" in copied.detail
    assert is_free(node)
    assert node.engine.health().ok, "no rank is the worse for it"
    copying = await begun(node, near, plan)
    os.kill(mover_pid(node), signal.SIGSTOP)
    await node.adopt(1)
    os.kill(mover_pid(node), signal.SIGCONT)
    left = await copying
    assert (left.failure, left.blocks) == ("stale-epoch", ())
    assert (await node.engine.copy_blocks(replace(plan, epoch=node.epoch))).blocks == tuple(chain)


async def test_copies_share_their_bandwidth_and_there_are_not_too_many(nodes: Nodes) -> None:
    source, far = await nodes.new(1)
    node, near = await nodes.new(1, copy_bytes_per_s=SLOW_BYTES_PER_S, blocks_per_rank=64)
    chains = [await stored(source, far, 1, seed) for seed in range(COPIES_MAX + 1)]
    plans = [await plan_from(source, node, near, chain, lease=f"l{n}") for n, chain in enumerate(chains)]
    copying = [asyncio.create_task(node.engine.copy_blocks(plan)) for plan in plans]
    done = await asyncio.gather(*copying, return_exceptions=True)
    assert isinstance(done[-1], Busy)
    copies = [each for each in done if isinstance(each, Copied)]
    assert len(copies) == COPIES_MAX
    # The last chunk needs not be waited for.
    assert max(each.seconds for each in copies) >= (sum(each.bytes for each in copies[:-1])) / SLOW_BYTES_PER_S


async def test_a_mover_that_is_silent_when_blocks_are_lent_is_replaced_and_lends_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, far = await nodes.new(1, copy_checksums=True)
    chain = await stored(source, far, 2)
    await source.engine.pin("warm", [])
    source.engine.unpin("warm")
    before = mover_pid(source)
    monkeypatch.setattr(mover_side, "ANSWER_LIMIT_S", 0.2)
    os.kill(before, signal.SIGSTOP)
    with pytest.raises(EngineError, match="the mover was silent") as refused:
        await source.engine.pin("lease", chain)
    assert not isinstance(refused.value, EngineDied), "the ranks are well"
    assert await all_gone([before])
    assert is_free(source)
    monkeypatch.undo()
    assert all(each is not None for each in (await source.engine.pin("lease", chain)).sources)


async def test_a_mover_whose_end_nobody_has_heard_of_yet_is_replaced_when_blocks_are_lent(nodes: Nodes) -> None:
    source, far = await nodes.new(1)
    node, near = await nodes.new(1)
    chain = await stored(source, far, 2)
    await source.engine.pin("warm", [])
    before = mover_pid(source)
    os.kill(before, signal.SIGKILL)
    plan = await plan_from(source, node, near, chain)
    assert mover_pid(source) != before
    assert (await node.engine.copy_blocks(plan)).blocks == tuple(chain)


async def test_a_mover_that_does_not_start_is_an_error_and_not_the_engines_death(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, far = await nodes.new(1)
    node, near = await nodes.new(1)
    chain = await stored(source, far, 2)
    plan = await plan_from(source, node, near, chain)
    settings = replace(node.engine._settings)  # type: ignore[attr-defined]
    object.__setattr__(settings, "start_timeout_s", 0.0)  # below what can be set, so that no mover is quick enough
    monkeypatch.setattr(node.engine._mover_side, "_settings", settings)  # type: ignore[attr-defined]
    for attempt in (node.engine.copy_blocks(plan), node.engine.pin("lease", chain)):
        with pytest.raises(EngineError, match="the mover was silent") as refused:
            await attempt
        assert not isinstance(refused.value, EngineDied)
        assert is_free(node)
    monkeypatch.undo()
    assert (await node.engine.copy_blocks(plan)).blocks == tuple(chain)


async def test_a_mover_that_is_stopped_in_its_start_is_given_up_like_a_rank(nodes: Nodes) -> None:
    """Long before the limit of a start, and another takes its place."""
    node, group = await nodes.new(1, start_timeout_s=3600, hung_s=0.5)
    chain, side = await stored(node, group, 2), node.engine._mover_side  # type: ignore[attr-defined]
    lending = asyncio.create_task(node.engine.pin("lease", chain))
    while side._mover is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    before = mover_pid(node)
    os.kill(before, signal.SIGSTOP)
    assert all(each is not None for each in (await lending).sources)
    assert mover_pid(node) != before
    assert await all_gone([before])
