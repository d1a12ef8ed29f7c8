"""What a worker gets from others or loses on demand: prefixes computed anew, and pages taken out by the plug-in."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.worker.engine.copy_plan import Copied, CopyFailure, CopyPlan, Evicted, KeptReason, Pinned
from services.worker.engine.protocol import Busy, EngineError, PrefillItem
from services.worker.engine.sglang.cache_index import CacheIndex
from services.worker.engine.sglang.geometry import Geometry
from services.worker.engine.sglang.recompute import item_of, promise
from shared.contracts.ids import BlockId
from shared.model.lattice import Group
from shared.runtime.clock import Clock

COPIES_MAX = 2
"""Prefixes that are computed for copies at a time: they take the ranks' time from requests, and it is short at none of them."""

RECOMPUTED = "recomputed"

EVENTS_LIMIT_S = 2.0
"""For the events of pages that the plug-in has taken out, which it publishes with its answer."""


class Copies:
    """`compute` runs one prefill for its blocks. `changed` is notified whenever KV events have come."""

    def __init__(
        self,
        index: CacheIndex,
        geometry: Geometry,
        clock: Clock,
        changed: asyncio.Condition,
        compute: Callable[[PrefillItem, Group], Awaitable[None]],
    ) -> None:
        self._index, self._geometry, self._clock = index, geometry, clock
        self._changed, self._compute = changed, compute
        self._operations: set[str] = set()

    def promise(self, blocks: Sequence[BlockId]) -> Pinned:
        """See `recompute.promise`."""
        held = {
            block: group.first_rank
            for group in self._index.groups()
            for block in blocks
            if block in self._index.told(group)
        }
        return promise(self._index, held, blocks)

    async def carry_out(self, plan: CopyPlan, epoch: Callable[[], int]) -> Copied:
        """Compute what the worker lacks of a plan's path. Errors: Busy; EngineError if nobody has told the tokens."""
        if plan.operation in self._operations:
            raise EngineError(f"copy {plan.operation}: is under way")
        if len(self._operations) >= COPIES_MAX:
            raise Busy(f"copy {plan.operation}: {COPIES_MAX} prefixes are being computed")
        item = item_of(self._index, plan)
        began_ns = self._clock.monotonic_ns()
        failure: CopyFailure | None = None
        self._operations.add(plan.operation)
        try:
            if self._index.cached_blocks(plan.group, item.chain) < len(item.chain):
                async with asyncio.timeout(plan.limit_s):
                    await self._compute(item, plan.group)
        except TimeoutError:
            failure = "time-limit"
        finally:
            self._operations.discard(plan.operation)
        if epoch() != plan.epoch:
            return Copied(plan.parent, (), 0, 0, self._since(began_ns), failure="stale-epoch")
        return self._copied(plan, item, began_ns, failure)

    def _copied(self, plan: CopyPlan, item: PrefillItem, began_ns: int, failure: CopyFailure | None) -> Copied:
        evicted = self._index.take_evicted(plan.group)
        stored = self._index.take_stored(plan.group, item.chain)
        blocks = item.chain[stored.first_depth : stored.first_depth + stored.blocks]
        parent = item.chain[stored.first_depth - 1] if stored.first_depth else None
        return Copied(
            parent,
            blocks,
            stored.first_depth,
            bytes=0,
            seconds=self._since(began_ns),
            evicted=evicted,
            failure=failure,
            detail=RECOMPUTED,
        )

    def _since(self, began_ns: int) -> float:
        return (self._clock.monotonic_ns() - began_ns) / 1e9

    # --- eviction

    async def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        """See `Engine.evict`. Errors: EngineError if the servers have no plug-in, which alone can take single pages out."""
        told = self._index.told(group)
        wanted = {block for block in blocks if block in told}
        heads, burdened = self._index.subtrees(group, wanted)
        pages = [page for block in heads if (page := self._index.page(block)) is not None]
        if pages and await self._geometry.take_out(group, pages):
            await self._gone(group, wanted.difference(burdened))
        gone = self._index.take_evicted(group)
        kept: list[tuple[BlockId, KeptReason]] = [(block, "not-held") for block in blocks if block not in wanted]
        kept += [(block, "has-descendants") for block in burdened if block not in gone]
        kept += [(block, "pinned") for block in wanted.difference(gone, burdened)]
        freed = tuple(block for block in gone if block in wanted)
        return Evicted(freed, tuple(kept), tuple(block for block in gone if block not in wanted))

    async def _gone(self, group: Group, wanted: set[BlockId]) -> None:
        """The events of what was taken out are here, or nothing more is waited for."""
        try:
            async with asyncio.timeout(EVENTS_LIMIT_S), self._changed:
                await self._changed.wait_for(lambda: not self._index.holds_any(group, wanted))
        except TimeoutError:
            return
