"""What a worker is loaded with: the lengths and hits of a trace, arriving as a Poisson process of any rate. Pure, seeded."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, cycle, islice
from random import Random
from typing import NamedTuple

from shared.model.cost import US_PER_S, Coefficients
from simulation.workloads.rows import Row

ROWS_MAX = 4_000
"""Rows of a trace that are looked at; a ramp asks for a few hundred requests."""
REQUESTS_MAX = 100_000


class Shape(NamedTuple):
    """One request: L tokens, of which P are cached where the prefix is."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Request(NamedTuple):
    """A shape, and when it arrives: seconds at a rate of one request a second, so that every rate has the same pattern."""

    shape: Shape
    arrival: float


def shapes(rows: Iterable[Row], prompt_tokens_max: int, block_tokens: int) -> list[Shape]:
    """The shapes of a trace's rows, hits as an endless cache would have them, in whole blocks of the engine.

    Longer prompts are left out, not cut: a cut prompt shares more than the trace says. Errors: ValueError if none is left.
    """
    seen: set[int] = set()
    found = []
    for row in islice(rows, ROWS_MAX):
        depth = next((i for i, block in enumerate(row.hash_ids) if block not in seen), len(row.hash_ids))
        seen.update(row.hash_ids)
        if row.prompt_tokens <= prompt_tokens_max:
            hit = min(depth * row.block_tokens, row.prompt_tokens - 1)
            found.append(Shape(row.prompt_tokens, hit // block_tokens * block_tokens))
    if not found:
        raise ValueError(f"the trace: none of its first {ROWS_MAX:,} prompts has at most {prompt_tokens_max:,} tokens")
    return found


def requests_for(
    known: Sequence[Shape], coefficients: Coefficients, degree: int, seconds: float, chance: Random
) -> list[Request]:
    """Requests, drawn from the shapes, whose predicted service at this degree adds up to `seconds` or a little more.

    Errors: ValueError when that takes more than `REQUESTS_MAX`.
    """
    order = list(known)
    chance.shuffle(order)
    chosen: list[Shape] = []
    left_us = seconds * US_PER_S
    for shape in cycle(order):
        if left_us <= 0:
            break
        if len(chosen) == REQUESTS_MAX:
            raise ValueError(f"--windows, --window-s: more than {REQUESTS_MAX} requests at degree {degree}")
        chosen.append(shape)
        left_us -= service_us(coefficients, degree, shape)
    arrivals = accumulate(chance.expovariate(1.0) for _ in chosen)
    return list(map(Request, chosen, arrivals))


def service_us(coefficients: Coefficients, degree: int, shape: Shape) -> int:
    """E_C(R, P), at least 1."""
    return max(1, coefficients.prefill_us(degree, shape.uncached_tokens, shape.cached_tokens))
