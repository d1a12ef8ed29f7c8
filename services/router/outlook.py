"""What `vertumnus` adds to the paper's rule: how a request would really fare at each worker (ADR 0021).

1.  β = 1 / (1 - ρ), the price of a delay to whoever comes next, with ρ the load of the last ten seconds, up to 10. Not where
    tenants share the pool: a flood that waits at the routers delays nobody, and its load is no price for others (ADR 0028).
2.  Blocks that a worker will have computed for a request before this one are reusable there; the request then comes after that
    one, even if it is shorter.
3.  Blocks that another worker holds can be read from it, for 5 ms and their bytes over the bandwidth of its node, which
    serves `FETCHES_PER_SOURCE_MAX` at a time.
4.  Only what the worker will serve before the request is waited for; each request that it delays is charged with its service.
5.  A worker that takes 1.6 times what is predicted is priced by 1.6 times the prediction. Under `ratio_in_own_time` that is
    so for the request's own wait, its service and those it delays. The (β - 1) and the λ of its price stand for those who
    could have had the worker instead, to whom a second of a slow one is worth less: they multiply the prediction (ADR 49).

Of what a worker offers (its own blocks, those in flight, those of a source) the cheapest counts. A worker whose cache is not
known at all gets credit for nothing but a fetch.

Under every policy, what a split has left pending at a worker is priced as a fetch from its own node (model, 2.4).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from services.router import loops
from services.router.board import Board
from services.router.loads import Loads
from services.router.placement import Able, Question
from services.router.pricing import NO_FETCH, NO_OPTIONS, Fetch, Option, Priced, Pricing, Ways, Weights
from shared.contracts.copy_commands import FETCHES_PER_SOURCE_MAX
from shared.contracts.events import NodeRegistered, Trust
from shared.contracts.ids import BlockId, RequestId, WorkerId, node_of
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Coefficients, Ints
from shared.model.parameters import LOAD_PPM_MAX, Parameters, PlacementPolicy
from shared.model.pending import Pending


def in_force(parameters: Parameters) -> PlacementPolicy:
    """The policy that prices: the freeze switch has its own."""
    return "least-work" if parameters.frozen else parameters.placement_policy


def weights(parameters: Parameters, load_ppm: int = 0) -> Weights:
    """What the policy in force multiplies by, at a load of the pool if it asks for that."""
    if (policy := in_force(parameters)) != "vertumnus":
        return Weights(policy, parameters.beta, parameters.lam)
    follows_load = parameters.adaptive_beta and not parameters.shared
    beta = PPM / (PPM - min(load_ppm, LOAD_PPM_MAX)) if follows_load else parameters.beta
    own_time = parameters.calibration and parameters.ratio_in_own_time
    return Weights("vertumnus", beta, parameters.lam_vertumnus, own_time)


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
    now_ns: int

    @property
    def spec(self) -> NodeRegistered:
        """What the pool serves."""
        assert self.board.members.spec is not None, (
            "a request that somebody may take is served by a node that registered"
        )
        return self.board.members.spec


def forecast(
    outlook: Outlook,
    smallest: int,
    readable: Able,
    question: Question,
    cached_W: Ints,
    trust: Callable[[WorkerId], Trust],
) -> Priced:
    """The request at every worker, by the policy in force. Of those that may get it `smallest` is the smallest degree; it may
    read from one of `readable`."""
    pending_OC = _options(_pending(outlook, question, cached_W)) if outlook.pending.of_worker else NO_OPTIONS
    if outlook.weights.policy != "vertumnus":
        return plain(outlook, smallest, question, Ways(cached_W, pending_OC=pending_OC))
    parameters, in_flight_OC, fetch = outlook.parameters, NO_OPTIONS, NO_FETCH
    if parameters.in_flight_prefixes and outlook.loads.in_flight:
        in_flight_OC = _options(_in_flight(outlook, question, cached_W, trust))
    if parameters.prefix_fetch and (source := _source(outlook, readable, cached_W)) >= 0:
        fetch = _fetch(outlook, source, cached_W)
    ordered = parameters.ordered_queue and parameters.worker_order == "shortest-first"
    pricing = _pricing(outlook, smallest, question, ordered, parameters.calibration)
    return pricing.of(Ways(cached_W, in_flight_OC, fetch, pending_OC))


def plain(outlook: Outlook, smallest: int, question: Question, ways: Ways) -> Priced:
    """By all that every worker has reserved."""
    return _pricing(outlook, smallest, question, ordered=False, calibrated=False).of(ways)


def _pricing(outlook: Outlook, smallest: int, question: Question, ordered: bool, calibrated: bool) -> Pricing:
    board = outlook.board
    by, tokens, now_ns = outlook.weights, question.prompt_tokens, question.now_ns
    return Pricing(outlook.coefficients, tokens, by, board.roster, smallest, board.lines, now_ns, ordered, calibrated)


def _options(found: Iterable[Option]) -> Ints:
    options = [*found]
    return np.array(options, dtype=np.int64) if options else NO_OPTIONS


def _in_flight(
    outlook: Outlook, question: Question, cached_W: Ints, trust: Callable[[WorkerId], Trust]
) -> Iterator[Option]:
    """With what requests before this one will leave, behind the shortest of them that has not begun."""
    rows, block_tokens = outlook.board.roster.rows, outlook.spec.block_tokens
    for worker, coming in outlook.loads.in_flight.matches(question.chain).items():
        tokens = reusable_tokens(coming.blocks, block_tokens, question.prompt_tokens)
        row = rows.get(worker)
        if row is not None and tokens > cached_W[row] and trust(worker) != "blind":
            behind_us = min(_waits_us(outlook.loads, request) for request in coming.providers)
            yield Option(row, tokens, behind_us=behind_us)


def _waits_us(loads: Loads, request: RequestId) -> int:
    """Where in the line a request waits; 0 if it runs."""
    assignment = loads.open[request].assignment
    assert assignment is not None, "what is in flight has a reservation"
    return 0 if assignment.started else assignment.service_us


def _source(outlook: Outlook, readable: Able, cached_W: Ints) -> int:
    """Who is read from: the row of the longest prefix among those that may be read from now; -1 without any."""
    members = outlook.board.members
    readable_W = members.can_fetch_W
    for node, reads in outlook.loads.fetching.items():
        if reads >= FETCHES_PER_SOURCE_MAX and (busy_W := members.rows_of.get(node)) is not None:
            readable_W = readable_W.copy()
            readable_W[busy_W] = False
    return loops.longest(cached_W, readable_W, readable.rows_W)


def _fetch(outlook: Outlook, source: int, cached_W: Ints) -> Fetch:
    """The longest prefix of another worker, for those whose own is shorter."""
    board, spec = outlook.board, outlook.spec
    longest, worker = int(cached_W[source]), board.roster.workers[source]
    depths = sorted({*cached_W.tolist()} - {longest})
    link = outlook.calibration.link(node_of(worker), outlook.parameters, outlook.now_ns)
    reads_us = [link.fetch_us((longest - depth) * spec.kv_bytes_per_token) for depth in depths]
    return Fetch(worker, longest, board.members.can_fetch_W, np.array([depths, reads_us], dtype=np.int64))


def _pending(outlook: Outlook, question: Question, cached_W: Ints) -> Iterator[Option]:
    """With what a split has left for the worker on its node."""
    rows = outlook.board.roster.rows
    for worker in outlook.pending.of_worker:
        if (row := rows.get(worker)) is not None:
            brought = bringing(outlook, question.chain, question.prompt_tokens, worker, int(cached_W[row]))
            if brought is not None:
                yield Option(row, *brought)


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
    return tokens, outlook.calibration.link(node, outlook.parameters, outlook.now_ns).fetch_us(read_bytes)
