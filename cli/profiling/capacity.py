"""From an order to profiled capacities: start the engine, ramp the load at each degree, write down what it carried."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, NamedTuple

import numpy as np

from cli.profiling.document import Circumstances
from cli.profiling.grid import Limits, check_degrees
from cli.profiling.load import Request, Shape, requests_for, shapes
from cli.profiling.node import Node, circumstances, run_on_node
from cli.profiling.prefills import Prefills
from cli.profiling.ramp import Goal, Ramp, Trial, ramp
from services.worker.settings import WorkerSettings
from simulation.workloads.rows import Row

CAPACITY_VERSION = 1


class Order(NamedTuple):
    """What `vertumnus capacity` was asked for. A trial lasts as long as `windows` × `window_s` seconds of service take."""

    settings: WorkerSettings
    degrees: tuple[int, ...]
    rows: Sequence[Row]
    source: str
    """The trace's name, for the record."""
    goal: Goal
    window_s: float
    windows: int
    seed: int


class CapacityEvidence(Circumstances):
    """How the shares of a set were measured; services pass over it."""

    kind: Literal["vertumnus-capacity"] = "vertumnus-capacity"
    version: int = CAPACITY_VERSION
    coefficients_version: str
    window_s: float
    windows: int
    attainment: float
    trace: str
    seed: int
    prompt_tokens_mean: float
    hit_rate: float
    ramps: tuple[Ramp, ...]


def measured(order: Order, told: Callable[[int, Trial], None]) -> CapacityEvidence:
    """`told` hears of each trial. Errors: ValueError for a trace without prompts that fit; EngineError; NotResident."""

    async def work(node: Node) -> CapacityEvidence:
        known = _shapes(node.limits, order)
        prefills = Prefills(node.engine, node.vocabulary, np.random.default_rng(order.seed))
        ramps = []
        for degree in order.degrees:
            requests = _requests(order, known, degree)
            ramps.append(await ramp(prefills, degree, requests, order.goal, node.clock, told))
        return _evidence(node, order, known, tuple(ramps))

    def foreseen(limits: Limits) -> None:
        for degree in order.degrees:
            _requests(order, _shapes(limits, order), degree)

    return run_on_node(order.settings, work, foreseen)


def _shapes(limits: Limits, order: Order) -> list[Shape]:
    check_degrees(limits, order.degrees)
    # Half the memory of the smallest worker is the prefix's, and the other half the prompt's that runs.
    longest = limits.prompt_tokens(min(order.degrees)) // 2
    return shapes(order.rows, longest, limits.block_tokens)


def _requests(order: Order, known: Sequence[Shape], degree: int) -> list[Request]:
    seconds = order.windows * order.window_s
    return requests_for(known, order.goal.coefficients, degree, seconds, Random(f"{order.seed} {degree}"))


def _evidence(node: Node, order: Order, known: Sequence[Shape], ramps: tuple[Ramp, ...]) -> CapacityEvidence:
    tokens = sum(shape.prompt_tokens for shape in known)
    return CapacityEvidence(
        **circumstances(node).model_dump(),
        coefficients_version=order.goal.coefficients.version,
        window_s=order.window_s,
        windows=order.windows,
        attainment=order.goal.attainment,
        trace=order.source,
        seed=order.seed,
        prompt_tokens_mean=round(tokens / len(known), 1),
        hit_rate=round(sum(shape.cached_tokens for shape in known) / tokens, 4),
        ramps=ramps,
    )
