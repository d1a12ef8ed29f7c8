"""A whole profile: every cell of the grid, repeated, within a budget of time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cli.profiling.document import Point
from cli.profiling.grid import Cell
from cli.profiling.prefills import Prefills
from shared.runtime.clock import Clock

GROWTH = 3.0
"""A length that is twice the last one takes between twice as long (all projections) and four times (all attention)."""


class Plan(NamedTuple):
    """`rows` holds the cells of one length each, short lengths first."""

    rows: Sequence[Sequence[Cell]]
    warmups: int
    repeats: int
    budget_s: float


class Measured(NamedTuple):
    """`left_out` are the lengths that the budget did not reach."""

    points: tuple[Point, ...]
    left_out: tuple[int, ...]


async def measure(prefills: Prefills, plan: Plan, clock: Clock, told: Callable[[Cell], None]) -> Measured:
    """Lengths are measured whole or not at all, so that no degree lacks a shape that another has for want of time.

    `told` hears of each cell that is done. The first length is always measured. Errors: those of `Prefills`.
    """
    points: list[Point] = []
    began_ns = clock.monotonic_ns()
    last_s = 0.0
    for number, row in enumerate(plan.rows):
        row_ns = clock.monotonic_ns()
        if number and (row_ns - began_ns) / 1e9 + GROWTH * last_s > plan.budget_s:
            return Measured(tuple(points), tuple(map(_length, plan.rows[number:])))
        for cell in row:
            points.append(await _point(prefills, cell, plan))
            told(cell)
        last_s = (clock.monotonic_ns() - row_ns) / 1e9
    return Measured(tuple(points), ())


async def _point(prefills: Prefills, cell: Cell, plan: Plan) -> Point:
    degree, uncached_tokens, cached_tokens = cell
    await prefills.use(degree)
    await prefills.keep(cached_tokens)
    seconds = [await prefills.prefill(uncached_tokens, cached_tokens) for _ in range(plan.warmups + plan.repeats)]
    return Point(
        degree=degree,
        uncached_tokens=uncached_tokens,
        cached_tokens=cached_tokens,
        seconds=tuple(seconds[plan.warmups :]),
    )


def _length(row: Sequence[Cell]) -> int:
    return row[0].uncached_tokens + row[0].cached_tokens
