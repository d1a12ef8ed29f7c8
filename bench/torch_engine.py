"""What companions and chunks cost on the torch engine: `python -m bench.torch_engine MODEL_DIR`.

Sequences that decode together, short prompts packed into one step, a long prompt in several. Times are wall time and the
ranks' own CPU time, which a busy machine does not blur.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from services.worker.engine.protocol import PrefillItem, PrefillStep, Sampling
from services.worker.engine.torch.devices import visible_gpus
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.lattice import Group

COMPOSITION = (2, 1, 1)
WORKERS = (Group(2, 1), Group(0, 2))
SEQUENCES = (1, 4, 8)
NEW_TOKENS = 33
SHORT_PROMPTS, SHORT_TOKENS = 8, 32
LONG_TOKENS, CHUNK_TOKENS = 1_024, 256
BLOCK_TOKENS = 16


class Bench:
    """An engine, and prompts that it has not seen."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._numbers = count()
        self._rng = np.random.default_rng(1)

    def item(self, prompt_tokens: int) -> PrefillItem:
        """Without block ids: nothing is cached, and memory is free again once the request is released."""
        tokens = self._rng.integers(0, 40_000, prompt_tokens).astype(np.uint32)
        return PrefillItem(RequestId(f"r{next(self._numbers)}"), tokens, ())

    async def prefill(self, worker: Group, *items: PrefillItem) -> list[int]:
        """The first tokens; 0 for a prompt that is not finished."""
        results = (await self.engine.prefill(PrefillStep(1, worker, items))).items
        return [result.first_token.token if result.first_token else 0 for result in results]

    async def decode_together(self, sequences: int) -> None:
        """Prefill one after the other, decode side by side."""
        firsts: dict[RequestId, int] = {}
        for _ in range(sequences):
            item = self.item(256)
            (firsts[item.request],) = await self.prefill(WORKERS[0], item)
            await self.engine.hand_off(item.request)
            self.engine.release(item.request)

        async def decode(request: RequestId) -> None:
            async for _ in self.engine.decode(request, firsts[request], NEW_TOKENS, frozenset(), Sampling()):
                pass

        with Spent(self.engine._ranks.decode, f"decode, {sequences} sequences", sequences * NEW_TOKENS):
            await asyncio.gather(*map(decode, firsts))

    async def prefill_short(self, worker: Group, packed: int) -> None:
        """Eight short prompts, `packed` of them in each step."""
        items = [self.item(SHORT_TOKENS) for _ in range(SHORT_PROMPTS)]
        name = f"{SHORT_PROMPTS} prompts at degree {worker.degree}, {packed} in a step"
        with Spent(self._ranks(worker), name, SHORT_PROMPTS * SHORT_TOKENS):
            for start in range(0, SHORT_PROMPTS, packed):
                await self.prefill(worker, *items[start : start + packed])
        for item in items:
            self.engine.release(item.request)

    async def prefill_long(self, worker: Group, chunk_tokens: int) -> None:
        """One long prompt."""
        item = self.item(LONG_TOKENS)
        with Spent(self._ranks(worker), f"one prompt at degree {worker.degree}, chunks of {chunk_tokens}", LONG_TOKENS):
            for until in range(chunk_tokens, LONG_TOKENS, chunk_tokens):
                await self.prefill(worker, replace(item, until=until))
            await self.prefill(worker, item)
        self.engine.release(item.request)

    def _ranks(self, worker: Group) -> list[RankProcess]:
        return [self.engine._ranks.prefill[rank] for rank in worker.ranks]


class Spent:
    """Prints what the block took."""

    def __init__(self, ranks: Sequence[RankProcess], name: str, tokens: int) -> None:
        self._ranks, self._name, self._tokens = ranks, name, tokens

    def __enter__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), self._used_s()

    def __exit__(self, *_: object) -> None:
        wall_s, cpu_s = time.perf_counter() - self._wall_s, self._used_s() - self._cpu_s
        rates = f"{self._tokens / wall_s:7.1f} tok/s, {self._tokens / cpu_s:7.1f} per CPU second"
        sys.stdout.write(f"{self._name:45} {wall_s:6.2f} s, {cpu_s:6.2f} s of CPU: {rates}\n")

    def _used_s(self) -> float:
        """User and system seconds of the ranks."""
        used = 0
        for rank in self._ranks:
            fields = Path(f"/proc/{rank.pid}/stat").read_text().rsplit(")", 1)[1].split()
            used += int(fields[11]) + int(fields[12])
        return used / os.sysconf("SC_CLK_TCK")


async def main(model_dir: Path) -> None:
    zygote = Zygote()
    settings = TorchSettings(model_dir, prefill_ranks=sum(COMPOSITION), block_tokens=BLOCK_TOKENS, gpus=visible_gpus())
    engine = TorchEngine(settings, zygote)
    try:
        await engine.start()
        await engine.adopt(1, COMPOSITION)
        bench = Bench(engine)
        for _ in range(2):  # the first time reads the weights from disk
            for sequences in SEQUENCES:
                await bench.decode_together(sequences)
            for worker in WORKERS:
                for packed in (1, SHORT_PROMPTS):
                    await bench.prefill_short(worker, packed)
                for chunk_tokens in (LONG_TOKENS, CHUNK_TOKENS):
                    await bench.prefill_long(worker, chunk_tokens)
            sys.stdout.write("\n")
    finally:
        await engine.close()
        zygote.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.torch_engine")
    parser.add_argument("model_dir", type=Path)
    asyncio.run(main(parser.parse_args().model_dir))
