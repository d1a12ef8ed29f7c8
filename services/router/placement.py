"""The placement rule (paper, section 4.2): which worker serves a request, in whole microseconds.

    J_w = q_w + β·s_w + λ·(C_w·s_w - C_min·E_{C_min}(R_w, P_w))        s_w = E_{C_w}(R_w, P_w)

q_w is the work reserved at w, P_w the longest prefix w can reuse, R_w the rest of the prompt, C_min the smallest degree among
the eligible workers: λ prices extra GPU-seconds and is zero at C_min. The least J wins; ties go to the lower q, then to the
lower worker id. A prefix miss excludes nobody. Under the freeze switch (`least-work`) the price is q alone, ties by s.

Under `vertumnus` q_w is only what will be served before the request, P_w may be in flight or fetched, s_w has the worker's
measured ratio and the time of the fetch, and J_w besides s_w for each request that this one delays (`outlook.py`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from typing import NamedTuple

from services.router.loads import Loads
from shared.contracts.events import Exclusion, NodeRegistered, PricedCandidate, Trust
from shared.contracts.ids import BlockId, WorkerId
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM
from shared.model.cost import Coefficients
from shared.model.holders import Holders
from shared.model.lattice import DEGREES
from shared.model.parameters import PlacementPolicy
from shared.model.pool import Node, Pool

RUNNERS_UP = 4
"""Recorded candidates beyond the winner and the best of each degree."""

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be placed. `refused_by` had the request before: they are asked again only when nobody else is left."""

    prompt_tokens: int
    chain: Sequence[BlockId]
    now_ns: int
    refused_by: Collection[WorkerId] = ()


class Candidate(NamedTuple):
    """One eligible worker, before it has a price. Of the cached tokens some may be in flight there, or fetched first; the
    ratio is what the worker takes for what is predicted, in millionths."""

    worker: WorkerId
    degree: int
    cached_tokens: int
    queue_us: int
    trust: Trust
    in_flight_tokens: int = 0
    fetched_tokens: int = 0
    fetch_us: int = 0
    fetch_from: WorkerId | None = None
    delayed_jobs: int = 0
    ratio_ppm: int = PPM


class Weights(NamedTuple):
    """What a policy multiplies by. Least work names none, so its preferred degree is by those of the parameters."""

    policy: PlacementPolicy
    beta: float
    lam: float


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


class Price(NamedTuple):
    """Sorts as candidates are preferred. `own_us` is the price without queues."""

    price_us: int
    tie_us: int
    worker: WorkerId
    service_us: int
    occupancy_us: int
    own_us: int
    of: Candidate


def serving(pool: Pool) -> NodeRegistered | None:
    """What the pool serves: the registration of its first living node. A node that serves something else gets no work."""
    alive = [node for node in pool.nodes.values() if node.alive and node.spec is not None]
    return min(alive, key=lambda node: node.id).spec if alive else None


def eligible(
    pool: Pool, holders: Holders, loads: Loads, question: Question
) -> tuple[list[Candidate], dict[WorkerId, Exclusion]]:
    """The workers that may take the request, and why each of the others may not."""
    excluded: dict[WorkerId, Exclusion] = {}
    spec = serving(pool)
    able: list[Candidate] = []
    of_worker, known, matched = loads.of_worker, holders.workers, holders.matched(question.chain)
    block_tokens = spec.block_tokens if spec else 1
    usable = reusable_tokens(len(question.chain), block_tokens, question.prompt_tokens) // block_tokens
    for node in pool.nodes.values():
        if (reason := _node_excluded(node, spec, question)) is not None:
            excluded.update((worker.id, reason) for worker in node.workers)
            continue
        room = _room(node.spec)
        is_adopted = set(node.adopted.values()) == {node.epoch}
        for worker in node.workers:
            name, degree = worker.id, worker.group.degree
            queue_us, hung = load.at(question.now_ns) if (load := of_worker.get(name)) is not None else (0, False)
            if hung:
                excluded[name] = "hung"
            elif name in node.draining:
                excluded[name] = "draining"
            elif not is_adopted and not node.has_adopted(worker):
                excluded[name] = "stale-epoch"
            elif question.prompt_tokens > room[degree]:
                excluded[name] = "full"
            else:
                cached_tokens = min(matched.get(name, 0), usable) * block_tokens
                trust = held.trust if (held := known.get(name)) is not None else "blind"
                able.append(Candidate(name, degree, cached_tokens, queue_us, trust))
    if question.refused_by and (fresh := [each for each in able if each.worker not in question.refused_by]):
        excluded.update((each.worker, "refused") for each in able if each.worker in question.refused_by)
        return fresh, excluded
    return able, excluded


def choose(
    candidates: Iterable[Candidate],
    prompt_tokens: int,
    coefficients: Coefficients,
    weights: Weights,
    runners_up: int = RUNNERS_UP,
) -> Placement | None:
    """The placement, or None without a candidate. `runners_up` says how many more of the candidates it names."""
    candidates = list(candidates)
    if not candidates:
        return None
    pricing = Pricing(coefficients, prompt_tokens, weights, min(each.degree for each in candidates))
    prices = [pricing.of(each) for each in candidates]
    least_work = weights.policy == "least-work"
    return Placement(
        weights.policy,
        tuple(_priced(each) for each in _reported(prices, runners_up)),
        min((each.own_us, each.of.degree) for each in prices)[1],
        digest((each.worker, each.price_us) for each in prices),
        0.0 if least_work else weights.beta,
        0.0 if least_work else weights.lam,
    )


class Pricing:
    """The prices of one prompt. Most workers share a degree and hold nothing, so most of the answers repeat."""

    def __init__(self, coefficients: Coefficients, prompt_tokens: int, weights: Weights, smallest_degree: int) -> None:
        self._coefficients = coefficients
        self._prompt_tokens = prompt_tokens
        self._weights = weights
        self._smallest = smallest_degree
        self._predicted: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}

    def service_us(self, degree: int, cached_tokens: int, ratio_ppm: int, fetch_us: int) -> int:
        """s: at least 1, for a reservation of nothing could not be told from none."""
        predicted = self._predicted.get((degree, cached_tokens))
        if predicted is None:
            uncached_tokens = self._prompt_tokens - cached_tokens
            predicted = max(1, self._coefficients.prefill_us(degree, uncached_tokens, cached_tokens))
            self._predicted[degree, cached_tokens] = predicted
        return predicted + fetch_us if ratio_ppm == PPM else max(1, predicted * ratio_ppm // PPM) + fetch_us

    def of(self, each: Candidate) -> Price:
        """J and its parts."""
        key = each.degree, each.cached_tokens, each.ratio_ppm, each.fetch_us
        if (parts := self._parts.get(key)) is None:
            parts = self._parts[key] = self._own(*key)
        service_us, occupancy_us, own_us = parts
        if self._weights.policy == "least-work":
            return Price(each.queue_us, service_us, each.worker, service_us, 0, own_us, each)
        price_us = each.queue_us + each.delayed_jobs * service_us + own_us
        return Price(price_us, each.queue_us, each.worker, service_us, occupancy_us, own_us, each)

    def _own(self, degree: int, cached_tokens: int, ratio_ppm: int, fetch_us: int) -> tuple[int, int, int]:
        """s, the price of extra GPUs, and J without queues. The baseline of λ has the same ratio and fetch."""
        service_us = self.service_us(degree, cached_tokens, ratio_ppm, fetch_us)
        smallest_us = self.service_us(self._smallest, cached_tokens, ratio_ppm, fetch_us)
        occupancy_us = round(self._weights.lam * (degree * service_us - self._smallest * smallest_us))
        return service_us, occupancy_us, round(self._weights.beta * service_us) + occupancy_us


def _node_excluded(node: Node, spec: NodeRegistered | None, question: Question) -> Exclusion | None:
    """Why no worker of this node can take the request."""
    if not node.alive or node.spec is None or spec is None or not _serves_the_same(node.spec, spec):
        return "not-schedulable"
    if node.cordoned:
        return "cordoned"
    return "too-long" if question.prompt_tokens > node.spec.prompt_tokens_max else None


def _room(spec: NodeRegistered | None) -> dict[int, int]:
    """The longest prompt whose blocks fit on a worker of each degree, in tokens."""
    assert spec is not None, "an able node is registered"
    rank_tokens = spec.blocks_per_rank * spec.block_tokens
    return {degree: rank_tokens * (degree if spec.kv_layout == "cyclic" else 1) for degree in DEGREES}


def _serves_the_same(one: NodeRegistered, other: NodeRegistered) -> bool:
    return one is other or (
        (one.model, one.model_revision, one.tokenizer_revision, one.block_tokens)
        == (other.model, other.model_revision, other.tokenizer_revision, other.block_tokens)
    )


def _reported(prices: list[Price], runners_up: int) -> list[Price]:
    """The winner, the best of every other degree, the next ones."""
    best: dict[int, Price] = {}
    for each in prices:
        if each.of.degree not in best or each < best[each.of.degree]:
            best[each.of.degree] = each
    leaders = sorted(best.values())
    named = {each.worker for each in leaders}
    next_ones = nsmallest(runners_up + len(leaders), prices)
    return leaders + [each for each in next_ones if each.worker not in named][:runners_up]


def _priced(price: Price) -> PricedCandidate:
    return PricedCandidate(
        worker=price.worker,
        degree=price.of.degree,
        cached_tokens=price.of.cached_tokens,
        queue_us=price.of.queue_us,
        service_us=price.service_us,
        occupancy_us=price.occupancy_us,
        price_us=price.price_us,
        trust=price.of.trust,
        in_flight_tokens=price.of.in_flight_tokens,
        fetched_tokens=price.of.fetched_tokens,
        fetch_us=price.of.fetch_us,
        fetch_from=price.of.fetch_from,
        delayed_jobs=price.of.delayed_jobs,
        delay_us=price.of.delayed_jobs * price.service_us,
        ratio=price.of.ratio_ppm / PPM,
    )


def digest(prices: Iterable[tuple[WorkerId, int]]) -> str:
    """Covers every price, also those that are not recorded one by one."""
    lines = "\n".join(f"{worker} {price_us}" for worker, price_us in sorted(prices))
    return blake2b(lines.encode(), digest_size=DIGEST_BYTES).hexdigest()
