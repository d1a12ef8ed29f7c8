"""Copies that come in for workers, and blocks that are lent: what the KV index has to do with the mover. Part of
`TorchEngine`."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.engine.copy_plan import Copied, CopyPlan, Pinned, Source
from services.worker.engine.kv_copies import Installation
from services.worker.engine.kv_pool import KvPool, Reservation
from services.worker.engine.protocol import Busy, EngineDied, EngineError
from services.worker.engine.torch.move_messages import BlockMove, Moved
from services.worker.engine.torch.mover import COPIES_MAX
from services.worker.engine.torch.mover_side import MoverSide, UnderWay
from services.worker.engine.torch.ranks import Ranks
from services.worker.engine.torch.unbroken import to_the_end
from shared.contracts.ids import BlockId, RequestId
from shared.model.lattice import Group


@dataclass(slots=True)
class _Copy:
    """One that is under way. `left` if nobody wants what comes."""

    under_way: UnderWay = field(default_factory=UnderWay)
    left: bool = False


class CopySide:
    """See `Engine.copy_blocks`, `pin` and `unpin`."""

    def __init__(self, pool: KvPool, ranks: Ranks, mover: MoverSide) -> None:
        self._pool, self._ranks, self._mover = pool, ranks, mover
        self._copies: dict[str, _Copy] = {}

    # --- blocks that come

    async def copy(self, plan: CopyPlan, noted: Callable[[Copied], None] | None) -> Copied:
        """See `Engine.copy_blocks`; the plan's epoch is the one served."""
        if len(self._copies) >= COPIES_MAX:
            raise Busy(f"operation {plan.operation}: {len(self._copies)} copies run")
        installation = self._pool.copies.install(plan.operation, plan.group, plan.parent, plan.blocks)
        copy = self._copies[plan.operation] = _Copy()
        try:
            return await to_the_end(self._carry_out(plan, installation, copy, noted))
        except asyncio.CancelledError:
            copy.left = True
            self._mover.call_off(copy.under_way)
            raise

    def make_way(self, group: Group) -> None:
        """Call off whatever holds slots of the worker: a step needs them."""
        for operation in self._pool.copies.under_way(group):
            self._mover.call_off(self._copies[operation].under_way)

    async def _carry_out(
        self, plan: CopyPlan, installation: Installation, copy: _Copy, noted: Callable[[Copied], None] | None
    ) -> Copied:
        began_s, arrived = asyncio.get_running_loop().time(), 0
        try:
            moved = await self._move(plan, installation, copy) if installation.blocks else Moved(0, 0, 0, 0.0)
            arrived = 0 if copy.left else moved.blocks
        finally:
            del self._copies[plan.operation]
            void = self._pool.copies.is_void(plan.operation)
            installed = self._pool.copies.finish(plan.operation, arrived)
        if self._ranks.lost is not None:
            raise EngineDied(self._ranks.lost)
        copied = Copied(
            parent=installed.parent,
            blocks=installed.blocks,
            first_depth=installed.first_depth,
            bytes=moved.bytes,
            seconds=asyncio.get_running_loop().time() - began_s,
            evicted=() if void or copy.left else self._pool.take_evicted(plan.group),
            failure="stale-epoch" if void else moved.failure,
            detail=f"epoch {plan.epoch}: was left during the copy" if void else moved.detail,
        )
        if noted is not None:
            noted(copied)
        return copied

    async def _move(self, plan: CopyPlan, installation: Installation, copy: _Copy) -> Moved:
        nodes = list(plan.access)
        sources = plan.sources[len(plan.blocks) - len(installation.blocks) :]
        blocks = [
            BlockMove(source.slot, to, None if source.node is None else nodes.index(source.node), source.checksum)
            for source, to in zip(sources, installation.slots, strict=True)
        ]
        return await self._mover.move(blocks, plan.access, plan.limit_s, copy.under_way)

    # --- blocks that are lent

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        """See `Engine.pin`."""
        refs = self._pool.copies.lend(lease, blocks)
        self._mover.lend(_lease(lease))
        try:
            access = await self._mover.access()
            checksums = await self._mover.checksums([ref for ref in refs if ref is not None])
        except (EngineError, asyncio.CancelledError):
            self.unpin(lease)
            raise
        return Pinned(tuple(None if ref is None else Source(ref, checksum=checksums.get(ref)) for ref in refs), access)

    def unpin(self, lease: str) -> None:
        """See `Engine.unpin`."""
        self._pool.copies.end_lease(lease)
        self._mover.take_back(_lease(lease))

    async def offer(self, request: RequestId, finished: Callable[[], Reservation | None]) -> Pinned:
        """See `Engine.offer`. `finished` tells the request's slots while it has them, and may do so no longer after a wait."""
        self._mover.lend(_prefill(request))
        try:
            access = await self._mover.access()
            reservation = finished()
            checksums = await self._mover.checksums(reservation.slots if reservation else ())
            if reservation is None or finished() is None:
                raise EngineError(f"request {request}: has no finished prefill")
            if not access:
                raise EngineError("offer: no other node can read this one")
        except (EngineError, asyncio.CancelledError):
            self.withdraw(request)
            raise
        return Pinned(tuple(Source(ref, checksum=checksums.get(ref)) for ref in reservation.slots), access)

    def withdraw(self, request: RequestId) -> None:
        """End an offer. Unknown ones are ignored."""
        self._mover.take_back(_prefill(request))


def _lease(lease: str) -> str:
    return f"lease {lease}"


def _prefill(request: RequestId) -> str:
    return f"prefill {request}"
