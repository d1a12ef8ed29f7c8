"""Traces made to measure: other arrivals, another rate, a slice, shorter prompts. What prompts share stays shared.

Each function takes rows in order of arrival and gives rows in order of arrival, one at a time.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from random import Random

from simulation.workloads.rows import BLOCK_TOKENS_MIN, Row


def jittered(rows: Iterable[Row], grid_ms: float, chance: Random) -> Iterator[Row]:
    """Move each arrival by a uniform part of the grid it was rounded down to.

    Published traces round arrivals down (Mooncake's conversation trace to 3 s); sent as they are, ten requests arrive at
    once and then nothing for three seconds. Memory: the rows of one grid step.
    """
    waiting: list[tuple[float, int, Row]] = []
    for number, row in enumerate(rows):
        while waiting and waiting[0][0] <= row.arrival_ms:
            yield heappop(waiting)[2]
        moved = row._replace(arrival_ms=row.arrival_ms + chance.random() * grid_ms)
        heappush(waiting, (moved.arrival_ms, number, moved))
    while waiting:
        yield heappop(waiting)[2]


def at_speed(rows: Iterable[Row], speed: float) -> Iterator[Row]:
    """The same requests `speed` times as fast. Errors: ValueError unless `speed` > 0."""
    if not speed > 0:
        raise ValueError(f"speed: {speed} must be above 0")
    for row in rows:
        yield row._replace(arrival_ms=row.arrival_ms / speed)


def sliced(
    rows: Iterable[Row], start_ms: float = 0, end_ms: float = float("inf"), limit: int | None = None
) -> Iterator[Row]:
    """The rows that arrive in [start_ms, end_ms), at most `limit` of them, with `start_ms` as the new zero."""
    left = limit
    for row in rows:
        if row.arrival_ms >= end_ms or left == 0:
            return
        if row.arrival_ms < start_ms:
            continue
        if left is not None:
            left -= 1
        yield row._replace(arrival_ms=row.arrival_ms - start_ms)


def shrunk(rows: Iterable[Row], factor: float) -> Iterator[Row]:
    """Prompts and outputs `factor` times as long, for a model with a shorter context or a slower machine.

    Blocks shrink as the prompts do, so prompts that shared k blocks still share k blocks, of fewer tokens.
    Errors: ValueError unless 0 < factor ≤ 1, or when a block would have less than `BLOCK_TOKENS_MIN` tokens.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"factor: {factor} is outside (0, 1]")
    for row in rows:
        block_tokens = round(row.block_tokens * factor)
        if block_tokens < BLOCK_TOKENS_MIN:
            least = BLOCK_TOKENS_MIN / row.block_tokens
            raise ValueError(f"factor: {factor} leaves {block_tokens} tokens to a block; the least is {least:.4f}")
        whole, rest = divmod(row.prompt_tokens, row.block_tokens)
        yield row._replace(
            prompt_tokens=whole * block_tokens + -(-rest * block_tokens // row.block_tokens),
            output_tokens=-int(-row.output_tokens * factor // 1),
            block_tokens=block_tokens,
        )


def capped(rows: Iterable[Row], prompt_tokens_max: int, output_tokens_max: int) -> Iterator[Row]:
    """Cut what is longer than a model takes. A cut prompt keeps its beginning, and with it what it shares."""
    if prompt_tokens_max < 1 or output_tokens_max < 1:
        raise ValueError(
            f"prompt_tokens_max, output_tokens_max: {prompt_tokens_max}, {output_tokens_max} must be above 0"
        )
    for row in rows:
        prompt_tokens = min(row.prompt_tokens, prompt_tokens_max)
        yield row._replace(
            prompt_tokens=prompt_tokens,
            output_tokens=min(row.output_tokens, output_tokens_max),
            hash_ids=row.hash_ids[: -(-prompt_tokens // row.block_tokens)],
        )
