"""The frontend of the mover: its process, and the moves that it is given. Part of `TorchEngine`.

One that has ended, by itself or because it did not answer in time, costs the moves under way and nothing else: the next move
starts another. Memory that a move writes to is free again only once nobody can write to it any more: its mover has said that
the move has ended, or is gone.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from services.worker.engine.protocol import EngineDied, EngineError
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.kv_layout import ContextLayout
from services.worker.engine.torch.messages import Command, Loading, Reply
from services.worker.engine.torch.move_messages import (
    BeginMoving,
    BlockMove,
    Lend,
    Move,
    Moved,
    Moving,
    Reach,
    Reachable,
    StopMove,
    Sum,
    Sums,
)
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.ranks import WATCH_S, Ranks, wait_gone
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.unbroken import to_the_end
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import NodeId

ANSWER_LIMIT_S = 10.0
"""A mover that is this late beyond a move's own limit, or with anything else, is ended."""

SUM_BYTES = 64 << 20
"""What a mover sums up before it looks at its moves again: a tenth of a second, and far from its limit on any machine, however
much is lent at once."""


class MoverEnded(EngineError):
    """Its process is gone; nothing is known against another."""


class _Watcher:
    """Looks after one mover, whose end concerns its own moves and nobody else."""

    mover: RankProcess

    def lose(self, reason: str) -> None:
        self.mover.fail(reason)

    def note(self, rank: int, progress: Loading) -> None:
        raise TypeError(f"mover {rank} reads no weights, but told of {progress}")


@dataclass(slots=True)
class UnderWay:
    """One move that is to come or has begun. `move` names it to its mover while that has it."""

    called_off: bool = False
    move: tuple[RankProcess, int] | None = None


class MoverSide:
    """`new_name` gives names that no other mover anywhere has; KV of another `model` is never read."""

    def __init__(
        self,
        ranks: Ranks,
        zygote: Zygote,
        settings: TorchSettings,
        contexts: ContextLayout,
        model: str,
        numbers: Iterator[int],
        new_name: Callable[[], str],
    ) -> None:
        self._ranks, self._zygote, self._settings = ranks, zygote, settings
        self._contexts, self._model, self._numbers, self._new_name = contexts, model, numbers, new_name
        self._starting, self._ending = asyncio.Lock(), asyncio.Lock()
        self._mover: RankProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lent: set[str] = set()
        self._unreadable = ""
        self._logger = structlog.get_logger(component="torch-engine")

    # --- the process

    async def ready(self) -> RankProcess:
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
        settings, handles, watcher = self._settings, self._ranks.pool_handles, _Watcher()
        rank = settings.prefill_ranks + settings.decode_ranks
        self._mover = mover = watcher.mover = await RankProcess.spawn(self._zygote, rank, self._ranks.files, watcher)
        self._watch = asyncio.create_task(self._watch_stopped(mover))
        begin = BeginMoving(
            n=next(self._numbers),
            name=self._new_name(),
            model=self._model,
            prefill_ranks=settings.prefill_ranks,
            layout=self._contexts.kv,
            contexts=self._contexts,
            bytes_per_s=settings.copy_bytes_per_s,
            pools=handles[: settings.prefill_ranks],
            decode_pools=handles[settings.prefill_ranks :],
        )
        try:
            moving = await self._answer(mover, begin, settings.start_timeout_s)
        except asyncio.CancelledError:
            await to_the_end(self._end(mover))
            raise
        assert isinstance(moving, Moving), f"a mover begins with Moving, not {moving.kind}"
        self._tell_lending()

    async def _answer(self, mover: RankProcess, command: Command, limit_s: float) -> Reply:
        """Errors: those of `ready`. A mover that fails or is silent is not the engine's death, which only its ranks can tell
        of; it is ended."""
        try:
            async with asyncio.timeout(limit_s):
                return await mover.ask(command)
        except (EngineDied, TimeoutError) as error:
            await to_the_end(self._end(mover))
            if self._ranks.lost is not None:
                raise EngineDied(self._ranks.lost) from error
            if isinstance(error, TimeoutError):
                raise EngineError("the mover was silent") from error
            raise MoverEnded(f"the mover ended: {error}") from error

    async def _watch_stopped(self, mover: RankProcess) -> None:
        """One that a signal has stopped, and that does not go on for `hung_s`, is given up, in its start as well."""
        while not mover.failed:
            await asyncio.sleep(WATCH_S)
            if mover.owed and mover.look() >= self._settings.hung_s / WATCH_S and mover.stopped:
                mover.fail(f"it hangs: stopped for {self._settings.hung_s:g} s")

    async def _end(self, mover: RankProcess) -> None:
        """Returns when the process is gone. Safe to repeat."""
        async with self._ending:
            if self._mover is mover:
                self._mover = None
                if self._watch is not None:
                    self._watch.cancel()
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

    # --- moves

    async def move(
        self, blocks: Sequence[BlockMove], access: Mapping[NodeId, bytes], limit_s: float, under_way: UnderWay
    ) -> Moved:
        """What the mover made of it; `access` in the order that the blocks count it in. When this returns or raises, nothing
        more is written. Errors: those of `ready`."""
        mover = await self.ready()
        if under_way.called_off:
            return Moved(0, 0, 0, 0.0, "cancelled", "called off")
        command = Move(next(self._numbers), tuple(blocks), tuple(each.decode() for each in access.values()), limit_s)
        under_way.move = mover, command.n
        try:
            async with asyncio.timeout(limit_s + ANSWER_LIMIT_S):
                moved = await mover.ask(command)
        except (EngineDied, TimeoutError) as error:
            await self._end(mover)
            return Moved(command.n, 0, 0, 0.0, "source-lost", f"the mover ended: {error}", abandoned=True)
        finally:
            under_way.move = None
        assert isinstance(moved, Moved), f"a move is answered by Moved, not {moved.kind}"
        if moved.abandoned:
            await self._end(mover)
        return moved

    def call_off(self, under_way: UnderWay) -> None:
        """Its own answer says how far it came."""
        if under_way.move is not None and not under_way.called_off:
            mover, move = under_way.move
            mover.tell(StopMove(next(self._numbers), move))
        under_way.called_off = True

    # --- what is lent

    def prepare(self) -> None:
        """Have a mover that is there become reachable, which takes half a second, before the first read: that one's time is
        taken for what all reads take."""
        if self._mover is not None:
            self._mover.tell(Reach(next(self._numbers)))

    async def access(self) -> bytes:
        """How other nodes read this one; empty if they cannot, and then the log says why, once. Errors: those of `ready`."""
        try:
            reachable = await self._reach()
        except MoverEnded:
            # It may have been dead before, and whoever read from it has heard of that first.
            reachable = await self._reach()
        if reachable.detail and reachable.detail != self._unreadable:
            self._logger.warning("other nodes cannot read the KV of this one", reason=reachable.detail)
        self._unreadable = reachable.detail
        return reachable.access.encode()

    async def _reach(self) -> Reachable:
        reachable = await self._answer(await self.ready(), Reach(next(self._numbers)), ANSWER_LIMIT_S)
        assert isinstance(reachable, Reachable), f"Reach is answered by Reachable, not {reachable.kind}"
        return reachable

    async def checksums(self, slots: Sequence[SlotRef]) -> dict[SlotRef, int]:
        """CRC-32 of each slot's content, where the settings ask for it. Errors: those of `ready`."""
        if not self._settings.copy_checksums or not slots:
            return {}
        found, at_once = dict[SlotRef, int](), max(1, SUM_BYTES // self._contexts.kv.block_bytes)
        for start in range(0, len(slots), at_once):
            part = tuple(slots[start : start + at_once])
            sums = await self._answer(await self.ready(), Sum(next(self._numbers), part), ANSWER_LIMIT_S)
            assert isinstance(sums, Sums), f"Sum is answered by Sums, not {sums.kind}"
            found.update(zip(part, sums.checksums, strict=True))
        return found

    def lend(self, name: str) -> None:
        """Others may read from this node until `take_back` of the same name: the mover looks in more often."""
        self._lent.add(name)
        self._tell_lending()

    def take_back(self, name: str) -> None:
        """Unknown names are ignored."""
        if name in self._lent:
            self._lent.remove(name)
            self._tell_lending()

    def _tell_lending(self) -> None:
        if self._mover is not None:
            self._mover.tell(Lend(next(self._numbers), bool(self._lent)))
