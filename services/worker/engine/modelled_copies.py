"""Copies of the modelled engine: real slots and leases in the `KvPool`, and the time that the bytes would take.

A source on the engine's own node is looked at again after that time, as a reader does; one on another node is believed.
"""

import asyncio
from collections.abc import Sequence

from services.worker.engine.copy_plan import Copied, CopyFailure, CopyPlan, Pinned, Source
from services.worker.engine.kv_copies import Installation
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.modelled_step import sleep_unless
from services.worker.engine.protocol import EngineDied
from shared.contracts.ids import BlockId
from shared.model.lattice import Group
from shared.runtime.clock import Clock

LATENCY_S = 0.005
"""Of a copy, whatever its size, in modelled time: the router's price of a fetch begins with as much (design 2.2)."""

ROUNDING = 1e-3
"""Clocks count whole nanoseconds: a block that is so close to its end has come."""


class ModelledCopies:
    """A copy takes `latency_s` and `block_s` for each block, in seconds of the clock. `access` is the same for nodes that keep
    the same KV. `dead` is set when the node has died. While `lost`, the second half of no copy comes: its source is gone."""

    def __init__(
        self,
        pool: KvPool,
        access: bytes,
        block_bytes: int,
        block_s: float,
        latency_s: float,
        clock: Clock,
        dead: asyncio.Event,
    ) -> None:
        self._pool, self._access, self._clock, self._dead = pool, access, clock, dead
        self._block_bytes, self._block_s, self._latency_s = block_bytes, block_s, latency_s
        self.lost = False
        self._called_off: dict[str, asyncio.Event] = {}

    def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        """See `Engine.pin`."""
        refs = self._pool.copies.lend(lease, blocks)
        return Pinned(tuple(None if ref is None else Source(ref) for ref in refs), self._access)

    async def copy(self, plan: CopyPlan) -> Copied:
        """See `Engine.copy_blocks`; the plan's epoch is the one served."""
        installation = self._pool.copies.install(plan.operation, plan.group, plan.parent, plan.blocks)
        began_ns = self._clock.monotonic_ns()
        arrived, failure = await self._arrive(plan, len(installation.blocks))
        readable, why = self._readable(plan, installation)
        if readable < arrived:
            arrived, failure = readable, why
        void = self._pool.copies.is_void(plan.operation)
        if void:
            failure = "stale-epoch"
        installed = self._pool.copies.finish(plan.operation, arrived)
        return Copied(
            parent=installed.parent,
            blocks=installed.blocks,
            first_depth=installed.first_depth,
            bytes=arrived * self._block_bytes,
            seconds=(self._clock.monotonic_ns() - began_ns) / 1e9,
            evicted=() if void else self._pool.take_evicted(plan.group),
            failure=failure,
            detail=f"operation {plan.operation}: {failure}" if failure else "",
        )

    async def _arrive(self, plan: CopyPlan, blocks: int) -> tuple[int, CopyFailure | None]:
        """How many of so many blocks come, and what keeps the others away, after the time that it takes."""
        wanted_s, began_ns = self._latency_s + blocks * self._block_s, self._clock.monotonic_ns()
        called_off = self._called_off[plan.operation] = asyncio.Event()
        try:
            if blocks:
                await sleep_unless(self._clock, min(wanted_s, plan.limit_s), self._dead, called_off)
            if self._dead.is_set():
                raise EngineDied("the modelled engine was closed")
        except BaseException:
            self._pool.copies.finish(plan.operation, 0)
            raise
        finally:
            del self._called_off[plan.operation]
        if wanted_s <= plan.limit_s and not called_off.is_set():
            return (blocks // 2, "source-lost") if self.lost and blocks else (blocks, None)
        seconds = (self._clock.monotonic_ns() - began_ns) / 1e9
        arrived = int((seconds - self._latency_s) / self._block_s + ROUNDING)
        return max(0, min(blocks, arrived)), "cancelled" if called_off.is_set() else "time-limit"

    def make_way(self, group: Group) -> None:
        """Call off whatever holds slots of the worker: a step needs them."""
        for operation in self._pool.copies.under_way(group):
            self._called_off[operation].set()

    def _readable(self, plan: CopyPlan, installation: Installation) -> tuple[int, CopyFailure]:
        """How many of the blocks that are missing were where the plan says, and what was wrong with the next."""
        sources = plan.sources[len(plan.blocks) - len(installation.blocks) :]
        for number, (block, source) in enumerate(zip(installation.blocks, sources, strict=True)):
            if source.node is not None and plan.access[source.node] != self._access:
                return number, "source-lost"
            if source.node is None and not self._pool.copies.lies_at(source.slot, block):
                return number, "stale-source"
        return len(installation.blocks), "stale-source"
