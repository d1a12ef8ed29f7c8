"""What `vertumnus` adds to the paper's rule: how a request would really fare at each worker (ADR 0021).

1.  β = 1 / (1 - ρ), the price of a delay to whoever comes next, with ρ the load of the last ten seconds, up to 10. Not where
    tenants share the pool: a flood that waits at the routers delays nobody, and its load is no price for others (ADR 0028).
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

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from services.router.board import Board
from services.router.loads import Loads
from services.router.placement import Able, Question
from services.router.pricing import Kind, Priced, Pricing, Waits, Ways, Weights
from shared.contracts.copy_commands import FETCHES_PER_SOURCE_MAX
from shared.contracts.events import NodeRegistered, Trust
from shared.contracts.ids import BlockId, RequestId, WorkerId, node_of
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import LOAD_PPM_MAX, Parameters
from shared.model.pending import Pending


def weights(parameters: Parameters, load_ppm: int = 0) -> Weights:
    """What the policy in force multiplies by, at a load of the pool if it asks for that."""
    if parameters.frozen or parameters.placement_policy == "least-work":
        return Weights("least-work", parameters.beta, parameters.lam)
    if parameters.placement_policy == "paper":
        return Weights("paper", parameters.beta, parameters.lam)
    follows_load = parameters.adaptive_beta and not parameters.shared
    beta = PPM / (PPM - min(load_ppm, LOAD_PPM_MAX)) if follows_load else parameters.beta
    return Weights("vertumnus", beta, parameters.lam_vertumnus)


class Outlook(NamedTuple):
    """What a forecast reads besides the prompt."""

    board: Board
    loads: Loads
    calibration: Calibration
    coefficients: Coefficients
    parameters: Parameters
    weights: Weights
    load_ppm: int
    pending: Pending

    @property
    def spec(self) -> NodeRegistered:
        """What the pool serves."""
        assert self.board.members.spec is not None, (
            "a request that somebody may take is served by a node that registered"
        )
        return self.board.members.spec

    @property
    def ratio_ppm(self) -> Ints | None:
        return self.board.ratio_ppm if self.parameters.calibration else None


class _Way(NamedTuple):
    """More than a worker's own blocks, where it has more. The request is not served before one of `behind_us` of work."""

    kind: Kind
    cached_tokens_W: Ints
    fetch_us_W: Ints | None = None
    behind_us_W: Ints | None = None


def forecast(
    outlook: Outlook,
    able: Able,
    readable: Able,
    question: Question,
    cached_W: Ints,
    trust: Callable[[WorkerId], Trust],
) -> Priced:
    """The request in every way at every worker, by the policy in force; one of `able` will get it, and may read from one of
    `readable`."""
    if outlook.weights.policy != "vertumnus":
        return plain(outlook, able, question, cached_W, _pending(outlook, question, cached_W))
    more: list[_Way] = []
    if outlook.parameters.in_flight_prefixes and outlook.loads.in_flight:
        more += _in_flight(outlook, question, cached_W, trust)
    fetch_from = None
    if outlook.parameters.prefix_fetch and (source := _source(outlook, readable, cached_W)) is not None:
        fetch_from = outlook.board.roster.workers[source]
        more += _fetched(outlook, source, cached_W)
    more += _pending(outlook, question, cached_W)
    ways = _ways(cached_W, more, outlook.ratio_ppm, fetch_from)
    pricing = _pricing(outlook, able, question)
    services = pricing.services(ways)
    waits = _waits(outlook, services.service_us_KW, more, question.now_ns)
    return Priced(pricing, ways, waits, pricing.prices(services, waits))


def plain(outlook: Outlook, able: Able, question: Question, cached_W: Ints, more: Iterable[_Way] = ()) -> Priced:
    """By what every worker holds and has reserved, and `more`."""
    queue_us_W = outlook.board.queue_us(outlook.board.elapsed_us(question.now_ns))
    return _pricing(outlook, able, question).of(_ways(cached_W, [*more]), Waits(queue_us_W[None]))


def _pricing(outlook: Outlook, able: Able, question: Question) -> Pricing:
    roster, smallest = outlook.board.roster, able.roster.degrees[0]
    return Pricing(outlook.coefficients, question.prompt_tokens, outlook.weights, roster, smallest)


def _ways(
    cached_W: Ints, more: list[_Way], ratio_ppm_W: Ints | None = None, fetch_from: WorkerId | None = None
) -> Ways:
    if not more:
        return Ways(("own",), cached_W[None], None, ratio_ppm_W)
    cached_KW = np.array([cached_W, *(each.cached_tokens_W for each in more)])
    fetch_us_KW = np.zeros_like(cached_KW)
    for way, each in enumerate(more, 1):
        if each.fetch_us_W is not None:
            fetch_us_KW[way] = each.fetch_us_W
    return Ways(("own", *(each.kind for each in more)), cached_KW, fetch_us_KW, ratio_ppm_W, fetch_from)


def _waits(outlook: Outlook, service_us_KW: Ints, more: list[_Way], now_ns: int) -> Waits:
    """What is ahead, and whom it delays, by the workers' order."""
    board, parameters = outlook.board, outlook.parameters
    elapsed_us_W = board.elapsed_us(now_ns)
    if not (parameters.ordered_queue and parameters.worker_order == "shortest-first"):
        return Waits(board.queue_us(elapsed_us_W)[None])
    if more and more[0].behind_us_W is not None:
        service_us_KW = service_us_KW.copy()
        np.maximum(service_us_KW[1], more[0].behind_us_W, out=service_us_KW[1])
    return Waits(*board.ahead(service_us_KW, elapsed_us_W))


def _in_flight(
    outlook: Outlook, question: Question, cached_W: Ints, trust: Callable[[WorkerId], Trust]
) -> Iterator[_Way]:
    """With what requests before this one will leave, behind the shortest of them that has not begun."""
    rows, block_tokens = outlook.board.roster.rows, outlook.spec.block_tokens
    found: dict[int, tuple[int, int]] = {}
    for worker, coming in outlook.loads.in_flight.matches(question.chain).items():
        tokens = reusable_tokens(coming.blocks, block_tokens, question.prompt_tokens)
        row = rows.get(worker)
        if row is not None and tokens > cached_W[row] and trust(worker) != "blind":
            found[row] = tokens, min(_waits_us(outlook.loads, request) for request in coming.providers)
    if found:
        tokens_W, behind_us_W = cached_W.copy(), np.zeros_like(cached_W)
        tokens_W[list(found)], behind_us_W[list(found)] = zip(*found.values(), strict=True)
        yield _Way("in-flight", tokens_W, behind_us_W=behind_us_W)


def _waits_us(loads: Loads, request: RequestId) -> int:
    """Where in the line a request waits; 0 if it runs."""
    assignment = loads.open[request].assignment
    assert assignment is not None, "what is in flight has a reservation"
    return 0 if assignment.started else assignment.service_us


def _source(outlook: Outlook, readable: Able, cached_W: Ints) -> int | None:
    """Who is read from: the row of the longest prefix among those that may be read from now."""
    members = outlook.board.members
    held_W = cached_W * members.can_fetch_W
    for node, reads in outlook.loads.fetching.items():
        if reads >= FETCHES_PER_SOURCE_MAX and (busy_W := members.rows_of.get(node)) is not None:
            held_W[busy_W] = 0
    rows_W = readable.rows_W
    row = int(held_W.argmax() if rows_W is None else rows_W[held_W[rows_W].argmax()])
    return row if held_W[row] else None


def _fetched(outlook: Outlook, source: int, cached_W: Ints) -> Iterator[_Way]:
    """With the longest prefix of another worker, where that is longer than its own."""
    board, spec, parameters = outlook.board, outlook.spec, outlook.parameters
    longest, node = int(cached_W[source]), node_of(board.roster.workers[source])
    gains_W = (cached_W < longest) & board.members.can_fetch_W
    depths = np.array(sorted(set(cached_W.tolist())))
    fetch_us = [
        outlook.calibration.fetch_us(node, (longest - depth) * spec.kv_bytes_per_token, parameters.fetch_mb_per_s)
        for depth in depths.tolist()
    ]
    fetch_us_W = np.array(fetch_us)[depths.searchsorted(cached_W)] * gains_W
    yield _Way("fetched", np.where(gains_W, longest, cached_W), fetch_us_W)


def _pending(outlook: Outlook, question: Question, cached_W: Ints) -> Iterator[_Way]:
    """With what a split has left for the worker on its node."""
    roster = outlook.board.roster
    found = {
        row: brought
        for worker in outlook.pending.of_worker
        if (row := roster.rows.get(worker)) is not None
        and (brought := bringing(outlook, question.chain, question.prompt_tokens, worker, int(cached_W[row])))
    }
    if found:
        tokens_W, fetch_us_W = cached_W.copy(), np.zeros_like(cached_W)
        tokens_W[list(found)], fetch_us_W[list(found)] = zip(*found.values(), strict=True)
        yield _Way("pending", tokens_W, fetch_us_W)


def bringing(
    outlook: Outlook, chain: Sequence[BlockId], prompt_tokens: int, worker: WorkerId, cached_tokens: int
) -> tuple[int, int] | None:
    """How much of a prompt the worker has when what is pending there has come, and how long that takes; None if it is no more
    than it has."""
    node, spec = node_of(worker), outlook.spec
    registered = outlook.loads.specs.get(node)
    if registered is None or not registered.fetches or outlook.loads.fetching.get(node, 0) >= FETCHES_PER_SOURCE_MAX:
        return None
    blocks = outlook.pending.reaches(worker, chain, cached_tokens // spec.block_tokens)
    tokens = reusable_tokens(blocks, spec.block_tokens, prompt_tokens)
    if tokens <= cached_tokens:
        return None
    read_bytes = (tokens - cached_tokens) * spec.kv_bytes_per_token
    return tokens, outlook.calibration.fetch_us(node, read_bytes, outlook.parameters.fetch_mb_per_s)
