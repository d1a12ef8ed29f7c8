"""What a trace is like, folded row by row: lengths, long share, ideal hit rate, burstiness.

Memory: 16 bytes a row for exact percentiles, and one set entry (about 100 bytes) for each distinct block.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from simulation.workloads.endless import EndlessCache, cached_tokens
from simulation.workloads.rows import Row

LONG_TOKENS = 32 * 1024
"""A prompt beyond this is long (the paper's long share)."""

COUNT_S = 10
"""The bucket over which burstiness counts arrivals."""

_GRID_SHARE, _GRID_SLIP, _GRID_GAPS_MIN = 0.8, 1e-3, 20


class Lengths(NamedTuple):
    """Tokens per request."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int


class LengthBin(NamedTuple):
    """Prompts of [tokens_from, 2 · tokens_from) tokens."""

    tokens_from: int
    requests: int
    tokens: int


class Statistics(NamedTuple):
    """A trace in figures. Shares are in [0, 1]."""

    requests: int
    seconds: float
    requests_per_s: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    long_requests_share: float
    long_tokens_share: float
    ideal_hit_rate: float
    """Share of prompt tokens that an endless, single cache would have had: what no placement can exceed."""
    shared_requests_share: float
    """Share of requests that find more than the blocks which every request of the trace begins with."""
    blocks: int
    block_tokens: int
    burstiness: float
    """Variance over mean of the arrivals in `COUNT_S` seconds; 1 for a Poisson process."""
    arrival_grid_ms: float
    """The step that arrivals seem rounded to, 0 if none; `jittered` undoes it."""
    length_bins: tuple[LengthBin, ...]
    arrivals: tuple[int, ...]
    """Requests in each `COUNT_S` seconds."""
    arrived_tokens: tuple[int, ...]
    """Their prompts' tokens, and below how many of them the endless cache would have had."""
    hit_tokens: tuple[int, ...]


class _Fold:
    """What is kept while rows go by."""

    def __init__(self) -> None:
        self.prompts = array("q")
        self.outputs = array("q")
        self.common_depths = array("q")
        self.cache = EndlessCache()
        self.common: tuple[int, ...] | None = None
        self.arrivals: Counter[int] = Counter()
        self.arrived_tokens: Counter[int] = Counter()
        self.hit_tokens: Counter[int] = Counter()
        self.gaps_ms: Counter[int] = Counter()
        self.first_ms = self.last_ms = 0.0
        self.block_tokens = 0

    def add(self, row: Row) -> None:
        if not self.prompts:
            self.first_ms = self.last_ms = row.arrival_ms
        self.prompts.append(row.prompt_tokens)
        self.outputs.append(row.output_tokens)
        bucket = int((row.arrival_ms - self.first_ms) // (COUNT_S * 1000))
        self.arrivals[bucket] += 1
        self.arrived_tokens[bucket] += row.prompt_tokens
        self.hit_tokens[bucket] += cached_tokens(row, self._add_blocks(row))
        gap_ms = round(row.arrival_ms - self.last_ms)
        if gap_ms > 0:
            self.gaps_ms[gap_ms] += 1
        self.last_ms = row.arrival_ms
        self.block_tokens = row.block_tokens

    def _add_blocks(self, row: Row) -> int:
        """How many leading blocks were there before."""
        ids = row.hash_ids
        depth = self.cache.depth(row)
        self.common_depths.append(depth)
        if self.common is None:
            self.common = ids
        elif self.common != ids[: len(self.common)]:
            shared = next(i for i, (a, b) in enumerate(zip(self.common, (*ids, -1), strict=False)) if a != b)
            self.common = self.common[:shared]
        return depth


def statistics(rows: Iterable[Row]) -> Statistics:
    """Errors: ValueError when there is no row."""
    fold = _Fold()
    for row in rows:
        fold.add(row)
    if not fold.prompts:
        raise ValueError("the trace has no rows")
    prompts = np.array(fold.prompts)
    seconds = (fold.last_ms - fold.first_ms) / 1000
    arrivals, arrived_tokens, hit_tokens = (
        tuple(counts[i] for i in range(max(fold.arrivals) + 1))
        for counts in (fold.arrivals, fold.arrived_tokens, fold.hit_tokens)
    )
    long = prompts > LONG_TOKENS
    return Statistics(
        requests=len(prompts),
        seconds=seconds,
        requests_per_s=len(prompts) / max(seconds, 1),
        prompt_tokens=_lengths(prompts),
        output_tokens=_lengths(np.array(fold.outputs)),
        long_requests_share=float(long.mean()),
        long_tokens_share=float(prompts[long].sum() / prompts.sum()),
        ideal_hit_rate=float(sum(hit_tokens) / prompts.sum()),
        shared_requests_share=float((np.array(fold.common_depths) > len(fold.common or ())).mean()),
        blocks=len(fold.cache),
        block_tokens=fold.block_tokens,
        burstiness=_burstiness(arrivals),
        arrival_grid_ms=_grid_ms(fold.gaps_ms),
        length_bins=_bins(prompts),
        arrivals=arrivals,
        arrived_tokens=arrived_tokens,
        hit_tokens=hit_tokens,
    )


def _lengths(tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Lengths:
    p50, p90, p99 = (float(value) for value in np.percentile(tokens, (50, 90, 99)))
    return Lengths(float(tokens.mean()), p50, p90, p99, int(tokens.max()))


def _bins(prompts: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[LengthBin, ...]:
    exponents = np.floor(np.log2(prompts)).astype(int)
    return tuple(
        LengthBin(2**exponent, int((exponents == exponent).sum()), int(prompts[exponents == exponent].sum()))
        for exponent in range(int(exponents.min()), int(exponents.max()) + 1)
    )


def _burstiness(arrivals: tuple[int, ...]) -> float:
    # The last bucket is cut short by the end of the trace.
    counts = np.array(arrivals[:-1] or arrivals)
    return float(counts.var() / counts.mean())


def _grid_ms(gaps_ms: Counter[int]) -> float:
    """The gap between distinct arrivals, when most have the same one; traces round to a grid with small slips."""
    if gaps_ms.total() < _GRID_GAPS_MIN:
        return 0.0
    [(usual, _)] = gaps_ms.most_common(1)
    near = sum(count for gap, count in gaps_ms.items() if abs(gap - usual) <= max(1, usual * _GRID_SLIP))
    return float(usual) if near >= _GRID_SHARE * gaps_ms.total() and usual > 1 else 0.0
