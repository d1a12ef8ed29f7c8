"""How fast the torch engine prefills: `python -m bench.prefill MODEL_DIR [--tokens 1024 …] [--json FILE]`.

One thread per rank and for `transformers`, each on a core of its own, all in one run and in turn, medians of ratios: those hold
on a busy machine, the seconds do not. First one rank against `transformers` with SDPA on the same weights and against two
ranks, with what these send to each other per layer beside the formula; then a cached prefix at degree 2 with keys and with
queries moving (`movement`). Long prompts are taken less often: one of 8,191 tokens takes the better part of a minute.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.worker.engine.protocol import PrefillItem, PrefillStep
from services.worker.engine.torch.devices import visible_gpus
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.movement import key_bytes, query_bytes, suffix_bytes
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.blocks import block_chain
from shared.model.lattice import Group

BLOCK_TOKENS = 16
TOKENS = (1_024, 2_048, 4_096, 8_191)
PREFIXES, SUFFIXES = (256, 1_024, 4_096), (16, 64, 256)
WARM_TOKENS = 128
CORES = 2
NOTHING = np.empty(0, dtype=np.int64)
ALWAYS_QUERIES, ALWAYS_KEYS = 0.0, 1e6
Row = dict[str, float | int]
Timed = Callable[[], Awaitable[None]]


class Bench:
    """An engine of two ranks, at one degree or the other."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._numbers, self._epoch = engine, count(), 0
        self._rng = np.random.default_rng(1)
        self.device = engine.describe().device
        self.layout, self.q_heads = engine._parts.layout, engine._parts.q_heads

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

    def pin(self) -> None:
        """A core for each rank's computing thread."""
        for rank, process in enumerate(self._engine._ranks.prefill):
            os.sched_setaffinity(process.pid, {rank % CORES})

    def sent_bytes(self) -> float:
        """Of one rank, on average: gloo writes to sockets, and nothing else of a rank writes."""
        found = [Path(f"/proc/{rank.pid}/io").read_text().splitlines() for rank in self._engine._ranks.prefill]
        return statistics.mean(int(line.split()[1]) for lines in found for line in lines if line.startswith("wchar:"))

    async def sent_per_layer(self, prefix: np.ndarray, suffix_tokens: int) -> float:
        """What a rank sends in a step at degree 2; what it receives is as much."""
        before = self.sent_bytes()
        await self.prefill(2, prefix, suffix_tokens)
        return (self.sent_bytes() - before) / self.layout.layers


async def in_turn(rounds: int, *ways: Timed) -> np.ndarray:
    """Seconds, (rounds, ways)."""
    found = np.empty((rounds, len(ways)))
    for turn in range(rounds):
        for number, way in enumerate(ways):
            start_s = time.perf_counter()
            await way()
            found[turn, number] = time.perf_counter() - start_s
    return found


def ratio(over: np.ndarray, under: np.ndarray) -> float:
    """The median of the rounds' ratios."""
    return float(np.median(over / under))


async def whole_prompts(model: PreTrainedModel, one: Bench, two: Bench, tokens: int, rounds: int) -> Row:
    """A cold prompt on one rank, on two, and in `transformers`."""
    ids = torch.randint(0, 40_000, (1, tokens), device=model.device)

    async def theirs() -> None:
        with torch.inference_mode():
            model(ids, logits_to_keep=1).logits.argmax().item()

    found = await in_turn(
        rounds, lambda: one.prefill(1, NOTHING, tokens), lambda: two.prefill(2, NOTHING, tokens), theirs
    )
    one_s, two_s, theirs_s = found.T
    return {
        "tokens": tokens,
        "one_rank_tokens_per_s": tokens / float(np.median(one_s)),
        "two_ranks_tokens_per_s": tokens / float(np.median(two_s)),
        "transformers_tokens_per_s": tokens / float(np.median(theirs_s)),
        "to_transformers": ratio(theirs_s, one_s),
        "one_to_two": ratio(one_s, two_s),
    }


async def sent(bench: Bench, prefix_tokens: int, suffix_tokens: int, *, moves_queries: bool) -> Row:
    """Bytes that a rank receives in collectives per layer at degree 2, by the formula and as sent over sockets."""
    prefix = drawn_prefix(prefix_tokens)
    if prefix_tokens:
        await bench.prefill(2, prefix, WARM_TOKENS)  # caches it
    formula = suffix_bytes(bench.layout, 2, suffix_tokens)
    if moves_queries:
        formula += query_bytes(bench.layout, bench.q_heads, 2, suffix_tokens)
    measured = await bench.sent_per_layer(prefix, suffix_tokens)
    row: Row = {"prefix_tokens": prefix_tokens, "suffix_tokens": suffix_tokens, "moves_queries": int(moves_queries)}
    return row | {"formula_bytes": formula, "sent_bytes": measured}


async def prefixes(keys: Bench, queries: Bench, prefix_tokens: int, suffix_tokens: int, rounds: int) -> Row:
    """A cached prefix at degree 2."""
    prefix = drawn_prefix(prefix_tokens)
    for bench in (keys, queries):
        await bench.prefill(2, prefix, WARM_TOKENS)  # caches it
    found = await in_turn(
        rounds, *(lambda bench=bench: bench.prefill(2, prefix, suffix_tokens) for bench in (keys, queries))
    )
    return {
        "prefix_tokens": prefix_tokens,
        "suffix_tokens": suffix_tokens,
        "bytes_keys_to_queries": key_bytes(keys.layout, 2, prefix_tokens)
        / query_bytes(keys.layout, keys.q_heads, 2, suffix_tokens),
        "time_keys_to_queries": ratio(*found.T),
    }


def drawn_prefix(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, 40_000, tokens)


async def figures(arguments: argparse.Namespace, keys: Bench, queries: Bench, one: Bench) -> AsyncIterator[Row]:
    model = AutoModelForCausalLM.from_pretrained(arguments.model_dir, dtype="auto", attn_implementation="sdpa")
    model.to("cuda" if one.device == "cuda" else "cpu")  # type: ignore[arg-type]  # its decorator hides `self`
    await whole_prompts(model, one, keys, WARM_TOKENS, rounds=2)
    for tokens in arguments.tokens:
        yield await whole_prompts(model, one, keys, tokens, max(1, arguments.rounds * min(TOKENS) // tokens))
    for prefix_tokens, suffix_tokens in ((0, 1_024), (1_024, 64)):
        yield await sent(keys, prefix_tokens, suffix_tokens, moves_queries=False)
    yield await sent(queries, 1_024, 64, moves_queries=True)
    for prefix_tokens in PREFIXES:
        for suffix_tokens in SUFFIXES:
            yield await prefixes(keys, queries, prefix_tokens, suffix_tokens, arguments.rounds)


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
        for bench in (keys, queries, one):
            bench.pin()
        os.sched_setaffinity(0, {0})  # not before: ranks would inherit it
        await keys.adopt(2)
        await queries.adopt(2)
        await one.adopt(1, 1)
        async for row in figures(arguments, keys, queries, one):
            rows.append(row)
            report(row)
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
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asyncio.run(main(parser.parse_args()))
