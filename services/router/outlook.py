"""What `vertumnus` adds to the paper's rule: how a request would really fare at each worker (ADR 0021).

1.  β = 1 / (1 - ρ), the price of a delay to whoever comes next, with ρ the load of the last ten seconds, up to 10.
2.  Blocks that a worker will have computed for a request before this one are reusable there; the request then comes after that
    one, even if it is shorter.
3.  Blocks that another worker holds can be read from it, for 5 ms and their bytes over the bandwidth of its node, which
    serves `FETCHES_PER_SOURCE_MAX` at a time.
4.  Only what the worker will serve before the request is waited for; each request that it delays is charged with its service.
5.  A worker that takes 1.6 times what is predicted is priced by 1.6 times the prediction.

Of what a worker offers (its own blocks, those in flight, those of a source) the cheapest counts. A worker whose cache is not
known at all gets credit for nothing but a fetch.

Under every policy, what a split has left pending at a worker is priced as a fetch from its own node (model, 2.4).
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from services.router.in_flight import Coming
from services.router.lines import Load
from services.router.loads import Loads
from services.router.placement import Candidate, Pricing, Question, Weights
from shared.contracts.copy_commands import FETCHES_PER_SOURCE_MAX
from shared.contracts.events import NodeRegistered
from shared.contracts.ids import RequestId, WorkerId, node_of
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Coefficients
from shared.model.parameters import Parameters
from shared.model.pending import Pending

LOAD_PPM_MAX = 900_000
"""β is 10 there, and would be without bound at a load of 1."""


def weights(parameters: Parameters, load_ppm: int = 0) -> Weights:
    """What the policy in force multiplies by, at a load of the pool if it asks for that."""
    if parameters.frozen or parameters.placement_policy == "least-work":
        return Weights("least-work", parameters.beta, parameters.lam)
    if parameters.placement_policy == "paper":
        return Weights("paper", parameters.beta, parameters.lam)
    beta = PPM / (PPM - min(load_ppm, LOAD_PPM_MAX)) if parameters.adaptive_beta else parameters.beta
    return Weights("vertumnus", beta, parameters.lam_vertumnus)


class _Offer(NamedTuple):
    """One way to serve a request at a worker. It is not served before a request of `behind_us` of work."""

    candidate: Candidate
    behind_us: int = 0


class Outlook(NamedTuple):
    """What a forecast reads, besides the candidates."""

    loads: Loads
    calibration: Calibration
    coefficients: Coefficients
    parameters: Parameters
    weights: Weights
    load_ppm: int
    spec: NodeRegistered
    pending: Pending


def bringing(outlook: Outlook, question: Question, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, with what is pending there where a fetch of it is cheaper than to compute it: all that policies other
    than `vertumnus` know of what will have happened."""
    smallest = min((each.degree for each in candidates), default=1)
    pricing = Pricing(outlook.coefficients, question.prompt_tokens, outlook.weights, smallest)
    return [
        min((each, *_pending(outlook, question, each)), key=lambda way: pricing.of(way).price_us) for each in candidates
    ]


def forecast(outlook: Outlook, question: Question, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates with the best that each of them offers. Many are idle and hold as much as others do, so that they
    offer what one of their kind did."""
    parameters = outlook.parameters
    smallest = min((each.degree for each in candidates), default=1)
    pricing = Pricing(outlook.coefficients, question.prompt_tokens, outlook.weights, smallest)
    coming: Mapping[WorkerId, Coming] = {}
    if parameters.in_flight_prefixes and outlook.loads.in_flight:
        coming = outlook.loads.in_flight.matches(question.chain)
    sources = _sources(outlook, candidates) if parameters.prefix_fetch else []
    ordered = parameters.ordered_queue and parameters.worker_order == "shortest-first"
    best = []
    idle: dict[Hashable, Candidate] = {}
    for each in candidates:
        if parameters.calibration and (ratio_ppm := outlook.calibration.ratio_ppm(each.worker)) != PPM:
            each = each._replace(ratio_ppm=ratio_ppm)
        load = outlook.loads.of_worker.get(each.worker) if ordered else None
        there = coming.get(each.worker)
        alike: Hashable = None
        lacks_nothing = each.worker not in outlook.pending.of_worker
        if load is None and there is None and lacks_nothing:
            alike = each[1:], _can_fetch(outlook, each.worker), bool(sources) and sources[0].worker == each.worker
            if (twin := idle.get(alike)) is not None:
                best.append(Candidate(each.worker, *twin[1:]))
                continue
        offers = [_Offer(each)]
        if there is not None and each.trust != "blind":
            offers += _in_flight(outlook, question, each, there)
        if sources:
            offers += _fetched(outlook, each, sources)
        if not lacks_nothing:
            offers += map(_Offer, _pending(outlook, question, each))
        ways = [_in_line(offer, load, pricing, question) if load else offer.candidate for offer in offers]
        best.append(ways[0] if len(ways) == 1 else min(ways, key=lambda way: pricing.of(way).price_us))
        if alike is not None:
            idle[alike] = best[-1]
    return best


def _in_flight(outlook: Outlook, question: Question, each: Candidate, coming: Coming) -> Iterator[_Offer]:
    """With what requests before this one will leave, behind the shortest of them that has not begun."""
    tokens = reusable_tokens(coming.blocks, outlook.spec.block_tokens, question.prompt_tokens)
    if tokens > each.cached_tokens:
        more = each._replace(cached_tokens=tokens, in_flight_tokens=tokens - each.cached_tokens)
        yield _Offer(more, min(_waits_us(outlook.loads, request) for request in coming.providers))


def _waits_us(loads: Loads, request: RequestId) -> int:
    """Where in the line a request waits; 0 if it runs."""
    assignment = loads.open[request].assignment
    assert assignment is not None, "what is in flight has a reservation"
    return 0 if assignment.started else assignment.service_us


def _sources(outlook: Outlook, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Who may be read from, the longest prefix first."""
    fetching, specs = outlook.loads.fetching, outlook.loads.specs
    able = [
        each
        for each in candidates
        if each.cached_tokens
        and fetching.get(node := node_of(each.worker), 0) < FETCHES_PER_SOURCE_MAX
        and (spec := specs.get(node)) is not None
        and spec.fetches
    ]
    return sorted(able, key=lambda each: (-each.cached_tokens, each.worker))


def _fetched(outlook: Outlook, each: Candidate, sources: list[Candidate]) -> Iterator[_Offer]:
    """With the longest prefix of another worker, if it is longer than this one's own."""
    source = sources[0] if sources[0].worker != each.worker else sources[1] if len(sources) > 1 else each
    if source.cached_tokens > each.cached_tokens and _can_fetch(outlook, each.worker):
        yield _Offer(_reading(outlook, each, source.worker, source.cached_tokens))


def _pending(outlook: Outlook, question: Question, each: Candidate) -> Iterator[Candidate]:
    """With what a split has left for it on its node."""
    node, block_tokens = node_of(each.worker), outlook.spec.block_tokens
    if not _can_fetch(outlook, each.worker) or outlook.loads.fetching.get(node, 0) >= FETCHES_PER_SOURCE_MAX:
        return
    blocks = outlook.pending.reaches(each.worker, question.chain, each.cached_tokens // block_tokens)
    tokens = reusable_tokens(blocks, block_tokens, question.prompt_tokens)
    if tokens > each.cached_tokens:
        yield _reading(outlook, each, each.worker, tokens)


def _reading(outlook: Outlook, each: Candidate, source: WorkerId, tokens: int) -> Candidate:
    """With the first `tokens` of the prompt, of which those that it lacks are read from the node of `source`."""
    lacking = tokens - each.cached_tokens
    read_bytes = lacking * outlook.spec.kv_bytes_per_token
    fetch_us = outlook.calibration.fetch_us(node_of(source), read_bytes, outlook.parameters.fetch_mb_per_s)
    return each._replace(cached_tokens=tokens, fetched_tokens=lacking, fetch_us=fetch_us, fetch_from=source)


def _can_fetch(outlook: Outlook, worker: WorkerId) -> bool:
    spec = outlook.loads.specs.get(node_of(worker))
    return spec is not None and spec.fetches


def _in_line(offer: _Offer, load: Load, pricing: Pricing, question: Question) -> Candidate:
    """What is ahead of it there, and whom it delays."""
    each, behind_us = offer
    service_us = pricing.service_us(each.degree, each.cached_tokens, each.ratio_ppm, each.fetch_us)
    ahead = load.ahead(max(service_us, behind_us), question.now_ns)
    return each._replace(queue_us=ahead.queue_us, delayed_jobs=ahead.jobs)
