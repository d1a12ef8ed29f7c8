"""Copies of the modelled engine: real slots and leases in the `KvPool`, and the time that the bytes would take.

A source on the engine's own node is looked at again after that time, as a reader does; one on another node is believed.
"""

from collections.abc import Awaitable, Callable, Sequence

from services.worker.engine.copy_plan import Copied, CopyFailure, CopyPlan, Pinned, Source
from services.worker.engine.kv_copies import Installation
from services.worker.engine.kv_pool import KvPool
from shared.contracts.ids import BlockId

LATENCY_S = 0.005
"""Of a copy, whatever its size, in modelled time: the router's price of a fetch begins with as much (design 2.2)."""


class ModelledCopies:
    """A copy takes `latency_s` and `block_s` for each block, in seconds of the clock that `sleep` goes by. `access` is the same
    for nodes that keep the same KV."""

    def __init__(
        self,
        pool: KvPool,
        access: bytes,
        block_bytes: int,
        block_s: float,
        latency_s: float,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._pool, self._access, self._sleep = pool, access, sleep
        self._block_bytes, self._block_s, self._latency_s = block_bytes, block_s, latency_s

    def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        """See `Engine.pin`."""
        refs = self._pool.copies.lend(lease, blocks)
        return Pinned(tuple(None if ref is None else Source(ref) for ref in refs), self._access)

    async def copy(self, plan: CopyPlan) -> Copied:
        """See `Engine.copy_blocks`; the plan's epoch is the one served."""
        installation = self._pool.copies.install(plan.operation, plan.group, plan.parent, plan.blocks)
        failure: CopyFailure | None = None
        arrived, wanted_s = len(installation.blocks), self._latency_s + len(installation.blocks) * self._block_s
        try:
            if installation.blocks:
                await self._sleep(min(wanted_s, plan.limit_s))
        except BaseException:
            self._pool.copies.finish(plan.operation, 0)
            raise
        if wanted_s > plan.limit_s:
            arrived, failure = max(0, int((plan.limit_s - self._latency_s) / self._block_s)), "time-limit"
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
            seconds=min(wanted_s, plan.limit_s),
            evicted=() if void else self._pool.take_evicted(plan.group),
            failure=failure,
            detail=f"operation {plan.operation}: {failure}" if failure else "",
        )

    def _readable(self, plan: CopyPlan, installation: Installation) -> tuple[int, CopyFailure]:
        """How many of the blocks that are missing were where the plan says, and what was wrong with the next."""
        sources = plan.sources[len(plan.blocks) - len(installation.blocks) :]
        for number, (block, source) in enumerate(zip(installation.blocks, sources, strict=True)):
            if source.node is not None and plan.access[source.node] != self._access:
                return number, "source-lost"
            if source.node is None and not self._pool.copies.lies_at(source.slot, block):
                return number, "stale-source"
        return len(installation.blocks), "stale-source"
