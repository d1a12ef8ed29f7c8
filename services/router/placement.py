"""The placement rule (paper, section 4.2): which worker serves a request, in whole microseconds.

    J_w = q_w + β·s_w + λ·(C_w·s_w - C_min·E_{C_min}(R_w, P_w))        s_w = E_{C_w}(R_w, P_w)

q_w is the work reserved at w, P_w the longest prefix w can reuse, R_w the rest of the prompt, C_min the smallest degree among
the eligible workers: λ prices extra GPU-seconds and is zero at C_min. The least J wins; ties go to the lower q, then to the
lower worker id. A prefix miss excludes nobody. Under the freeze switch (`least-work`) the price is q alone, ties by s.

Under `vertumnus` q_w is only what will be served before the request, P_w may be in flight or fetched, s_w has the worker's
measured ratio and the time of the fetch, and J_w besides s_w for each request that this one delays (`outlook.py`).

All workers are priced at once, in columns (`roster.py`, `pricing.py`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from services.router.pricing import Priced
from services.router.roster import DIGEST_BYTES, REASONS, Bools, Members, Roster
from shared.contracts.events import Exclusion, PricedCandidate, Trust
from shared.contracts.ids import BlockId, WorkerId
from shared.model.blocks import reusable_tokens
from shared.model.cost import Ints

RUNNERS_UP = 4
"""Recorded candidates beyond the winner and the best of each degree."""

TOO_LONG, HUNG, FULL, REFUSED = map(REASONS.index, ("too-long", "hung", "full", "refused"))


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be placed. `refused_by` had the request before: they are asked again only when nobody else is left. Whoever
    is predicted to need longer than `within_us` is left out, and under `idle_only` whoever has something to do."""

    prompt_tokens: int
    chain: Sequence[BlockId]
    now_ns: int
    refused_by: Collection[WorkerId] = ()
    within_us: int | None = None
    idle_only: bool = False


class Able(NamedTuple):
    """The workers that may take a request: those in `rows_W` of the pool's roster, or all of it."""

    roster: Roster
    rows_W: Ints | None = None


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


def digest(prices: Iterable[tuple[WorkerId, int]]) -> str:
    """Covers every price, also those that are not recorded one by one."""
    lines = "\n".join(f"{worker} {price_us}" for worker, price_us in sorted(prices))
    return blake2b(lines.encode(), digest_size=DIGEST_BYTES).hexdigest()
