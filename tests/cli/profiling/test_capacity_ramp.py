"""Ramps on the modelled engine in virtual time, against a queue computed by its own recursion."""

import asyncio
from random import Random

import numpy as np
import pytest

from cli.profiling.load import Request, Shape, requests_for, service_us
from cli.profiling.node import Node, run_on_node
from cli.profiling.prefills import Prefills
from cli.profiling.ramp import SHARE_MAX, Goal, Ramp, Trial, ramp, trial
from services.worker.settings import WorkerSettings
from shared.model.cost import Coefficients, load_coefficients

COSTS = load_coefficients("qwen3_30b_a3b_h20")
SHAPES = [Shape(500, 0), Shape(4_000, 2_048), Shape(20_000, 0), Shape(30_000, 16_384)]
SETTINGS = WorkerSettings(engine="modelled", node="n", prefill_ranks=4, decode_ranks=0)


def load(degree: int, seconds: float = 60.0) -> list[Request]:
    return requests_for(SHAPES, COSTS, degree, seconds, Random(1))


def attained(requests: list[Request], degree: int, share: float) -> float:
    """Lindley: a request begins when it has arrived and the one before has ended."""
    service_s = [service_us(COSTS, degree, each.shape) / 1e6 for each in requests]
    stretch = sum(service_s) / share / requests[-1].arrival
    end_s, met = 0.0, 0
    for request, seconds in zip(requests, service_s, strict=True):
        end_s = max(end_s, request.arrival * stretch) + seconds
        if end_s - request.arrival * stretch <= COSTS.slo_us(request.shape.prompt_tokens) / 1e6:
            met += request.shape.prompt_tokens
    return met / sum(each.shape.prompt_tokens for each in requests)


def run_trial(degree: int, share: float, goal: Goal) -> Trial:
    async def work(node: Node) -> Trial:
        prefills = Prefills(node.engine, node.vocabulary, np.random.default_rng(1))
        await prefills.use(degree)
        await prefills.keep(16_384)
        return await trial(prefills, degree, load(degree), goal, node.clock, share)

    return run_on_node(SETTINGS, work)


def run_ramp(degree: int, goal: Goal) -> Ramp:
    async def work(node: Node) -> Ramp:
        prefills = Prefills(node.engine, node.vocabulary, np.random.default_rng(1))
        return await ramp(prefills, degree, load(degree), goal, node.clock, lambda *_: None)

    return run_on_node(SETTINGS, work)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 1.0])
def test_a_trial_attains_what_the_queue_says(share: float) -> None:
    """With a goal that nothing misses, so that no trial is cut short."""
    found = run_trial(2, share, Goal(COSTS, 1e-9, 1))
    assert found.attainment == pytest.approx(attained(load(2), 2, share), abs=1e-9)
    assert (found.carried, found.requests) == (True, len(load(2)))


def test_a_trial_is_cut_short_once_its_goal_is_out_of_reach() -> None:
    found = run_trial(1, SHARE_MAX, Goal(COSTS, 0.9, 1))
    assert not found.carried
    assert found.requests < len(load(1))
    assert found.attainment < 0.9


def test_a_goal_that_is_met_exactly_is_met() -> None:
    """Ten equal requests come at once, and the SLO lies between the ends of the ninth and of the tenth."""
    shape = Shape(4_000, 0)
    slo = Coefficients(version="slo", d=(9.5 * service_us(COSTS, 1, shape) / 1e6 - 0.5) / 3, a=0, b=0, c=0, alpha=0)

    async def work(node: Node) -> Trial:
        prefills = Prefills(node.engine, node.vocabulary, np.random.default_rng(1))
        await prefills.use(1)
        await prefills.keep(0)
        return await trial(prefills, 1, [Request(shape, 1.0)] * 10, Goal(slo, 0.9, 1), node.clock, 1.0)

    found = run_on_node(SETTINGS, work)
    assert (found.attainment, found.carried) == (0.9, True)


@pytest.mark.parametrize("degree", [1, 4])
def test_a_ramp_ends_between_what_was_carried_and_what_was_not(degree: int) -> None:
    found = run_ramp(degree, Goal(COSTS, 0.9, 5))
    failed = min(each.share for each in found.trials if not each.carried)
    assert failed - found.share == pytest.approx(SHARE_MAX / 2**5)
    assert attained(load(degree), degree, found.share) >= 0.9 > attained(load(degree), degree, failed)


def test_a_worker_that_misses_every_slo_carries_nothing() -> None:
    impossible = Coefficients(version="too-fast", d=0, a=0, b=0, c=1e-9, alpha=0)

    async def work(node: Node) -> Ramp:
        prefills = Prefills(node.engine, node.vocabulary, np.random.default_rng(1))
        requests = [Request(Shape(60_000, 0), 1.0), Request(Shape(60_000, 0), 2.0)]
        return await ramp(prefills, 1, requests, Goal(impossible, 0.9, 3), node.clock, lambda *_: None)

    found = run_on_node(SETTINGS, work)
    assert (found.share, [each.carried for each in found.trials]) == (0.0, [False] * 3)


def test_virtual_time_needs_none() -> None:
    """An hour of it; and an error of the work is the caller's."""

    async def work(node: Node) -> int:
        await node.clock.sleep(3_600)
        return node.clock.monotonic_ns()

    assert run_on_node(SETTINGS, work) >= 3_600 * 10**9

    async def failing(_: Node) -> None:
        await asyncio.sleep(0)
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        run_on_node(SETTINGS, failing)
