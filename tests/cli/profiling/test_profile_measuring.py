"""Measuring, on the modelled engine in virtual time: what is known there comes out."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from cli.profiling.grid import Cell, rows
from cli.profiling.measuring import Measured, Plan, measure
from cli.profiling.node import Node, run_on_node
from cli.profiling.prefills import NotResident, Prefills, composition_with
from services.worker.settings import WorkerSettings
from shared.model.cost import load_coefficients
from shared.model.lattice import groups_of
from shared.runtime.memory import ManualClock

COSTS = load_coefficients("qwen3_30b_a3b_h20")
_T = TypeVar("_T")


def on_a_node(work: Callable[[Node, Prefills], Awaitable[_T]], **more: int) -> _T:
    settings = WorkerSettings(engine="modelled", node="n", prefill_ranks=8, decode_ranks=0, **more)  # type: ignore[arg-type]

    async def whole(node: Node) -> _T:
        return await work(node, Prefills(node.engine, node.vocabulary, np.random.default_rng(1)))

    return run_on_node(settings, whole)


def measured(grid: list[list[Cell]], budget_s: float = 1e9, clock: ManualClock | None = None) -> Measured:
    async def work(node: Node, prefills: Prefills) -> Measured:
        plan = Plan(grid, warmups=1, repeats=2, budget_s=budget_s)
        return await measure(prefills, plan, clock or node.clock, lambda _: None)

    return on_a_node(work)


def test_every_cell_takes_what_the_model_says() -> None:
    async def limits(node: Node, _: Prefills) -> list[list[Cell]]:
        return rows(node.limits, (1, 2, 4, 8), (64, 200, 5_000), (0.0, 0.5, 0.9))

    grid = on_a_node(limits)
    found = measured(grid)
    assert [(p.degree, p.uncached_tokens, p.cached_tokens) for p in found.points] == [c for row in grid for c in row]
    assert any(point.cached_tokens for point in found.points)
    for point in found.points:
        expected_s = COSTS.prefill_us(point.degree, point.uncached_tokens, point.cached_tokens) / 1e6
        assert point.seconds == pytest.approx([expected_s] * 2, abs=2e-6)


def test_a_length_that_would_pass_the_budget_is_left_out_with_those_after_it() -> None:
    """Each row is one degree-1 cell. With the warm-up it takes three prefills of about 0.13, 1.1 and 20 s."""
    grid = [[Cell(1, 1_000, 0)], [Cell(1, 8_000, 0)], [Cell(1, 64_000, 0)], [Cell(1, 65_000, 0)]]
    assert [len(measured(grid, budget_s).points) for budget_s in (0.1, 1, 2, 12, 1e6)] == [1, 1, 2, 2, 4]
    assert measured(grid, 2.0).left_out == (64_000, 65_000)
    assert measured(grid, 1e6).left_out == ()


def test_a_prefix_that_is_not_resident_is_an_error() -> None:
    async def work(node: Node, prefills: Prefills) -> None:
        await prefills.use(2)
        with pytest.raises(NotResident, match="holds 0 of a prefix of 4 blocks"):
            await prefills.prefill(10, 256)
        await prefills.keep(256)
        await prefills.prefill(10, 256)
        await prefills.use(1)
        with pytest.raises(NotResident, match="degree-1 worker holds 0"):
            await prefills.prefill(10, 256)

    on_a_node(work)


def test_memory_that_cannot_keep_the_prefix_is_an_error_and_not_a_slow_point() -> None:
    """Four blocks at degree 1: the second prefill needs what the prefix takes."""

    async def work(node: Node, prefills: Prefills) -> None:
        await prefills.use(1)
        await prefills.keep(192)
        await prefills.prefill(64, 0)
        await prefills.prefill(200, 0)
        with pytest.raises(NotResident):
            await prefills.prefill(10, 192)

    on_a_node(work, blocks_per_rank=4)


def test_what_is_measured_leaves_no_pins() -> None:
    async def work(node: Node, prefills: Prefills) -> None:
        await prefills.use(1)
        for _ in range(20):
            await prefills.prefill(250, 0)
        await asyncio.sleep(0)

    on_a_node(work, blocks_per_rank=4)


@pytest.mark.parametrize(
    ("degree", "ranks", "composition"), [(1, 2, (1, 1)), (2, 8, (2, 2, 2, 2)), (4, 7, (4, 2, 1)), (8, 8, (8,))]
)
def test_the_measured_worker_starts_at_rank_nought(degree: int, ranks: int, composition: tuple[int, ...]) -> None:
    assert composition_with(degree, ranks) == composition
    assert groups_of(composition)[0].degree == degree
