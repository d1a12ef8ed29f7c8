"""How fast the torch engine prefills: `python -m bench.prefill MODEL_DIR [--tokens 1024 …] [--json FILE]`.

One thread per rank and for `transformers`, all in one run and in turn, medians: the ratios hold on a busy machine, the seconds
do not. First one rank against `transformers` with SDPA on the same weights and against two ranks, then a cached prefix at
degree 2 with keys and with queries moving (`movement`).
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine.protocol import PrefillItem, PrefillStep
from services.worker.engine.torch.devices import visible_gpus
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.blocks import block_chain
from shared.model.lattice import Group

BLOCK_TOKENS = 16
PREFIXES, SUFFIXES = (256, 1_024, 4_096), (16, 64, 256)
ALWAYS_QUERIES, ALWAYS_KEYS = 0.0, 1e6
Row = dict[str, float | int]
Timed = Callable[[], Awaitable[None]]


class Bench:
    """An engine of two ranks, at one degree or the other."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._numbers, self._epoch = engine, count(), 0
        self._rng = np.random.default_rng(1)
        self.device = engine.describe().device

    async def adopt(self, *composition: int) -> None:
        self._epoch += 1
        await self._engine.adopt(self._epoch, composition)

    async def prefill(self, degree: int, prefix: np.ndarray, suffix_tokens: int) -> None:
        """Only the prefix is kept: the rest of the prompt has no block ids."""
        tokens = np.concatenate((prefix, self._rng.integers(0, 40_000, suffix_tokens))).astype(np.uint32)
        chain = tuple(block_chain(prefix.astype(np.uint32), BLOCK_TOKENS, b""))
        item = PrefillItem(RequestId(f"r{next(self._numbers)}"), tokens, chain)
        await self._engine.prefill(PrefillStep(self._epoch, Group(0, degree), (item,)))
        self._engine.release(item.request)


async def medians(repeats: int, *ways: Timed) -> list[float]:
    """Seconds of each, taken in turn; a first round is not counted."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 1):
        for seconds, way in zip(found, ways, strict=True):
            start_s = time.perf_counter()
            await way()
            seconds.append(time.perf_counter() - start_s)
    return [statistics.median(seconds[1:]) for seconds in found]


async def whole_prompts(model_dir: Path, one: Bench, two: Bench, tokens: int, repeats: int) -> Row:
    """A cold prompt on one rank, on two, and in `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto", attn_implementation="sdpa")
    model.to("cuda" if one.device == "cuda" else "cpu")
    ids, nothing = torch.randint(0, 40_000, (1, tokens), device=model.device), np.empty(0, dtype=np.uint32)

    async def theirs() -> None:
        with torch.inference_mode():
            model(ids, logits_to_keep=1).logits.argmax().item()

    seconds = await medians(
        repeats, lambda: one.prefill(1, nothing, tokens), lambda: two.prefill(2, nothing, tokens), theirs
    )
    names = ("one_rank_s", "two_ranks_s", "transformers_s")
    ratios = {"to_transformers": seconds[2] / seconds[0], "one_to_two": seconds[0] / seconds[1]}
    return {"tokens": tokens, **dict(zip(names, seconds, strict=True)), **ratios}


async def prefixes(keys: Bench, queries: Bench, prefix_tokens: int, suffix_tokens: int, repeats: int) -> Row:
    """A cached prefix at degree 2. The round that does not count caches it."""
    prefix = np.random.default_rng(prefix_tokens).integers(0, 40_000, prefix_tokens)
    seconds = await medians(
        repeats, *(lambda bench=bench: bench.prefill(2, prefix, suffix_tokens) for bench in (keys, queries))
    )
    row: Row = {"prefix_tokens": prefix_tokens, "suffix_tokens": suffix_tokens}
    return row | {"keys_s": seconds[0], "queries_s": seconds[1], "keys_to_queries": seconds[0] / seconds[1]}


async def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    zygote = Zygote()
    settings = TorchSettings(arguments.model_dir, 2, 0, BLOCK_TOKENS, 512, gpus=visible_gpus())
    engines = [
        TorchEngine(replace(settings, collective_byte_cost=cost), zygote)
        for cost in (ALWAYS_KEYS, ALWAYS_QUERIES, ALWAYS_KEYS)
    ]
    rows: list[Row] = []
    try:
        for engine in engines:
            await engine.start()
        keys, queries, one = map(Bench, engines)
        await keys.adopt(2)
        await queries.adopt(2)
        await one.adopt(1, 1)
        for tokens in arguments.tokens:
            rows.append(await whole_prompts(arguments.model_dir, one, keys, tokens, arguments.repeats))
            report(rows[-1])
        for prefix_tokens in PREFIXES:
            for suffix_tokens in SUFFIXES:
                rows.append(await prefixes(keys, queries, prefix_tokens, suffix_tokens, arguments.repeats))
                report(rows[-1])
    finally:
        for engine in engines:
            await engine.close()
        zygote.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def report(row: Row) -> None:
    sys.stdout.write("  ".join(f"{name} {value:.4g}" for name, value in row.items()) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1_024, 2_048, 4_096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asyncio.run(main(parser.parse_args()))
