"""The placement rule (paper, section 4.2): which worker serves a request, in whole microseconds.

    J_w = q_w + β·s_w + λ·(C_w·s_w - C_min·E_{C_min}(R_w, P_w))        s_w = E_{C_w}(R_w, P_w)

q_w is the work reserved at w, P_w the longest prefix w can reuse, R_w the rest of the prompt, C_min the smallest degree among
the eligible workers: λ prices extra GPU-seconds and is zero at C_min. The least J wins; ties go to the lower q, then to the
lower worker id. A prefix miss excludes nobody. Under the freeze switch (`least-work`) the price is q alone, ties by s.

Under `vertumnus` q_w is only what will be served before the request, P_w may be in flight or fetched, s_w has the worker's
measured ratio and the time of the fetch, and J_w besides s_w for each request that this one delays (`outlook.py`).

All workers are priced at once, in columns (`roster.py`, `board.py`, `loops.py`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from services.router import loops
from services.router.open_requests import OpenRequest
from services.router.pricing import Priced
from services.router.roster import DIGEST_VERSION, REASONS, Bools, Members, Roster
from shared.contracts.events import Exclusion, PricedCandidate, Trust
from shared.contracts.ids import BlockId, NodeId, WorkerId
from shared.model.blocks import reusable_tokens
from shared.model.cost import Ints

RUNNERS_UP = 4
"""Recorded candidates beyond the winner and the best of each degree."""

TOO_LONG, HUNG, FULL, REFUSED, SILENT = map(REASONS.index, ("too-long", "hung", "full", "refused", "silent"))


class Question(NamedTuple):
    """What is to be placed. `refused_by` had the request before: they are asked again only when nobody else is left, and nodes
    in `silent`, whose agents did not answer, only when not even those are. Whoever is predicted to need longer than `within_us`
    is left out, and under `idle_only` whoever has something to do."""

    prompt_tokens: int
    chain: Sequence[BlockId]
    now_ns: int
    refused_by: Collection[WorkerId] = ()
    within_us: int | None = None
    idle_only: bool = False
    silent: Collection[NodeId] = ()

    @classmethod
    def again(cls, opened: OpenRequest, chain: Sequence[BlockId], generated_tokens: int, now_ns: int) -> "Question":
        """That of an open request without a worker, whose prompt now ends with what was generated."""
        prompt_tokens = opened.prompt_tokens + generated_tokens
        return cls(prompt_tokens, chain, now_ns, opened.refused_by, silent=tuple(opened.silent))


class Able(NamedTuple):
    """The workers that may take a request: those in `rows_W` of the pool's roster."""

    roster: Roster
    rows_W: Ints


class Prices(NamedTuple):
    """All of them, of the workers of a roster."""

    roster: Roster
    price_us_W: Ints

    def digest(self, version: int = DIGEST_VERSION) -> str:
        """What stands for them in the record (`RequestAssigned.digest_version`)."""
        return self.roster.digest(self.price_us_W, version)


class Placement(NamedTuple):
    """The outcome. `candidates` holds the winner first, then the best of every other degree, then the next four."""

    policy: str
    candidates: tuple[PricedCandidate, ...]
    preferred_degree: int
    prices: Prices
    beta: float
    lam: float
    load: float = 0.0
    ratio_in_own_time: bool = False

    @property
    def winner(self) -> PricedCandidate:
        return self.candidates[0]


def eligible(
    members: Members, hung_W: Bools | None, question: Question
) -> tuple[Able | None, dict[WorkerId, Exclusion]]:
    """The workers that may take the request, None without any, and why each of the others may not."""
    roster, tokens = members.roster, question.prompt_tokens
    if tokens <= members.free_tokens and hung_W is None and not (question.refused_by or question.silent):
        return Able(roster, roster.all_W), {}
    bar_W = np.where(tokens > members.room_tokens_W, FULL, -1)
    bar_W = np.where(members.bar_W >= 0, members.bar_W, bar_W)
    if hung_W is not None:
        bar_W[hung_W] = HUNG
    bar_W[tokens > members.prompt_tokens_W] = TOO_LONG
    bar_W = np.where(members.node_bar_W >= 0, members.node_bar_W, bar_W)
    silent = [row for each in question.silent for row in members.rows_of.get(each, ())]
    had = [row for each in question.refused_by if (row := roster.rows.get(each)) is not None]
    for avoided, reason in ((silent, SILENT), (had, REFUSED)):
        rows = [row for row in avoided if bar_W[row] < 0]
        if 0 < len(rows) < np.count_nonzero(bar_W < 0):
            bar_W[rows] = reason
    excluded = {roster.workers[row]: REASONS[bar_W[row]] for row in np.flatnonzero(bar_W >= 0).tolist()}
    rows_W = np.flatnonzero(bar_W < 0)
    return (Able(roster.only(rows_W), rows_W) if len(rows_W) else None), excluded


def cached_tokens(members: Members, matched: Mapping[WorkerId, int], question: Question) -> Ints:
    """P of each worker, out of how many leading blocks of the chain it holds."""
    roster, spec = members.roster, members.spec
    if spec is None or not matched:
        return np.zeros(len(roster.workers), dtype=np.int64)
    row_H = np.fromiter(map(roster.rows.__getitem__, matched), dtype=np.int64, count=len(matched))
    blocks_H = np.fromiter(matched.values(), dtype=np.int64, count=len(matched))
    usable = reusable_tokens(len(question.chain), spec.block_tokens, question.prompt_tokens)
    return loops.cached(row_H, blocks_H, spec.block_tokens, usable, len(roster.workers))


def choose(
    able: Able, priced: Priced, trust: Callable[[WorkerId], Trust], runners_up: int = RUNNERS_UP, load: float = 0.0
) -> Placement:
    """The placement. `runners_up` says how many more of the candidates it names, and it was priced at this load."""
    weights, roster, price_us_W = priced.weights, priced.roster, priced.cost_CW[loops.PRICE_US]
    told_TC, preferred_degree = loops.ranked(priced.cost_CW, roster.degree_W, able.rows_W, runners_up)
    least_work = weights.policy == "least-work"
    return Placement(
        weights.policy,
        priced.candidates(told_TC, trust),
        preferred_degree,
        Prices(able.roster, price_us_W if able.roster is roster else price_us_W[able.rows_W]),
        0.0 if least_work else weights.beta,
        0.0 if least_work else weights.lam,
        load,
        weights.ratio_in_own_time,
    )


def digest(prices: Iterable[tuple[WorkerId, int]], version: int) -> str:
    """Covers every price, also those that are not recorded one by one."""
    workers, prices_us = zip(*sorted(prices), strict=True)
    return Prices(Roster((worker, 1) for worker in workers), np.array(prices_us, dtype=np.int64)).digest(version)
