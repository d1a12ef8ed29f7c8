"""What a request costs at every worker, in every way to serve it there: J of `placement.py` and its parts, in columns.

Of the axes, K is the ways to serve the request, W the workers, and N those of them that are recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from services.router.roster import Roster
from shared.contracts.events import PricedCandidate, Trust
from shared.contracts.ids import WorkerId
from shared.model.calibration import PPM
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import PlacementPolicy

Kind = Literal["own", "in-flight", "fetched", "pending"]

READ: tuple[Kind, ...] = ("fetched", "pending")

_Candidates = tuple[PricedCandidate, ...]

CANDIDATES = TypeAdapter(_Candidates)
"""All of an event's in one call, which takes half the time of one call each."""


class Weights(NamedTuple):
    """What a policy multiplies by. Least work names none, so its preferred degree is by those of the parameters."""

    policy: PlacementPolicy
    beta: float
    lam: float


class Ways(NamedTuple):
    """How a request could be served at each worker, each way of one of the `kinds`. The first is with the worker's own blocks,
    and stands for those of the others that the worker has not. What is fetched is read from `fetch_from`, what is pending from
    the worker's own node. `ratio_ppm_W` is what the workers take for what is predicted, None where that is 1."""

    kinds: tuple[Kind, ...]
    cached_tokens_KW: Ints
    fetch_us_KW: Ints | None = None
    ratio_ppm_W: Ints | None = None
    fetch_from: WorkerId | None = None


class Services(NamedTuple):
    """s of each way, and what the smallest degree would take for it."""

    service_us_KW: Ints
    smallest_us_KW: Ints


class Waits(NamedTuple):
    """What is ahead of the request, and how many it delays if that counts."""

    queue_us_KW: Ints
    delayed_jobs_KW: Ints | None = None


class Pricing:
    """The prices of one prompt at the workers of a roster; `smallest` is C_min."""

    def __init__(
        self, coefficients: Coefficients, prompt_tokens: int, weights: Weights, roster: Roster, smallest: int
    ) -> None:
        self._coefficients = coefficients
        self._prompt_tokens = prompt_tokens
        self.weights = weights
        self.roster = roster
        self._smallest = smallest

    def services(self, ways: Ways) -> Services:
        """s: at least 1, for a reservation of nothing could not be told from none. The baseline of λ has the same ratio and
        the same fetch."""
        P = ways.cached_tokens_KW.astype(np.float64)
        degrees = self.roster.against(self._smallest)
        service_us = np.maximum(self._coefficients.prefills_us(degrees, self._prompt_tokens - P, P), 1)
        if ways.ratio_ppm_W is not None:
            whole_s, rest_us = np.divmod(service_us, PPM)  # a product of all of it might not fit
            service_us = np.maximum(whole_s * ways.ratio_ppm_W + rest_us * ways.ratio_ppm_W // PPM, 1)
        if ways.fetch_us_KW is not None:
            service_us += ways.fetch_us_KW
        return Services(*service_us)

    def of(self, ways: Ways, waits: Waits) -> "Priced":
        """Everything, where what is ahead does not depend on the service."""
        return Priced(self, ways, waits, self.prices(self.services(ways), waits))

    def prices(self, services: Services, waits: Waits) -> "Prices":
        """J and its parts."""
        by, degree_W = self.weights, self.roster.degree_W
        service_us, queue_us = services.service_us_KW, waits.queue_us_KW
        extra_us = by.lam * (degree_W * service_us - self._smallest * services.smallest_us_KW)
        occupancy_us = np.rint(extra_us).astype(np.int64)
        own_us = np.rint(by.beta * service_us).astype(np.int64) + occupancy_us
        if by.policy == "least-work":
            return Prices(queue_us, service_us, service_us, np.zeros_like(occupancy_us), own_us)
        price_us = queue_us + own_us
        if waits.delayed_jobs_KW is not None:
            price_us += waits.delayed_jobs_KW * service_us
        return Prices(price_us, queue_us, service_us, occupancy_us, own_us)


class Prices(NamedTuple):
    """J, what decides between equal ones, and the parts. `own_us_KW` is the price without queues."""

    price_us_KW: Ints
    tie_us_KW: Ints
    service_us_KW: Ints
    occupancy_us_KW: Ints
    own_us_KW: Ints


@dataclass(frozen=True, slots=True)
class Priced:
    """Everything about a request at every worker."""

    pricing: Pricing
    ways: Ways
    waits: Waits
    prices: Prices

    def candidates(self, rows: list[int], ways: list[int], trust: Callable[[WorkerId], Trust]) -> _Candidates:
        """These workers, each in its way, as they are recorded."""
        waits, prices, roster = self.waits, self.prices, self.pricing.roster
        row_N, way_N, nothing = np.array(rows), np.array(ways), [0] * len(rows)

        def of(column_KW: Ints | None) -> list[int]:
            """A column that is the same for all ways is there once."""
            if column_KW is None:
                return nothing
            found: list[int] = column_KW[way_N if len(column_KW) > 1 else 0, row_N].tolist()
            return found

        cached_tokens, own_tokens = of(self.ways.cached_tokens_KW), self.ways.cached_tokens_KW[0, row_N].tolist()
        parts = zip(
            rows, ways, cached_tokens, own_tokens, of(waits.queue_us_KW), of(prices.service_us_KW), of(prices.occupancy_us_KW),
            of(prices.price_us_KW), of(self.ways.fetch_us_KW), of(waits.delayed_jobs_KW), self._ratios(row_N), strict=True,
        )  # fmt: skip
        named = []
        for row, way, cached, own, queue_us, service_us, occupancy_us, price_us, fetch_us, delayed_jobs, ratio in parts:
            worker, kind = roster.workers[row], self.ways.kinds[way] if cached > own else "own"
            named.append(
                {
                    "worker": worker,
                    "degree": roster.degree_of[row],
                    "cached_tokens": cached,
                    "queue_us": queue_us,
                    "service_us": service_us,
                    "occupancy_us": occupancy_us,
                    "price_us": price_us,
                    "trust": trust(worker),
                    "in_flight_tokens": cached - own if kind == "in-flight" else 0,
                    "fetched_tokens": cached - own if kind in READ else 0,
                    "fetch_us": fetch_us,
                    "fetch_from": None if kind not in READ else worker if kind == "pending" else self.ways.fetch_from,
                    "delayed_jobs": delayed_jobs,
                    "delay_us": delayed_jobs * service_us,
                    "ratio": ratio,
                }
            )
        return CANDIDATES.validate_python(named)

    def _ratios(self, row_N: Ints) -> list[float]:
        ratio_ppm_W = self.ways.ratio_ppm_W
        return [1.0] * len(row_N) if ratio_ppm_W is None else [each / PPM for each in ratio_ppm_W[row_N].tolist()]


def service_us(coefficients: Coefficients, degree: int, prompt_tokens: int, cached_tokens: int, ratio_ppm: int) -> int:
    """s at one worker, as `Pricing.services` has it for all."""
    predicted_us = max(1, coefficients.prefill_us(degree, prompt_tokens - cached_tokens, cached_tokens))
    return max(1, predicted_us * ratio_ppm // PPM)
