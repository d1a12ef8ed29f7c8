"""What a request costs at every worker, in the cheapest way to serve it there: J of `placement.py` and its parts.

The sums are done in `loops.py`; here is what they are made of, and the few candidates that are recorded.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from services.router import loops
from services.router.board import Lines
from services.router.loops import FETCHED, IN_FLIGHT, PENDING
from services.router.roster import Bools, Roster
from shared.contracts.events import PricedCandidate, Trust
from shared.contracts.ids import WorkerId
from shared.contracts.made import made
from shared.model.calibration import PPM
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import PlacementPolicy

READ = (FETCHED, PENDING)


class Weights(NamedTuple):
    """What a policy multiplies by. Least work names none, so its preferred degree is by those of the parameters.
    `ratio_in_own_time`: a worker's measured over predicted time is no part of what a request is multiplied by for others."""

    policy: PlacementPolicy
    beta: float
    lam: float
    ratio_in_own_time: bool = False


class Option(NamedTuple):
    """More than one worker's own blocks: the prompt has `tokens` there, which takes `fetch_us`, and is not served before one of
    `behind_us` of work."""

    row: int
    tokens: int
    fetch_us: int = 0
    behind_us: int = 0


NO_OPTIONS: Ints = np.zeros((0, len(Option._fields)), dtype=np.int64)


class Fetch(NamedTuple):
    """What workers could read from another one: `tokens` from `source`, those in `fetches_W` could. `reads_2D` has, by how many
    they have themselves, in rising order, how long the rest takes."""

    source: WorkerId | None
    tokens: int
    fetches_W: Bools
    reads_2D: Ints


NO_FETCH = Fetch(None, 0, np.zeros(0, dtype=np.bool_), np.zeros((2, 0), dtype=np.int64))


class Ways(NamedTuple):
    """How a request could be served at each worker: with the worker's own blocks, `cached_W` tokens of them, or with more."""

    cached_W: Ints
    in_flight_OC: Ints = NO_OPTIONS
    fetch: Fetch = NO_FETCH
    pending_OC: Ints = NO_OPTIONS


class Pricing(NamedTuple):
    """What the prices of one prompt are made of besides; `smallest` is C_min. `ordered`: only what will be served before the
    request is waited for, and whom it delays is charged. `calibrated`: a worker's measured over predicted time counts."""

    coefficients: Coefficients
    prompt_tokens: int
    weights: Weights
    roster: Roster
    smallest: int
    lines: Lines
    now_ns: int
    ordered: bool = False
    calibrated: bool = False

    def of(self, ways: Ways) -> "Priced":
        """The prompt at every worker, in the cheapest of the ways."""
        by, fetch = self.weights, ways.fetch
        cost_CW = loops.costs(
            self.coefficients.numbers, self.prompt_tokens, self.smallest, by.beta, by.lam, by.policy == "least-work",
            self.ordered, self.calibrated, by.ratio_in_own_time, self.now_ns, *self.lines,
            ways.cached_W, ways.in_flight_OC, fetch.tokens, fetch.fetches_W, fetch.reads_2D, ways.pending_OC,
        )  # fmt: skip
        return Priced(by, self.roster, cost_CW, fetch.source)


class Priced(NamedTuple):
    """A request at every worker, in its cheapest way there. What is fetched is read from `source`."""

    weights: Weights
    roster: Roster
    cost_CW: Ints
    source: WorkerId | None

    def candidates(self, told_TC: Ints, trust: Callable[[WorkerId], Trust]) -> tuple[PricedCandidate, ...]:
        """What these cost, as it is recorded."""
        roster, found = self.roster, []
        for cost in told_TC.tolist():
            (
                row, kind, own_tokens, cached_tokens, fetch_us, queue_us, jobs, ratio_ppm,
                service_us, occupancy_us, _, price_us, _,
            ) = cost  # fmt: skip
            worker = roster.workers[row]
            fields = {
                "worker": worker,
                "degree": roster.degree_of[row],
                "cached_tokens": cached_tokens,
                "queue_us": queue_us,
                "service_us": service_us,
                "occupancy_us": occupancy_us,
                "price_us": price_us,
                "trust": trust(worker),
                "in_flight_tokens": cached_tokens - own_tokens if kind == IN_FLIGHT else 0,
                "fetched_tokens": cached_tokens - own_tokens if kind in READ else 0,
                "fetch_us": fetch_us,
                "fetch_from": self.source if kind == FETCHED else worker if kind == PENDING else None,
                "delayed_jobs": jobs,
                "delay_us": jobs * service_us,
                "ratio": ratio_ppm / PPM,
            }
            found.append(made(PricedCandidate, fields))
        return tuple(found)


def recorded_lines(
    idle: Lines, queue_us: Iterable[int], delayed_jobs: Iterable[int], ratio_ppm: Iterable[int]
) -> Lines:
    """Of workers of which is known, in the order of their rows, what is ahead of a request and how many it delays: as if those
    before it had waited too long, and none of the others did less work. `idle`: of the same workers with nothing to do."""
    line_CW = idle.line_CW.copy()
    for column, values in ((loops.LATE_US, queue_us), (loops.WAITING, delayed_jobs), (loops.RATIO_PPM, ratio_ppm)):
        line_CW[column] = [*values]
    return idle._replace(line_CW=line_CW)


def service_us(coefficients: Coefficients, degree: int, prompt_tokens: int, cached_tokens: int, ratio_ppm: int) -> int:
    """s at one worker, as `loops.service_us` has it."""
    predicted_us = max(1, coefficients.prefill_us(degree, prompt_tokens - cached_tokens, cached_tokens))
    return max(1, predicted_us * ratio_ppm // PPM)
