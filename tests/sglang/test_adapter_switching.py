"""One server whose two units are grouped as the pool decides: split, merge, and what stays cached."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.protocol import ItemResult, PrefillItem, PrefillStep
from services.worker.engine.sglang.engine import SglangEngine
from shared.contracts.ids import BlockId
from shared.model.lattice import Composition, Group, groups_of
from shared.runtime.clock import SystemClock
from tests.sglang.adapter_requests import ON_REAL_SERVERS, item, prompt, settings_for
from tests.support.adapter_servers import Running

pytestmark = ON_REAL_SERVERS

UNITS = 2
DEADLINE_S = 600
EPOCHS = count(1)


class Node:
    """An engine, and the epoch that it serves."""

    def __init__(self, engine: SglangEngine) -> None:
        self.engine = engine
        self.epoch = 0

    async def adopt(self, *composition: int) -> tuple[Group, ...]:
        self.epoch = next(EPOCHS)
        ranks = await self.engine.adopt(self.epoch, composition)
        assert [each.rank for each in ranks] == list(range(UNITS))
        return groups_of(composition)

    async def prefill(self, group: Group, each: PrefillItem) -> ItemResult:
        (result,) = (await self.engine.prefill(PrefillStep(self.epoch, group, (each,)))).items
        self.engine.release(each.request)
        return result

    def held(self, group: Group) -> set[BlockId]:
        return {block for _, run in self.engine.resident(group).runs for block in run}


@pytest.fixture
async def node(model: Path, two_units: Running) -> AsyncIterator[Node]:
    engine = SglangEngine(settings_for(model, two_units, UNITS), SystemClock(), random.SystemRandom())
    await engine.start()
    async with asyncio.timeout(DEADLINE_S):
        yield Node(engine)
    await engine.close()


async def test_tokens_are_the_same_at_every_degree(node: Node) -> None:
    prompts = [prompt(length, 100 + length) for length in (37, 300, 1_500)]
    expected: list[object] = []
    for composition in [(1, 1), (2,), (1, 1), (2,)]:
        for group in await node.adopt(*composition):
            for number, tokens in enumerate(prompts):
                name = f"{node.epoch} {group.first_rank} {number}"
                token = (await node.prefill(group, item(name, tokens))).first_token
                expected += [token] if len(expected) < len(prompts) else []
                assert token == expected[number], (composition, group, number)


async def test_a_merge_keeps_what_both_have_and_a_split_everything(node: Node) -> None:
    left, right = await node.adopt(1, 1)
    both, alone = item("both", prompt(160, 1)), item("alone", prompt(160, 2))
    for group in (left, right):
        await node.prefill(group, item(f"both {group.first_rank}", both.tokens))
    await node.prefill(right, alone)
    (whole,) = await node.adopt(2)
    assert node.held(whole) & {*both.chain, *alone.chain} == set(both.chain)
    assert (await node.prefill(whole, item("both again", both.tokens))).cached_tokens == 144
    merged = item("merged", prompt(320, 3))
    assert (await node.prefill(whole, merged)).stored.blocks == 20
    for group in await node.adopt(1, 1):
        assert node.held(group) >= {*both.chain, *merged.chain}
        found = await node.prefill(group, item(f"merged {group.first_rank}", merged.tokens))
        assert found.cached_tokens == 304


async def test_blocks_are_taken_out_leaf_first_and_only_where_they_are(node: Node) -> None:
    left, right = await node.adopt(1, 1)
    stem = prompt(160, 10)
    kept, gone = item("kept", stem), item("gone", np.concatenate([stem, prompt(160, 11)]))
    for group in (left, right):
        await node.prefill(group, item(f"gone {group.first_rank}", gone.tokens))
    result = await node.engine.evict(left, gone.chain[10:])
    assert result.freed == tuple(reversed(gone.chain[10:]))
    assert node.engine.cached_blocks(left, gone.chain) == 10
    assert node.engine.cached_blocks(right, gone.chain) == 20
    assert (await node.engine.evict(left, gone.chain[10:])).kept[0][1] == "not-held"
    assert (await node.engine.evict(right, gone.chain[5:6])).kept == ((gone.chain[5], "has-descendants"),)
    assert (await node.prefill(left, kept)).cached_tokens == 144


async def test_an_agent_that_comes_back_finds_what_the_server_serves(
    node: Node, model: Path, two_units: Running
) -> None:
    await node.adopt(2)
    await node.engine.close()
    again = SglangEngine(settings_for(model, two_units, UNITS), SystemClock(), random.SystemRandom())
    await again.start()
    later = Node(again)
    (whole,) = await later.adopt(2)
    await later.prefill(whole, item("after", prompt(40, 20)))
    await later.adopt(1, 1)
    await again.close()


async def test_a_report_has_what_was_told_whoever_computed_more(node: Node, model: Path, two_units: Running) -> None:
    """Another agent, of the same server, fills a cache with what this one has a name for."""
    left, right = await node.adopt(1, 1)
    known = item("known", prompt(160, 30))
    await node.prefill(left, known)
    other = Node(SglangEngine(settings_for(model, two_units, UNITS), SystemClock(), random.SystemRandom()))
    await other.engine.start()
    await other.adopt(1, 1)
    await other.prefill(right, item("theirs", known.tokens))
    await other.engine.close()
    async with node.engine._changed:
        await node.engine._changed.wait_for(lambda: node.engine.cached_blocks(right, known.chain) == len(known.chain))
    assert not node.held(right) & set(known.chain)
    found = await node.prefill(right, item("found", known.tokens))
    assert (found.cached_tokens, found.stored.first_depth, found.stored.blocks) == (144, 0, 10)
    assert node.held(right) >= set(known.chain)


async def test_compositions_that_cannot_be_are_refused_and_the_old_one_serves(node: Node) -> None:
    groups = await node.adopt(1, 1)
    wrong: list[Composition] = [(4,), (1,)]
    for composition in wrong:
        with pytest.raises(ValueError, match="composition"):
            await node.engine.adopt(node.epoch + 1, composition)
    await node.prefill(groups[0], item("still", prompt(40, 21)))
