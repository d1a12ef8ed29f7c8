"""What a step reserves, and what becomes of its items."""

from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.kv_pool import KvPool
from services.worker.engine.protocol import EngineError, OutOfBlocks, PrefillItem, PrefillStep, Stored, Token
from services.worker.engine.step_items import cancel, fail, finish, reserve
from shared.contracts.ids import RequestId
from shared.model.lattice import Group
from tests.services.worker.engine.test_kv_pool import BLOCK_TOKENS, chain_of, pool_of, stored

WORKER = Group(0, 1)


def item(text: str, until_blocks: int | None = None) -> PrefillItem:
    """A prompt of whole blocks and one token more, named after its blocks."""
    tokens = np.zeros(len(text) * BLOCK_TOKENS + 1, dtype=np.uint32)
    until = None if until_blocks is None else until_blocks * BLOCK_TOKENS
    return PrefillItem(RequestId(text), tokens, tuple(chain_of(text)), until=until)


def step(*items: PrefillItem) -> PrefillStep:
    return PrefillStep(1, WORKER, items)


@pytest.fixture
def pool() -> KvPool:
    return pool_of((1,), blocks_per_rank=6)


def test_a_step_is_reserved_whole_or_not_at_all(pool: KvPool) -> None:
    stored(pool, "old", WORKER, "vwxyz")
    (begun,) = reserve(pool, step(item("ab", 1)))
    finish(pool, begun, None)
    with pytest.raises(OutOfBlocks, match="request cd: rank 0 needs 3 blocks and can free 1"):
        reserve(pool, step(item("ab"), item("e"), item("cd")))
    assert pool.reservation(RequestId("e")) is None
    assert pool.reservation(RequestId("ab")) is not None, "it was begun before"
    assert pool.take_evicted(WORKER) == tuple(reversed(chain_of("vwxyz")[1:]))
    assert [each.item.request for each in reserve(pool, step(item("ab"), item("e")))] == ["ab", "e"]
    pool.check()


def test_a_step_computes_as_far_as_it_was_asked_to(pool: KvPool) -> None:
    stored(pool, "prefix", WORKER, "a")
    (first,) = reserve(pool, step(item("abcd", 3)))
    assert (first.cached_tokens, first.end_tokens, first.ends_prompt) == (BLOCK_TOKENS, 3 * BLOCK_TOKENS, False)
    assert finish(pool, first, None).outcome == "unfinished"
    (nothing,) = reserve(pool, step(item("abcd", 2)))
    assert (nothing.cached_tokens, nothing.end_tokens) == (3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    (last,) = reserve(pool, step(item("abcd")))
    result = finish(pool, last, Token(1))
    assert (result.cached_tokens, result.computed_tokens, result.outcome) == (12, 5, "finished")
    assert result.stored == Stored(3, 1)


@pytest.mark.parametrize(("computed", "blocks"), [(True, 3), (False, 2)])
def test_a_cancelled_item_keeps_what_was_computed(pool: KvPool, computed: bool, blocks: int) -> None:
    (begun,) = reserve(pool, step(item("abcd", 2)))
    finish(pool, begun, None)
    (running,) = reserve(pool, step(item("abcd", 3)))
    result = cancel(pool, running, computed)
    assert (result.outcome, result.first_token) == ("cancelled", None)
    assert result.stored == Stored(2, blocks - 2)
    assert result.cached_tokens + result.computed_tokens == blocks * BLOCK_TOKENS
    assert pool.cached_blocks(WORKER, chain_of("abcd")) == blocks
    assert pool.counts(0) == (6 - blocks, blocks, 0)


def test_a_failed_step_leaves_unfinished_prompts_what_they_held(pool: KvPool) -> None:
    (begun,) = reserve(pool, step(item("ab", 1)))
    finish(pool, begun, None)
    fail(pool, reserve(pool, step(item("ab"), item("e"))))
    assert (pool.reservation(RequestId("ab")) is None, pool.reservation(RequestId("e")) is None) == (False, True)
    assert pool.counts(0) == (3, 0, 3)
    pool.check()


def test_bad_steps_are_refused_by_name(pool: KvPool) -> None:
    bad = {
        "items: 0 of 0 requests": step(),
        "items: 2 of 1 requests": step(item("a"), item("a")),
        "items: 65 of": step(*(item("a" * number) for number in range(65))),
        "chain: 3 ids, of them 2 different": step(replace(item("abc"), chain=(*chain_of("ab"), *chain_of("a")))),
        "until: 0 is no multiple of 4 inside a prompt of 9 tokens": step(item("ab", 0)),
        "until: 12 is": step(item("ab", 3)),
        "until: 3 is": step(PrefillItem(RequestId("r"), np.zeros(9, dtype=np.uint32), (), until=3)),
    }
    for message, refused in bad.items():
        with pytest.raises(EngineError, match=message):
            reserve(pool, refused)
