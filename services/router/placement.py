"""The placement rule (paper, section 4.2): which worker serves a request, in whole microseconds.

    J_w = q_w + β·s_w + λ·(C_w·s_w - C_min·E_{C_min}(R_w, P_w))        s_w = E_{C_w}(R_w, P_w)

q_w is the work reserved at w, P_w the longest prefix w can reuse, R_w the rest of the prompt, C_min the smallest degree among
the eligible workers: λ prices extra GPU-seconds and is zero at C_min. The least J wins; ties go to the lower q, then to the
lower worker id. A prefix miss excludes nobody. Under the freeze switch (`least-work`) the price is q alone, ties by s.

Under `vertumnus` q_w is only what will be served before the request, P_w may be in flight or fetched, s_w has the worker's
measured ratio and the time of the fetch, and J_w besides s_w for each request that this one delays (`outlook.py`).

All workers are priced at once, in columns (`roster.py`). Of the axes, K is the ways to serve the request and W the workers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from services.router.roster import DIGEST_BYTES, REASONS, Bools, Members, Roster
from shared.contracts.events import Exclusion, PricedCandidate, Trust
from shared.contracts.ids import BlockId, WorkerId
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import PlacementPolicy

RUNNERS_UP = 4
"""Recorded candidates beyond the winner and the best of each degree."""

TOO_LONG, HUNG, FULL, REFUSED = map(REASONS.index, ("too-long", "hung", "full", "refused"))


Kind = Literal["own", "in-flight", "fetched", "pending"]

READ: tuple[Kind, ...] = ("fetched", "pending")

_Candidates = tuple[PricedCandidate, ...]

CANDIDATES = TypeAdapter(_Candidates)
"""All of an event's in one call, which takes half the time of one call each."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be placed. `refused_by` had the request before: they are asked again only when nobody else is left."""

    prompt_tokens: int
    chain: Sequence[BlockId]
    now_ns: int
    refused_by: Collection[WorkerId] = ()


class Weights(NamedTuple):
    """What a policy multiplies by. Least work names none, so its preferred degree is by those of the parameters."""

    policy: PlacementPolicy
    beta: float
    lam: float


class Able(NamedTuple):
    """The workers that may take a request: those in `rows_W` of the pool's roster, or all of it."""

    roster: Roster
    rows_W: Ints | None = None


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


class Placement(NamedTuple):
    """The outcome. `candidates` holds the winner first, then the best of every other degree, then the next four."""

    policy: str
    candidates: tuple[PricedCandidate, ...]
    preferred_degree: int
    price_digest: str
    beta: float
    lam: float
    load: float = 0.0

    @property
    def winner(self) -> PricedCandidate:
        return self.candidates[0]


def eligible(
    members: Members, hung_W: Bools | None, question: Question
) -> tuple[Able | None, dict[WorkerId, Exclusion]]:
    """The workers that may take the request, None without any, and why each of the others may not."""
    roster, tokens = members.roster, question.prompt_tokens
    if tokens <= members.free_tokens and hung_W is None and not question.refused_by:
        return Able(roster), {}
    bar_W = np.where(tokens > members.room_tokens_W, FULL, -1)
    bar_W = np.where(members.bar_W >= 0, members.bar_W, bar_W)
    if hung_W is not None:
        bar_W[hung_W] = HUNG
    bar_W[tokens > members.prompt_tokens_W] = TOO_LONG
    bar_W = np.where(members.node_bar_W >= 0, members.node_bar_W, bar_W)
    had = [row for each in question.refused_by if (row := roster.rows.get(each)) is not None and bar_W[row] < 0]
    if 0 < len(had) < np.count_nonzero(bar_W < 0):
        bar_W[had] = REFUSED
    excluded = {roster.workers[row]: REASONS[bar_W[row]] for row in np.flatnonzero(bar_W >= 0).tolist()}
    rows_W = np.flatnonzero(bar_W < 0)
    return (Able(roster.only(rows_W), rows_W) if len(rows_W) else None), excluded


def cached_tokens(members: Members, matched: Mapping[WorkerId, int], question: Question) -> Ints:
    """P of each worker, out of how many leading blocks of the chain it holds."""
    roster, cached = members.roster, np.zeros(len(members.roster.workers) + 1, dtype=np.int64)
    if members.spec is not None and matched:
        rows = np.fromiter(map(roster.rows.__getitem__, matched), dtype=np.intp, count=len(matched))
        cached[rows] = np.fromiter(matched.values(), dtype=np.int64, count=len(matched))
        usable = reusable_tokens(len(question.chain), members.spec.block_tokens, question.prompt_tokens)
        cached *= members.spec.block_tokens
        np.minimum(cached, usable, out=cached)
    return cached[:-1]


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


def choose(able: Able, priced: Priced, trust: Callable[[WorkerId], Trust], runners_up: int = RUNNERS_UP) -> Placement:
    """The placement. `runners_up` says how many more of the candidates it names."""
    weights, prices = priced.pricing.weights, priced.prices
    if len(prices.price_us_KW) > 1:
        way_W = prices.price_us_KW.argmin(axis=0)
        all_W = priced.pricing.roster.all_W
        price_us_W, own_us_W = prices.price_us_KW[way_W, all_W], prices.own_us_KW[way_W, all_W]
        tie_us_W = prices.tie_us_KW[way_W, all_W] if len(prices.tie_us_KW) > 1 else prices.tie_us_KW[0]
    else:
        way_W, price_us_W, own_us_W = None, prices.price_us_KW[0], prices.own_us_KW[0]
        tie_us_W = prices.tie_us_KW[0]
    if (rows_W := able.rows_W) is not None:
        price_us_W, tie_us_W, own_us_W = price_us_W[rows_W], tie_us_W[rows_W], own_us_W[rows_W]
    places = _reported(able.roster, np.lexsort((tie_us_W, price_us_W)), runners_up)
    rows = places if rows_W is None else rows_W[places].tolist()
    ways = [0] * len(rows) if way_W is None else way_W[rows].tolist()
    least_work = weights.policy == "least-work"
    return Placement(
        weights.policy,
        priced.candidates(rows, ways, trust),
        able.roster.preferred_degree(own_us_W),
        able.roster.digest(price_us_W.tolist()),
        0.0 if least_work else weights.beta,
        0.0 if least_work else weights.lam,
    )


def _reported(roster: Roster, order: Ints, runners_up: int) -> list[int]:
    """Out of all rows, the cheapest first: the winner, the best of every other degree, the next ones."""
    degree_W = roster.degree_W[order]
    leaders = sorted(int((degree_W == degree).argmax()) for degree in roster.degrees)
    next_ones = [place for place in range(min(len(order), runners_up + len(leaders))) if place not in leaders]
    rows: list[int] = order[[*leaders, *next_ones[:runners_up]]].tolist()
    return rows


def service_us(coefficients: Coefficients, degree: int, prompt_tokens: int, cached_tokens: int, ratio_ppm: int) -> int:
    """s at one worker, as `Pricing.services` has it for all."""
    predicted_us = max(1, coefficients.prefill_us(degree, prompt_tokens - cached_tokens, cached_tokens))
    return max(1, predicted_us * ratio_ppm // PPM)


def digest(prices: Iterable[tuple[WorkerId, int]]) -> str:
    """Covers every price, also those that are not recorded one by one."""
    lines = "\n".join(f"{worker} {price_us}" for worker, price_us in sorted(prices))
    return blake2b(lines.encode(), digest_size=DIGEST_BYTES).hexdigest()
