"""All rank processes of an engine: their common start, watch and end."""

import asyncio
import os
import select
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout
from services.worker.engine.torch.load import Load
from services.worker.engine.torch.messages import Allocated, Attach, Begin, Loading, Reply
from services.worker.engine.torch.move_messages import PoolHandle
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote

WATCH_S = 0.1
GONE_LIMIT_S = 10.0


class Ranks:
    """Prefill ranks first, then decode ranks. They live and die together: groups with a dead rank cannot be repaired."""

    def __init__(
        self,
        settings: TorchSettings,
        layout: KvLayout,
        context_tokens: int,
        numbers: Iterator[int],
        on_loss: Callable[[str], None],
    ) -> None:
        """`on_loss` is called once, with the reason, when the ranks have been given up."""
        self._settings, self._layout, self._context_tokens, self._numbers = settings, layout, context_tokens, numbers
        self._contexts = ContextLayout.of(layout, context_tokens, settings.sequences_per_decode_rank)
        self._on_loss = on_loss
        self._processes: list[RankProcess] = []
        self.files: list[int] = []
        """Descriptors of the ranks' memory, in rank order, for whoever else is to map it, until `close`."""
        self.pool_handles: tuple[PoolHandle, ...] = ()
        """The same of what is in GPU memory: prefill ranks' slots, decode ranks' contexts."""
        self._watch: asyncio.Task[None] | None = None
        self._load = Load(settings.prefill_ranks + settings.decode_ranks)
        self._start_limit: asyncio.Timeout | None = None
        self.lost: str | None = None
        """Why the ranks are gone; None while they are well."""

    @property
    def prefill(self) -> Sequence[RankProcess]:
        return self._processes[: self._settings.prefill_ranks]

    @property
    def decode(self) -> Sequence[RankProcess]:
        return self._processes[self._settings.prefill_ranks :]

    async def start(self, zygote: Zygote) -> None:
        """Fork every rank and wait until all are ready. EngineError says why not; `close` is still to be called then."""
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s) as self._start_limit:
                await self._spawn(zygote)
                self._watch = asyncio.create_task(self._watch_hangs())
                begun = await asyncio.gather(*(rank.ask(self._begin(rank)) for rank in self._processes))
                if self._settings.gpus:
                    await self._attach(begun)
        except TimeoutError as error:
            raise EngineError(f"ranks: {self._load.text}, and no progress for {limit_s:g} s") from error
        finally:
            self._start_limit = None

    @property
    def starting(self) -> str:
        """How far the start is."""
        return self._load.text

    def note(self, rank: int, progress: Loading) -> None:
        """Whoever reads on is not given up."""
        self._load.note(rank, progress)
        if self._start_limit is not None and not self._start_limit.expired():
            self._start_limit.reschedule(asyncio.get_running_loop().time() + self._settings.start_timeout_s)

    async def _spawn(self, zygote: Zygote) -> None:
        """The ranks' memory is anonymous shared files: they need no mount and go with the last process that maps them."""
        settings, on_gpus = self._settings, bool(self._settings.gpus)
        for rank in range(settings.prefill_ranks):
            self._make_file(f"kv-{rank}", self._layout.slots_offset if on_gpus else self._layout.file_bytes)
        for rank in range(settings.decode_ranks):
            self._make_file(f"contexts-{rank}", 0 if on_gpus else self._contexts.file_bytes)
        meeting = os.memfd_create("vertumnus-meeting")
        try:
            for rank in range(settings.prefill_ranks + settings.decode_ranks):
                self._processes.append(await RankProcess.spawn(zygote, rank, [*self.files, meeting], self))
        finally:
            os.close(meeting)  # the ranks have it

    def _make_file(self, name: str, size: int) -> None:
        self.files.append(os.memfd_create(f"vertumnus-{name}"))
        os.ftruncate(self.files[-1], size)

    async def _attach(self, begun: Sequence[Reply]) -> None:
        """Every prefill rank opens the pools that the others have allocated on their GPUs."""
        self.pool_handles = tuple(reply.pool for reply in begun if isinstance(reply, Allocated))
        assert len(self.pool_handles) == len(self._processes), "each rank has allocated a pool"
        slots = self.pool_handles[: self._settings.prefill_ranks]
        await asyncio.gather(*(rank.ask(Attach(next(self._numbers), slots)) for rank in self.prefill))

    def _begin(self, rank: RankProcess) -> Begin:
        return Begin(
            n=next(self._numbers),
            rank=rank.rank,
            prefill_ranks=self._settings.prefill_ranks,
            model_dir=str(self._settings.model_dir),
            block_tokens=self._settings.block_tokens,
            blocks_per_rank=self._settings.blocks_per_rank,
            context_tokens=self._context_tokens,
            sequences=self._settings.sequences_per_decode_rank,
            gpus=self._settings.gpus,
        )

    def lose(self, reason: str) -> None:
        """End every rank and tell everybody who waits. The first reason counts."""
        if self.lost is not None:
            return
        self.lost = reason
        for rank in self._processes:
            rank.kill()
        for rank in self._processes:
            rank.fail(reason)
        self._on_loss(reason)

    async def close(self) -> None:
        """Returns when no rank process is left. Safe to repeat."""
        self.lose("closed")
        if self._watch is not None:
            self._watch.cancel()
        processes, self._processes = self._processes, []
        for rank in processes:
            rank.kill()  # those, too, that came up after the loss
        files, self.files = self.files, []
        for file in files:
            os.close(file)
        await asyncio.to_thread(wait_gone, [rank.pidfd for rank in processes])
        for rank in processes:
            await rank.close()

    async def _watch_hangs(self) -> None:
        """At the start each rank owes an answer of its own and may sleep until the others have come as far: only one that was
        stopped is known to hang then, and `start_timeout_s` is for everything else."""
        while self.lost is None:
            await asyncio.sleep(WATCH_S)
            still = self._still()
            reason = self._stopped(still)
            if self._start_limit is None:
                reason = reason or self._asleep(still) or self._silent()
            if reason is not None:
                self.lose(reason)

    def _still(self) -> set[RankProcess]:
        """Ranks that have owed an answer and not run for `hung_s`."""
        looks = {rank: rank.look() for rank in self._processes}
        return {rank for rank, still_looks in looks.items() if still_looks >= self._settings.hung_s / WATCH_S}

    def _stopped(self, still: set[RankProcess]) -> str | None:
        """By a signal, or by a debugger: whatever its peers do meanwhile, they will have to wait for it."""
        return self._hangs([rank for rank in self._processes if rank in still and rank.stopped], "stopped")

    def _asleep(self, still: set[RankProcess]) -> str | None:
        """Ranks that owe the answer to the same command wait for each other, so one of them that is active clears them all."""
        waiting: dict[int, list[RankProcess]] = defaultdict(list)
        for rank in self._processes:
            for number in rank.owed:
                waiting[number].append(rank)
        return self._hangs(next((ranks for ranks in waiting.values() if still.issuperset(ranks)), []), "asleep")

    def _hangs(self, blamed: Sequence[RankProcess], how: str) -> str | None:
        names = ", ".join(f"rank {rank.rank} (pid {rank.pid})" for rank in blamed)
        return f"{names} hangs: {how} for {self._settings.hung_s:g} s" if blamed else None

    def _silent(self) -> str | None:
        limits = ((self.prefill, self._settings.step_timeout_s), (self.decode, self._settings.token_timeout_s))
        for ranks, limit_s in limits:
            for rank in ranks:
                if rank.silent_s() > limit_s:
                    return f"rank {rank.rank} (pid {rank.pid}) hangs: no answer for {limit_s:g} s"
        return None


def wait_gone(pidfds: Sequence[int]) -> None:
    """Wait until the killed processes have ended: a pidfd becomes readable then."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = poll.poll(GONE_LIMIT_S * 1000)
        assert ended, f"a killed process is gone within {GONE_LIMIT_S} s"
