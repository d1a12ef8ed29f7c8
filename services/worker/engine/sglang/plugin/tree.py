"""A unit's prefix tree across a switch, and blocks that are to go. Works on both of SGLang's tree cores, through what
they share.

`UnifiedRadixCache.insert` is observed (`PathLog`); the core says what of a path is still there and in which slots. In a
merged group every rank does the same to an equal tree, so nothing here may depend on slot numbers or on time.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from services.worker.engine.sglang.plugin.paths import OFFER_BYTES, Path, PathLog, block_hash


@dataclass(frozen=True, slots=True)
class Resident:
    """A path as far as the tree has it, with the slots of its tokens."""

    path: Path
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens. Equal on all ranks of a group, or they will schedule differently."""

    total: int
    evictable: int
    free: int


def log_key(log: PathLog, key: Any) -> None:
    """A key that is being inserted."""
    tokens = key.token_ids if key.limit is None else key.token_ids[: key.limit]
    log.add((key.extra_key, key.cache_salt), array("I", tokens))


def sizes(cache: Any, allocator: Any) -> Sizes:
    """Of a tree and its pool."""
    total = cache.total_size()
    return Sizes(
        int(total[0] if isinstance(total, tuple) else total),
        int(cache.evictable_size()),
        int(allocator.available_size()),
    )


def snapshot(cache: Any, log: PathLog) -> list[Resident]:
    """What the tree still has of the logged paths, oldest first. Changes nothing."""
    found = []
    for path in log.paths:
        tokens, node, _ = _match(cache, path)
        if tokens:
            root = cache.tree_core.root_node_handle(path.namespace[0])
            slots = cache.tree_core.collect_full_device_indices(node, root)[:tokens].clone()
            found.append(Resident(path.cut(tokens // log.page, log.page), slots))
    return found


def rebuild(
    cache: Any, allocator: Any, log: PathLog, found: Sequence[Resident], kept: Sequence[bytes]
) -> tuple[int, int]:
    """Make the tree of exactly the `kept` paths, inserted in their order over this rank's slots, and free all other
    slots. Two ranks that do this have the same nodes, the same order of eviction and the same sizes. Returns kept and
    dropped tokens.
    """
    where = {
        digest[:OFFER_BYTES]: (resident, pages)
        for resident in found
        for pages, digest in enumerate(resident.path.digests, start=1)
    }
    before = cache.all_values_flatten().to(torch.int64)
    cache.reset()  # tells listeners that all blocks went; frees nothing
    paths = []
    for digest in kept:
        resident, pages = where[digest]
        path = resident.path.cut(pages, log.page)
        # All of it counts as there before: an overlap with a path inserted earlier is the very same slots, not
        # duplicates to free.
        tokens = len(path.tokens)
        cache.insert(InsertParams(key=_key(path), value=resident.slots[:tokens].clone(), prev_prefix_len=tokens))
        paths.append(path)
    log.replace(paths)
    after = cache.all_values_flatten().to(torch.int64)
    dropped = before[~torch.isin(before, after)]
    if dropped.numel():
        allocator.free(dropped)
    return int(after.numel()), int(dropped.numel())


def evict(cache: Any, log: PathLog, blocks: Sequence[int]) -> int:
    """Remove the blocks and everything below them, as far as nobody uses it. Returns the tokens freed.

    To evict a node that is no unlocked leaf is the end of the server (the Rust core panics and stays poisoned). What is
    a leaf is therefore read from the core itself before each step, and not from the log, which may have forgotten paths.
    """
    wanted = set(blocks)
    doomed = []
    for path in log.paths:
        depth = next((depth for depth, digest in enumerate(path.digests) if block_hash(digest) in wanted), None)
        if depth is not None:
            doomed.append((path, depth * log.page))
    for path, depth in doomed:
        if depth:  # a node must end where the path is to end
            cache.match_prefix(MatchPrefixParams(key=_key(path.cut(depth // log.page, log.page))))
    freed = 0
    while step := sum(_evict_last_node(cache, path, depth) for path, depth in doomed):
        freed += step
    return freed


def _evict_last_node(cache: Any, path: Path, depth: int) -> int:
    """Evict the last node of the path if that begins at `depth` tokens or later and is an unlocked leaf. Returns its
    tokens."""
    tokens, node, through = _match(cache, path)
    if tokens <= depth or through > tokens:
        return 0
    root = cache.tree_core.root_node_handle(path.namespace[0])
    last = int(cache.tree_core.collect_full_device_indices(node, root)[-1])
    unlocked = cache.tree_core.walk_for_kv_canary(unlocked_only=True, swa_resident_only=False)
    everything = cache.tree_core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=False)
    if not bool((unlocked.slot_indices == last).any()) or bool((everything.prev_slot_indices == last).any()):
        return 0
    before = int(cache.evictable_size())
    cache._evict_device_leaf(node, dict.fromkeys(cache.tree_components, 0))
    return before - int(cache.evictable_size())


def _match(cache: Any, path: Path) -> tuple[int, Any, int]:
    """Tokens of the path that are there in whole pages, the deepest node, and the tokens through the end of that node."""
    tokens, node, through = cache.tree_core.match_full_device_prefix(_key(path))
    return tokens - tokens % cache.page_size, node, through


def _key(path: Path) -> Any:
    extra_key, salt = path.namespace
    return RadixKey(array("q", path.tokens), extra_key, cache_salt=salt)
