"""What a switch of geometry costs, and what ranks hold in memory: `python -m bench.switching MODEL_DIR`.

Eight prefill ranks. A switch is timed from the barrier to ready by each rank (`RankAdopted.seconds`), as the whole call, and
from the wish to it while a step runs, which has to end first. Memory is what the kernel counts, beside the formula.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from services.worker.engine.protocol import PrefillItem, PrefillStep
from services.worker.engine.torch.devices import visible_gpus
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.memory import rope_bytes, step_bytes
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.lattice import DEGREES, Composition, Group, groups_of

RANKS = 8
SWITCHES, DRAINED_SWITCHES = 300, 50
STEP_TOKENS = 256
WARM_TOKENS, MEMORY_TOKENS = 64, 2_048
RESET_PEAK = "5"
"""What clears the peak of the resident size (proc_pid_clear_refs(5))."""


class Bench:
    """An engine and the composition it serves."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.epoch, self._requests = 0, 0
        self._rng = random.Random(1)

    async def adopt(self, composition: Composition) -> tuple[float, list[float]]:
        """Seconds of the call, and of each rank from the barrier to ready."""
        self.epoch += 1
        began_s = time.perf_counter()
        ranks = await self.engine.adopt(self.epoch, composition)
        return time.perf_counter() - began_s, [rank.seconds for rank in ranks]

    async def prefill(self, group: Group, prompt_tokens: int) -> None:
        """Without block ids: nothing is cached, and the slots are free again afterwards."""
        self._requests += 1
        tokens = np.random.default_rng(self._requests).integers(0, 40_000, prompt_tokens).astype(np.uint32)
        item = PrefillItem(RequestId(f"r{self._requests}"), tokens, ())
        await self.engine.prefill(PrefillStep(self.epoch, group, (item,)))
        self.engine.release(item.request)

    def composition(self, ranks: int = RANKS) -> Composition:
        """Any, with the large workers as likely as the small."""
        if ranks == 1 or self._rng.random() < 0.4:
            return (ranks,)
        return self.composition(ranks // 2) + self.composition(ranks // 2)

    async def switch(self) -> None:
        """Nothing runs."""
        calls, ranks = [], []
        before = [status_bytes(rank.pid, "VmRSS") for rank in self.engine._ranks.prefill]
        for _ in range(SWITCHES):
            call_s, rank_s = await self.adopt(self.composition())
            calls.append(call_s)
            ranks += rank_s
        after = [status_bytes(rank.pid, "VmRSS") for rank in self.engine._ranks.prefill]
        say(f"{SWITCHES} switches, barrier to ready", ranks)
        say(f"{SWITCHES} switches, whole call", calls)
        grown = max(now - then for now, then in zip(after, before, strict=True))
        sys.stdout.write(f"resident memory of a rank afterwards: at most {grown / 1024:+.0f} KiB\n")

    async def switch_after_a_step(self) -> None:
        """From the wish, at any moment of a step, to the new epoch."""
        waits = []
        for _ in range(DRAINED_SWITCHES):
            composition = self.composition()
            await self.adopt(composition)
            group = self._rng.choice(groups_of(composition))
            step = asyncio.create_task(self.prefill(group, STEP_TOKENS))
            await asyncio.sleep(self._rng.uniform(0, 0.2))
            began_s = time.perf_counter()
            await step
            await self.adopt(self.composition())
            waits.append(time.perf_counter() - began_s)
        say(f"{DRAINED_SWITCHES} switches, with what was left of a step of {STEP_TOKENS} tokens", waits)

    async def step_memory(self, settings: TorchSettings, degree: int) -> None:
        """The peak of a rank's first long step: later ones find the memory of this one. Slots that it touches are shared."""
        pid = self.engine._ranks.prefill[0].pid
        await self.adopt((degree,) * (RANKS // degree))
        await self.prefill(Group(0, degree), WARM_TOKENS)
        reset_peak(pid)
        before, shared = status_bytes(pid, "VmRSS"), status_bytes(pid, "RssShmem")
        await self.prefill(Group(0, degree), MEMORY_TOKENS)
        measured = status_bytes(pid, "VmHWM") - before - (status_bytes(pid, "RssShmem") - shared)
        expected = step_bytes(read_config(settings.model_dir), 0, MEMORY_TOKENS, degree)
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in expected._asdict().items())
        sys.stdout.write(
            f"step of {MEMORY_TOKENS} tokens at degree {degree}: {measured / 2**20:6.1f} MiB,"
            f" formula {expected.total / 2**20:6.1f} ({parts})\n"
        )

    def rank_memory(self, settings: TorchSettings) -> None:
        """Of ranks that have computed nothing yet."""
        config = read_config(settings.model_dir)
        sys.stdout.write(
            f"rope tables {rope_bytes(config, settings.context_tokens_max) / 2**20:.1f} MiB of each rank\n"
        )
        for name in ("Rss", "Pss", "Private_Dirty"):
            sizes = [rollup_bytes(rank.pid, name) / 2**20 for rank in self.engine._ranks.prefill]
            sys.stdout.write(f"{name} of each rank: {min(sizes):.0f} to {max(sizes):.0f} MiB\n")


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def say(name: str, seconds: Sequence[float]) -> None:
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    sys.stdout.write(f"{name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms\n")


def status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024


def rollup_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024


@asynccontextmanager
async def started(settings: TorchSettings, zygote: Zygote) -> AsyncIterator[Bench]:
    engine = TorchEngine(settings, zygote)
    try:
        await engine.start()
        yield Bench(engine)
    finally:
        await engine.close()


async def main(model_dir: Path) -> None:
    zygote = Zygote()
    settings = TorchSettings(model_dir, prefill_ranks=RANKS, switch_timeout_s=30, gpus=visible_gpus())
    try:
        async with started(settings, zygote) as bench:
            bench.rank_memory(settings)
            await bench.switch()
            await bench.switch_after_a_step()
        for degree in DEGREES:
            async with started(settings, zygote) as bench:
                await bench.step_memory(settings, degree)
    finally:
        zygote.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.switching")
    parser.add_argument("model_dir", type=Path)
    asyncio.run(main(parser.parse_args().model_dir))
