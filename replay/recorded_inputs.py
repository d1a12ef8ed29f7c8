"""A placement made again out of what it recorded of its candidates, without any state."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from services.router.placement import Able, Placement, choose
from services.router.pricing import Pricing, Waits, Ways, Weights
from services.router.roster import Roster
from shared.contracts.events import RequestAssigned
from shared.model.calibration import PPM
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import PlacementPolicy

WHENCE = {"in_flight_tokens", "fetched_tokens", "fetch_from"}
"""What a record says of a prefix that is no input of its price."""


def from_recorded_inputs(data: RequestAssigned, coefficients: Coefficients) -> RequestAssigned:
    """The same placement out of nothing but the inputs that it recorded.

    What depends on more than that is taken as recorded: the digest and, unless all candidates were recorded one by one, the
    preferred degree. Least work names no weights, and so its preferred degree cannot be had from it either.
    """
    if not data.candidates:
        return data
    prompt_tokens = data.uncached_tokens + data.cached_tokens
    placed = _placed_again(data, prompt_tokens, coefficients)
    winner = placed.winner
    again: dict[str, Any] = {
        "worker": winner.worker,
        "degree": winner.degree,
        "cached_tokens": winner.cached_tokens,
        "uncached_tokens": prompt_tokens - winner.cached_tokens,
        "service_us": winner.service_us,
        "queue_us": winner.queue_us,
        "ratio": winner.ratio,
        "fetch_from": winner.fetch_from,
        "candidates": placed.candidates,
    }
    if placed.price_digest == data.price_digest and placed.policy != "least-work":
        again["preferred_degree"] = placed.preferred_degree
    return data.model_copy(update=again)


def _placed_again(data: RequestAssigned, prompt_tokens: int, coefficients: Coefficients) -> Placement:
    """What was priced, priced again: each worker in the way that was cheapest there."""
    recorded = sorted(data.candidates, key=lambda each: each.worker)

    def column(values: Iterable[int]) -> Ints:
        return np.array([list(values)], dtype=np.int64)

    roster = Roster((each.worker, each.degree) for each in recorded)
    weights = Weights(cast(PlacementPolicy, data.policy), data.beta, data.lam)
    ways = Ways(
        ("own",),
        column(each.cached_tokens for each in recorded),
        column(each.fetch_us for each in recorded),
        column(round(each.ratio * PPM) for each in recorded)[0],
    )
    waits = Waits(column(each.queue_us for each in recorded), column(each.delayed_jobs for each in recorded))
    priced = Pricing(coefficients, prompt_tokens, weights, roster, roster.degrees[0]).of(ways, waits)
    placed = choose(Able(roster), priced, lambda worker: recorded[roster.rows[worker]].trust, runners_up=len(recorded))
    whence = {each.worker: each.model_dump(include=WHENCE) for each in recorded}
    return placed._replace(candidates=tuple(each.model_copy(update=whence[each.worker]) for each in placed.candidates))
