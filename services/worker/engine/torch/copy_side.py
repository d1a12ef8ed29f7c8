"""The frontend of the mover: copies that come in, blocks that are lent. Part of `TorchEngine`.

The mover is started when it is first needed. One that has ended, by itself or because it did not answer in time, costs the
copies under way and nothing else: the next one that is needed starts another. Slots of a copy are free again only once nobody
can write to them any more: its mover has said that the copy has ended, or is gone.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.worker.engine.copy_plan import Copied, CopyPlan, Pinned, Source
from services.worker.engine.kv_copies import Installation
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.protocol import Busy, EngineDied, EngineError
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.messages import Loading
from services.worker.engine.torch.move_messages import (
    BeginMoving,
    BlockMove,
    Lend,
    Move,
    Moved,
    Moving,
    StopMove,
    Sum,
    Sums,
)
from services.worker.engine.torch.mover import MOVES_MAX
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.ranks import Ranks, wait_gone
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.unbroken import to_the_end
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import BlockId
from shared.model.lattice import Group

ANSWER_LIMIT_S = 10.0
"""A mover that is this late beyond a copy's own limit, or with anything else, is ended."""


class _Watcher:
    """Looks after one mover, whose end concerns its own copies and nobody else."""

    mover: RankProcess

    def lose(self, reason: str) -> None:
        self.mover.fail(reason)

    def note(self, rank: int, progress: Loading) -> None:
        raise TypeError(f"mover {rank} reads no weights, but told of {progress}")


@dataclass(slots=True)
class _Copy:
    """One that is under way. `move` names it to its mover while that has it; `left` if nobody wants what comes."""

    called_off: bool = False
    left: bool = False
    move: tuple[RankProcess, int] | None = None


class CopySide:
    """`new_name` gives names that no other mover anywhere has."""

    def __init__(
        self,
        pool: KvPool,
        ranks: Ranks,
        zygote: Zygote,
        settings: TorchSettings,
        layout: KvLayout,
        model: str,
        numbers: Iterator[int],
        new_name: Callable[[], str],
    ) -> None:
        self._pool, self._ranks, self._zygote, self._settings = pool, ranks, zygote, settings
        self._layout, self._model, self._numbers, self._new_name = layout, model, numbers, new_name
        self._starting, self._ending = asyncio.Lock(), asyncio.Lock()
        self._mover: RankProcess | None = None
        self._access = ""
        self._copies: dict[str, _Copy] = {}

    # --- the process

    async def _ready(self) -> RankProcess:
        """The mover. Errors: EngineError if none can be started, EngineDied if the ranks are gone."""
        async with self._starting:
            if self._mover is not None and self._mover.failed:
                await self._end(self._mover)
            if self._mover is None:
                await self._start()
            assert self._mover is not None, "a started mover is there"
            return self._mover

    async def _start(self) -> None:
        if self._ranks.lost is not None:
            raise EngineDied(self._ranks.lost)
        rank = self._settings.prefill_ranks + self._settings.decode_ranks
        watcher = _Watcher()
        self._mover = mover = watcher.mover = await RankProcess.spawn(self._zygote, rank, self._ranks.pools, watcher)
        bytes_per_s = self._settings.copy_bytes_per_s
        handles = self._ranks.pool_handles
        begin = BeginMoving(next(self._numbers), self._new_name(), self._model, self._layout, bytes_per_s, handles)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                moving = await mover.ask(begin)
        except (EngineDied, TimeoutError) as error:
            await to_the_end(self._end(mover))
            raise self._because_of_mover(error) from error
        except BaseException:
            await to_the_end(self._end(mover))
            raise
        assert isinstance(moving, Moving), f"a mover begins with Moving, not {moving.kind}"
        self._access = moving.access
        self._tell_lending()

    def _because_of_mover(self, error: EngineDied | TimeoutError) -> EngineError:
        """A mover that fails or is silent is not the engine's death, which only its ranks can tell of."""
        if self._ranks.lost is not None:
            return EngineDied(self._ranks.lost)
        return EngineError("the mover was silent" if isinstance(error, TimeoutError) else f"the mover ended: {error}")

    async def _end(self, mover: RankProcess) -> None:
        """Returns when the process is gone. Safe to repeat."""
        async with self._ending:
            if self._mover is mover:
                self._mover = None
            if mover.pidfd >= 0:
                mover.kill()
                mover.fail("the mover was ended")
                await asyncio.to_thread(wait_gone, [mover.pidfd])
                await mover.close()

    async def close(self) -> None:
        """End the mover. Safe to repeat."""
        async with self._starting:
            if self._mover is not None:
                await self._end(self._mover)

    # --- blocks that come

    async def copy(self, plan: CopyPlan, noted: Callable[[Copied], None] | None) -> Copied:
        """See `Engine.copy_blocks`; the plan's epoch is the one served."""
        if len(self._copies) >= MOVES_MAX:
            raise Busy(f"operation {plan.operation}: {len(self._copies)} copies run")
        installation = self._pool.copies.install(plan.operation, plan.group, plan.parent, plan.blocks)
        copy = self._copies[plan.operation] = _Copy()
        try:
            return await to_the_end(self._carry_out(plan, installation, copy, noted))
        except asyncio.CancelledError:
            copy.left = True
            self._call_off(copy)
            raise

    def make_way(self, group: Group) -> None:
        """Call off whatever holds slots of the worker: a step needs them."""
        for operation in self._pool.copies.under_way(group):
            self._call_off(self._copies[operation])

    def _call_off(self, copy: _Copy) -> None:
        if copy.move is not None and not copy.called_off:
            mover, move = copy.move
            mover.tell(StopMove(next(self._numbers), move))
        copy.called_off = True

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
        """What the mover made of it; when this returns or raises, nothing more is written."""
        mover = await self._ready()
        if copy.called_off:
            return Moved(0, 0, 0, 0.0, "cancelled", "called off")
        nodes = list(plan.access)
        sources = plan.sources[len(plan.blocks) - len(installation.blocks) :]
        blocks = tuple(
            BlockMove(source.slot, to, None if source.node is None else nodes.index(source.node), source.checksum)
            for source, to in zip(sources, installation.slots, strict=True)
        )
        accesses = tuple(plan.access[node].decode() for node in nodes)
        command = Move(next(self._numbers), blocks, accesses, plan.limit_s)
        copy.move = mover, command.n
        try:
            async with asyncio.timeout(plan.limit_s + ANSWER_LIMIT_S):
                moved = await mover.ask(command)
        except (EngineDied, TimeoutError) as error:
            await self._end(mover)
            return Moved(command.n, 0, 0, 0.0, "source-lost", f"the mover ended: {error}")
        finally:
            copy.move = None
        assert isinstance(moved, Moved), f"a move is answered by Moved, not {moved.kind}"
        if moved.abandoned:
            await self._end(mover)
        return moved

    # --- blocks that are lent

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        """See `Engine.pin`."""
        refs = self._pool.copies.lend(lease, blocks)
        self._tell_lending()
        there = [ref for ref in refs if ref is not None]
        try:
            mover = await self._ready()
            checksums = await self._checksums(mover, there) if self._settings.copy_checksums and there else {}
        except (EngineError, asyncio.CancelledError):
            self.unpin(lease)
            raise
        sources = tuple(None if ref is None else Source(ref, checksum=checksums.get(ref)) for ref in refs)
        return Pinned(sources, self._access.encode())

    async def _checksums(self, mover: RankProcess, slots: Sequence[SlotRef]) -> dict[SlotRef, int]:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                sums = await mover.ask(Sum(next(self._numbers), tuple(slots)))
        except (EngineDied, TimeoutError) as error:
            await to_the_end(self._end(mover))
            raise self._because_of_mover(error) from error
        assert isinstance(sums, Sums), f"Sum is answered by Sums, not {sums.kind}"
        return dict(zip(slots, sums.checksums, strict=True))

    def unpin(self, lease: str) -> None:
        """See `Engine.unpin`."""
        self._pool.copies.end_lease(lease)
        self._tell_lending()

    def _tell_lending(self) -> None:
        if self._mover is not None:
            self._mover.tell(Lend(next(self._numbers), bool(self._pool.copies.leases)))
