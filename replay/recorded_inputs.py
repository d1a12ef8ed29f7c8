"""A placement made again out of what it recorded of its candidates, without any state."""

from functools import lru_cache
from typing import Any, cast

import numpy as np

from services.router.board import Lines
from services.router.placement import Able, Placement, choose
from services.router.pricing import Option, Pricing, Ways, Weights, recorded_lines
from services.router.roster import Roster
from shared.contracts.events import PricedCandidate, RequestAssigned
from shared.contracts.ids import WorkerId
from shared.contracts.made import made
from shared.model.calibration import PPM
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import PlacementPolicy

NOTHING_W: Ints = np.zeros(0, dtype=np.int64)
INT64_MAX = 2**63 - 1
"""A ratio that is none, in a record that was changed, is made this one: the prices differ, and that is told."""

ROSTERS_KEPT_MAX = 1_000
"""Some kilobytes each."""

WHENCE = ("in_flight_tokens", "fetched_tokens", "fetch_from")
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
    if placed.prices.digest(data.digest_version) == data.price_digest and placed.policy != "least-work":
        again["preferred_degree"] = placed.preferred_degree
    return data if again.items() <= data.__dict__.items() else data.model_copy(update=again)


def _placed_again(data: RequestAssigned, prompt_tokens: int, coefficients: Coefficients) -> Placement:
    """What was priced, priced again."""
    recorded = sorted(data.candidates, key=lambda each: each.worker)
    roster, idle = _workers(tuple((each.worker, each.degree) for each in recorded))
    lines = recorded_lines(
        idle,
        (each.queue_us for each in recorded),
        (each.delayed_jobs for each in recorded),
        (min(round(each.ratio * PPM), INT64_MAX) for each in recorded),
    )
    weights = Weights(cast(PlacementPolicy, data.policy), data.beta, data.lam, data.ratio_in_own_time)
    pricing = Pricing(coefficients, prompt_tokens, weights, roster, roster.smallest, lines, data.now_ns, True, True)
    # Each in the way that it is recorded in, which was the cheapest there.
    options = [Option(row, each.cached_tokens, each.fetch_us) for row, each in enumerate(recorded)]
    ways = Ways(NOTHING_W, pending_OC=np.array(options, dtype=np.int64))
    able = Able(roster, roster.all_W)
    placed = choose(able, pricing.of(ways), lambda worker: recorded[roster.rows[worker]].trust, len(recorded))
    candidates = tuple(_from_where(each, recorded[roster.rows[each.worker]]) for each in placed.candidates)
    return placed._replace(candidates=candidates)


@lru_cache(ROSTERS_KEPT_MAX)
def _workers(listed: tuple[tuple[WorkerId, int], ...]) -> tuple[Roster, Lines]:
    """These workers with nothing to do: most placements of a record have the candidates of an earlier one."""
    roster = Roster(listed)
    return roster, Lines.empty(roster)


def _from_where(placed: PricedCandidate, recorded: PricedCandidate) -> PricedCandidate:
    """With what is recorded of where its prefix comes from; what was recorded itself, if that is the same."""
    again = placed.__dict__ | {name: getattr(recorded, name) for name in WHENCE}
    same = again == recorded.__dict__ and not recorded.model_extra
    return recorded if same else made(PricedCandidate, again)
