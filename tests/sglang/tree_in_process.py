"""Runs in SGLang's interpreter: the plug-in's tree operations on SGLang's own trees. No model, no server.

Two ranks with different histories agree, rebuild, and from then on are given the same operations. After each of them everything
that steers a schedule must be equal: sizes, matched prefixes, and so the order of eviction.
"""

import random
import sys
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from services.worker.engine.sglang.plugin import tree
from services.worker.engine.sglang.plugin.paths import PathLog, agree, block_hash, offer

PAGE = 4
POOL = 400


class KvPool:
    """Slots without memory behind them."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Rank:
    def __init__(self, core: str) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(POOL, PAGE, torch.float32, "cpu", KvPool(), False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(8, 1024, "cpu", False),
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.log = PathLog(PAGE, 8 * POOL)

    def match(self, tokens: list[int]) -> int:
        return len(self.slots_of(tokens))

    def slots_of(self, tokens: list[int]) -> torch.Tensor:
        """Of the longest prefix that the tree has. Makes it the last to be evicted."""
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        core = self.cache.tree_core
        slots = core.collect_full_device_indices(result.last_device_node, core.root_node_handle(None))
        assert len(slots) == result.device_prefix_len
        return slots.to(torch.int64)

    def serve(self, tokens: list[int]) -> int:
        """As a request does: match, make room, compute the rest, insert. Returns what was cached."""
        slots = self.slots_of(tokens)
        cached = len(slots)
        if (lacking := len(tokens) - cached - self.allocator.available_size()) > 0:
            self.cache.evict(EvictParams(num_tokens=lacking))
            slots = self.slots_of(tokens)  # eviction may have taken of the prefix, which no lock holds here
        need = len(tokens) - len(slots)
        fresh = self.allocator.alloc(need) if need else torch.empty(0, dtype=torch.int64)
        if fresh is None:
            return cached  # both ranks find too little room alike
        key = RadixKey(array("q", tokens))
        tree.log_key(self.log, key)
        self.cache.insert(InsertParams(key=key, value=torch.cat([slots, fresh]), prev_prefix_len=len(slots)))
        return cached

    def sizes(self) -> tree.Sizes:
        sizes = tree.sizes(self.cache, self.allocator)
        assert sizes.total + sizes.free == POOL, "every slot is in the tree or free"
        assert sizes.evictable == sizes.total
        return sizes


def prompt(chance: random.Random) -> list[int]:
    """Few symbols and whole pages, so that prompts branch off each other everywhere."""
    return [symbol for _ in range(chance.randint(1, 12)) for symbol in [chance.randrange(2)] * PAGE]


def check(core: str, seed: int) -> None:
    chance = random.Random(seed)
    ranks = [Rank(core), Rank(core)]
    for _ in range(chance.randint(0, 25)):
        ranks[chance.randrange(2)].serve(prompt(chance))
    for _ in range(3):
        merge(ranks)
        for _ in range(chance.randint(0, 25)):
            together(ranks, chance)
        for rank in ranks:  # apart again
            for _ in range(chance.randint(0, 8)):
                rank.serve(prompt(chance))


def merge(ranks: list[Rank]) -> None:
    found = [tree.snapshot(rank.cache, rank.log) for rank in ranks]
    before = [rank.sizes() for rank in ranks]
    held = [{digest for each in part for digest in each.path.digests} for part in found]
    assert [len(each) * PAGE for each in held] == [size.total for size in before], "the log knows the whole tree"
    kept = agree({index: offer([each.path for each in part]) for index, part in enumerate(found)}, 0)
    for rank, part, size in zip(ranks, found, before, strict=True):
        stays, goes = tree.rebuild(rank.cache, rank.allocator, rank.log, part, kept)
        assert stays == len(held[0] & held[1]) * PAGE
        assert stays + goes == size.total
    assert ranks[0].sizes() == ranks[1].sizes()


def together(ranks: list[Rank], chance: random.Random) -> None:
    kind, tokens = chance.choice(("serve", "serve", "evict", "match", "block")), prompt(chance)
    if kind == "serve":
        answers = [rank.serve(tokens) for rank in ranks]
    elif kind == "match":
        answers = [rank.match(tokens) for rank in ranks]
    elif kind == "evict":
        number = chance.randrange(1, 60)
        for rank in ranks:
            rank.cache.evict(EvictParams(num_tokens=number))
        answers = [0, 0]
    else:
        digests = sorted({digest for path in ranks[0].log.paths for digest in path.digests}) or [bytes(32)]
        block = chance.choice(digests)
        doomed = [path for path in ranks[0].log.paths if block in path.digests]
        answers = [tree.evict(rank.cache, rank.log, [block_hash(block)]) for rank in ranks]
        for path in doomed:
            assert ranks[0].match(list(path.tokens)) <= path.digests.index(block) * PAGE, "it and all below it went"
            ranks[1].match(list(path.tokens))
    assert answers[0] == answers[1], (kind, answers)
    assert ranks[0].sizes() == ranks[1].sizes(), kind


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        for core in ("rust", "python"):
            try:
                check(core, seed)
            except Exception as error:
                raise RuntimeError(f"core {core}, seed {seed}") from error
    sys.stdout.write("equal\n")
