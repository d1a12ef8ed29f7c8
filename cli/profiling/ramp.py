"""κ_C by trial: the largest window demand at which one degree-C worker still attains its SLO (paper, section 4.3).

Each trial sends the same requests in the same pattern at another rate, first come first served, to a worker that starts
idle. Demand D = Σ E_C(R, P) over a window; attainment is weighted by prompt tokens, as windows weigh it. Bisection over the
rate ends between a demand that was carried and one that was not. TTFT is from arrival to the end of the prefill.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cli.profiling.load import Request, service_us
from cli.profiling.prefills import Prefills
from shared.model.cost import US_PER_S, Coefficients
from shared.runtime.clock import Clock

SHARE_MAX = 2.0
"""No worker carries twice a window's length in predicted seconds, unless its coefficients are twice too slow."""


class Goal(NamedTuple):
    """What a worker has to attain, and by whose prediction demand is counted. `steps` halve the range of shares."""

    coefficients: Coefficients
    attainment: float
    steps: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate. `share` is its D / H; a trial that could not attain its goal any more was cut short, and its attainment is
    what it could at best have come to."""

    share: float
    requests_per_s: float
    requests: int
    attainment: float
    carried: bool


@dataclass(frozen=True, slots=True)
class Ramp:
    """All trials of one degree. `share` is κ_C / H: 0 if even the slowest trial missed the goal."""

    degree: int
    share: float
    trials: tuple[Trial, ...]


async def ramp(
    prefills: Prefills,
    degree: int,
    requests: Sequence[Request],
    goal: Goal,
    clock: Clock,
    told: Callable[[int, Trial], None],
) -> Ramp:
    """`told` hears of each trial. Errors: those of `Prefills`."""
    await prefills.use(degree)
    await prefills.keep(max(request.shape.cached_tokens for request in requests))
    await prefills.prefill(requests[0].shape.uncached_tokens, requests[0].shape.cached_tokens)  # warm, not counted
    low, high = 0.0, SHARE_MAX
    trials = []
    for _ in range(goal.steps):
        found = await trial(prefills, degree, requests, goal, clock, (low + high) / 2)
        trials.append(found)
        told(degree, found)
        low, high = (found.share, high) if found.carried else (low, found.share)
    return Ramp(degree, low, tuple(trials))


async def trial(
    prefills: Prefills, degree: int, requests: Sequence[Request], goal: Goal, clock: Clock, share: float
) -> Trial:
    """The requests at the rate at which their demand is `share` of the time in which they arrive."""
    demand_s = sum(service_us(goal.coefficients, degree, each.shape) for each in requests) / US_PER_S
    stretch = demand_s / share / requests[-1].arrival
    tokens = sum(request.shape.prompt_tokens for request in requests)
    missed = 0
    began_ns = clock.monotonic_ns()
    for number, request in enumerate(requests, 1):
        arrival_ns = began_ns + round(request.arrival * stretch * 1e9)
        if (early_ns := arrival_ns - clock.monotonic_ns()) > 0:
            await clock.sleep(early_ns / 1e9)
        await prefills.prefill(request.shape.uncached_tokens, request.shape.cached_tokens)
        ttft_us = (clock.monotonic_ns() - arrival_ns) // 1_000
        if ttft_us > goal.coefficients.slo_us(request.shape.prompt_tokens):
            missed += request.shape.prompt_tokens
        if 1 - missed / tokens < goal.attainment:
            return Trial(share, 1 / stretch, number, 1 - missed / tokens, carried=False)
    return Trial(share, 1 / stretch, len(requests), 1 - missed / tokens, carried=True)
