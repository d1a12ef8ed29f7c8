"""Prefixes that are computed anew at their destination: what a source tells, and what a destination makes of it."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.copy_plan import CopyPlan
from services.worker.engine.protocol import EngineError, PrefillItem
from services.worker.engine.sglang.cache_index import CacheIndex
from services.worker.engine.sglang.copies import Copies
from services.worker.engine.sglang.geometry import FixedGeometry
from services.worker.engine.sglang.page_hashes import page_hashes, salt_of
from services.worker.engine.sglang.recompute import PATH_BYTES_MAX, Path, item_of, promise
from services.worker.engine.sglang.unit_cache import UnitCache
from shared.contracts.ids import BlockId, NodeId
from shared.model.lattice import Group, groups_of
from shared.runtime.clock import SystemClock
from tests.services.worker.engine.sglang.recordings import PAGE, item
from tests.services.worker.engine.sglang.test_joining import SETTINGS


def index_with(*lengths: int) -> CacheIndex:
    index = CacheIndex([UnitCache()], blocks_per_rank=100_000)
    index.adopt(groups_of((1,)))
    for length in lengths:
        known = item("r", length)
        raw = known.tokens[: len(known.chain) * PAGE].astype("<u4").tobytes()
        index.learn(page_hashes(known.tokens, PAGE, salt_of(known.request, known.chain)), known.chain, raw)
    return index


def plan_for(blocks: tuple[BlockId, ...], access: dict[NodeId, bytes]) -> CopyPlan:
    sources = promise(index_with(83), dict.fromkeys(blocks, 0), blocks).sources
    return CopyPlan("copy", 1, Group(0, 1), None, blocks, tuple(each for each in sources if each), 1.0, access)


def test_a_destination_gets_the_prompt_from_the_root_to_the_last_block() -> None:
    known = item("r", 83)
    lent = promise(index_with(83), dict.fromkeys(known.chain, 0), known.chain[2:4])
    assert [each is not None for each in lent.sources] == [True, True]
    prefill = item_of(index_with(), plan_for(known.chain[2:4], {NodeId("other"): lent.access}))
    assert prefill.chain == known.chain[:4]
    assert prefill.tokens.tolist() == known.tokens[: 4 * PAGE].tolist()
    assert prefill.then is None


def test_what_a_node_does_not_hold_or_know_is_not_promised() -> None:
    known = item("r", 83)
    lent = promise(index_with(83), {known.chain[0]: 0}, [known.chain[0], known.chain[1], BlockId(b"?" * 16)])
    assert [each is not None for each in lent.sources] == [True, False, False]
    assert promise(index_with(), {known.chain[0]: 0}, known.chain).access == b""


def test_a_copy_within_a_node_needs_no_word_from_elsewhere() -> None:
    known = item("r", 83)
    assert item_of(index_with(83), plan_for(known.chain[:2], {})).chain == known.chain[:2]


def test_tokens_that_nobody_tells_are_an_error() -> None:
    known = item("r", 83)
    with pytest.raises(EngineError, match="no source has told the tokens"):
        item_of(index_with(), plan_for(known.chain[:2], {}))
    with pytest.raises(EngineError, match="no SGLang engine"):
        item_of(index_with(), plan_for(known.chain[:2], {NodeId("torch"): b"another engine's memory"}))


def test_a_source_of_another_kind_matters_only_where_no_other_tells_the_tokens() -> None:
    known = item("r", 83)
    foreign = {NodeId("torch"): b"another engine's memory"}
    lent = promise(index_with(83), dict.fromkeys(known.chain, 0), known.chain)
    for index, access in (index_with(), {**foreign, NodeId("other"): lent.access}), (index_with(83), foreign):
        assert item_of(index, plan_for(known.chain, access)).chain == known.chain
    elsewhere = promise(index_with(48), dict.fromkeys(known.chain[:3], 0), known.chain[:3])
    with pytest.raises(EngineError, match=r"torch: access: the source is no SGLang engine.*; other: told another path"):
        item_of(index_with(), plan_for(known.chain, {**foreign, NodeId("other"): elsewhere.access}))


def test_a_path_too_long_for_a_reply_is_not_promised() -> None:
    blocks = PATH_BYTES_MAX // (16 + 4 * PAGE)
    known = item("r", (blocks + 1) * PAGE)
    ends = known.chain[blocks - 2 :]
    lent = promise(index_with(len(known.tokens)), dict.fromkeys(ends, 0), ends)
    assert [each is not None for each in lent.sources] == [True, True, False]
    assert len(lent.access) <= PATH_BYTES_MAX


async def test_a_copy_that_is_late_and_overtaken_by_a_switch_was_overtaken() -> None:
    index, known = CacheIndex([UnitCache()] * 2, blocks_per_rank=1_000), item("r", 83)
    index.adopt(groups_of((1, 1)))

    async def never(_item: PrefillItem, _group: Group) -> None:
        index.adopt(groups_of((2,)))
        await asyncio.Event().wait()

    copies = Copies(index, FixedGeometry(SETTINGS), SystemClock(), asyncio.Condition(), never)
    lent = promise(index_with(83), dict.fromkeys(known.chain, 0), known.chain)
    plan = replace(plan_for(known.chain, {NodeId("other"): lent.access}), limit_s=0.01)
    copied = await copies.carry_out(plan, lambda: 2)
    assert (copied.failure, copied.blocks, copied.evicted) == ("stale-epoch", (), ())


@given(st.integers(1, 9), st.integers(1, 4), st.binary(min_size=600, max_size=600))
def test_a_path_survives_packing(blocks: int, block_tokens: int, raw: bytes) -> None:
    chain = tuple(BlockId(bytes([depth]) * 16) for depth in range(blocks))
    path = Path(chain, raw[: 4 * blocks * block_tokens])
    again = Path.unpack(path.pack())
    assert (again.chain, again.raw) == (path.chain, path.raw)


@given(st.binary(max_size=80))
def test_no_bytes_break_the_unpacking(packed: bytes) -> None:
    for candidate in (packed, b"sglang-path-1" + packed):
        try:
            path = Path.unpack(candidate)
        except EngineError:
            continue
        assert len(path.raw) % (4 * len(path.chain)) == 0
