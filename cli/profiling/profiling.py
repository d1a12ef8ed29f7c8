"""From an order to a profile: start the engine, lay the grid, measure, write down what it was."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cli.profiling.document import Profile
from cli.profiling.grid import Cell, Limits, default_lengths, rows
from cli.profiling.measuring import Measured, Plan, measure
from cli.profiling.node import Node, circumstances, run_on_node
from cli.profiling.prefills import Prefills
from services.worker.settings import WorkerSettings
from shared.runtime.clock import SystemClock


class Order(NamedTuple):
    """What `vertumnus profile` was asked for. `lengths` None takes those that suit the model."""

    settings: WorkerSettings
    degrees: tuple[int, ...]
    lengths: tuple[int, ...] | None
    hit_ratios: tuple[float, ...]
    warmups: int
    repeats: int
    budget_s: float
    seed: int


def profiled(order: Order, told: Callable[[Cell, int], None]) -> tuple[Profile, Measured]:
    """`told` hears of each cell that is done, and how many there are.

    Errors: ValueError for a grid out of bounds; EngineError; NotResident.
    """

    async def work(node: Node) -> tuple[Profile, Measured]:
        plan = Plan(_grid(node.limits, order), order.warmups, order.repeats, order.budget_s)
        points = sum(map(len, plan.rows))
        prefills = Prefills(node.engine, node.vocabulary, np.random.default_rng(order.seed))
        measured = await measure(prefills, plan, SystemClock(), lambda cell: told(cell, points))
        return _profile(node, order, measured), measured

    return run_on_node(order.settings, work, lambda limits: _grid(limits, order))


def _grid(limits: Limits, order: Order) -> list[list[Cell]]:
    lengths = order.lengths or default_lengths(limits, order.degrees)
    return rows(limits, order.degrees, lengths, order.hit_ratios)


def _profile(node: Node, order: Order, measured: Measured) -> Profile:
    described = node.engine.describe()
    return Profile(
        **circumstances(node).model_dump(),
        dtype=described.dtype,
        block_tokens=described.block_tokens,
        degrees=order.degrees,
        warmups=order.warmups,
        points=measured.points,
    )
