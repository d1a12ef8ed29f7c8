"""A router's decisions as pure functions: what becomes of a request, given what this router has folded.

State is the log folded to `seen_seq` plus the router's own events, which it folds when it records them; `loads.py` says why
the order between those two does not matter. A request's events, in order:

    request-received → request-rejected
    request-received → request-assigned(1) → [request-redirected(n) → request-assigned(n + 1)]… → one end

Every function here is pure and safe to repeat: what was decided already, or concerns a request that has ended, gives [].
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router import loads as loads_model
from services.router.loads import Loads
from services.router.outlook import Outlook, bringing, forecast, weights
from services.router.placement import RUNNERS_UP, Placement, Question, choose, eligible, serving
from services.router.rate import Rate
from shared.contracts.envelope import Channel, EventData, Stored
from shared.contracts.events import (
    EpochAborted,
    EpochCommitted,
    Exclusion,
    NodeRegistered,
    PrefillAborted,
    PrefillCompleted,
    PricedCandidate,
    RankAdoptedEpoch,
    RedirectReason,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestReceived,
    RequestRedirected,
    RequestRejected,
    Uncordoned,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, TenantId, WorkerId, decode_worker_id, node_of
from shared.model import calibration as calibration_model
from shared.model import cost as cost_model
from shared.model import holders as holders_model
from shared.model import parameters as parameters_model
from shared.model import pool as pool_model
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Coefficients
from shared.model.holders import Holders
from shared.model.parameters import Parameters
from shared.model.pool import Pool

HEARD = (Channel.REQUESTS, Channel.WORKERS, Channel.CACHE, Channel.CONTROL, Channel.CACHE_CONTROL)
"""What `evolve` has to be given."""

CAPACITY = (
    EpochAborted,
    EpochCommitted,
    NodeRegistered,
    PrefillAborted,
    PrefillCompleted,
    RankAdoptedEpoch,
    Uncordoned,
)
"""Events after which a worker may be eligible that was not before."""

RETRY_AFTER_S = 5
"""What a client that found no worker is told to wait: about the length of a restart or a switch."""


@dataclass(slots=True)
class State:
    """Everything a decision reads. `coefficients` begin as configured and follow `calibration-updated`."""

    coefficients: Coefficients
    pool: Pool = field(default_factory=Pool)
    holders: Holders = field(default_factory=Holders)
    parameters: Parameters = field(default_factory=Parameters)
    loads: Loads = field(default_factory=Loads)
    rate: Rate = field(default_factory=Rate)
    calibration: Calibration = field(default_factory=Calibration)


class Arrival(NamedTuple):
    """A request that passed every check. `chain` holds the ids of the prompt's whole blocks, `client_digest` stands for the id
    that its client gave it; `placed_only` is forwarded by somebody else."""

    request: RequestId
    tenant: TenantId
    model: str
    prompt_tokens: int
    max_tokens: int
    slo_us: int
    stream: bool
    chain: tuple[BlockId, ...]
    client_digest: str | None = None
    placed_only: bool = False


class Moment(NamedTuple):
    """When a decision is made: the wall clock and the log position folded."""

    now_ns: int
    seen_seq: int


Place = Callable[[State, Question], tuple[Placement | None, Counter[Exclusion]]]
"""A placement rule: where a request goes, and how many workers were left out for what."""


def initial(coefficients: Coefficients) -> State:
    """Before the first event."""
    return State(coefficients)


def evolve(state: State, stored: Stored) -> None:
    """Fold one event."""
    pool_model.evolve(state.pool, stored)
    holders_model.evolve(state.holders, stored)
    loads_model.evolve(state.loads, stored, state.holders.chains)
    state.parameters = parameters_model.evolve(state.parameters, stored)
    state.coefficients = cost_model.evolve(state.coefficients, stored)
    calibration_model.evolve(state.calibration, stored, state.pool, state.coefficients)
    if isinstance(stored.data, RequestAssigned):
        state.rate.fold(stored.data)


def place(state: State, question: Question) -> tuple[Placement | None, Counter[Exclusion]]:
    """Ours: the cheapest worker by the pool's parameters."""
    placement, excluded = weigh(state, question)
    return placement, Counter(excluded.values())


def weigh(
    state: State, question: Question, runners_up: int = RUNNERS_UP
) -> tuple[Placement | None, dict[WorkerId, Exclusion]]:
    """The same, with the reason against each worker that may not take the request."""
    candidates, excluded = eligible(state.pool, state.holders, state.loads, question)
    spec = serving(state.pool)
    if weights(state.parameters).policy != "vertumnus" or spec is None:
        by = weights(state.parameters)
        if spec is not None and state.holders.pending.of_worker:
            candidates = bringing(look_out(state, spec, question.now_ns), question, candidates)
        return choose(candidates, question.prompt_tokens, state.coefficients, by, runners_up), excluded
    outlook = look_out(state, spec, question.now_ns)
    candidates = forecast(outlook, question, candidates)
    placement = choose(candidates, question.prompt_tokens, state.coefficients, outlook.weights, runners_up)
    return placement and placement._replace(load=outlook.load_ppm / PPM), excluded


def look_out(state: State, spec: NodeRegistered, now_ns: int) -> Outlook:
    """What `vertumnus` reads of the state, with its weights as of now."""
    workers = sum(len(node.workers) for node in state.pool.nodes.values() if node.alive and not node.cordoned)
    load_ppm = state.rate.load_ppm(now_ns, workers)
    by = weights(state.parameters, load_ppm)
    pending = state.holders.pending
    return Outlook(state.loads, state.calibration, state.coefficients, state.parameters, by, load_ppm, spec, pending)


def receive(state: State, arrival: Arrival, moment: Moment, by: Place = place) -> list[EventData]:
    """`request-received`, and where the request goes or why it goes nowhere."""
    if arrival.request in state.loads.open:
        return []
    received = RequestReceived(
        request=arrival.request,
        tenant=arrival.tenant,
        model=arrival.model,
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens,
        slo_us=arrival.slo_us,
        stream=arrival.stream,
        client_digest=arrival.client_digest,
        placed_only=arrival.placed_only,
        block_ids=b"".join(arrival.chain),
        seen_seq=moment.seen_seq,
    )
    question = Question(arrival.prompt_tokens, arrival.chain, moment.now_ns)
    placement, excluded = by(state, question)
    if placement is None:
        fits_nowhere = bool(excluded) and excluded.keys() <= {"too-long", "full"}
        reason, wait_s = ("too-long", None) if fits_nowhere else ("no-worker", RETRY_AFTER_S)
        return [received, RequestRejected(request=arrival.request, reason=reason, retry_after_s=wait_s)]
    return [received, _assigned(state, arrival.request, 1, question, (placement, excluded), moment)]


def redirect(state: State, request: RequestId, attempt: int, reason: RedirectReason) -> list[EventData]:
    """Attempt `attempt` goes no further: free what it reserved. `assign_again` says where to next, unless the request
    has failed by having no attempt left."""
    opened = state.loads.open.get(request)
    if opened is None or opened.attempt != attempt or opened.worker is None:
        return []
    redirected = RequestRedirected(request=request, attempt=attempt, worker=opened.worker, reason=reason)
    if attempt < state.parameters.attempts_max:
        return [redirected]
    return [redirected, RequestFailed(request=request, reason="attempts-exhausted")]


def assign_again(
    state: State, request: RequestId, generated_tokens: int, moment: Moment, by: Place = place
) -> list[EventData]:
    """The next assignment of a redirected request, whose prompt now ends with what was generated; [] without a worker."""
    opened = state.loads.open.get(request)
    if opened is None or opened.worker is not None:
        return []
    question = Question(
        opened.prompt_tokens + generated_tokens, state.holders.chains[request], moment.now_ns, opened.refused_by
    )
    placement, excluded = by(state, question)
    if placement is None:
        return []
    return [_assigned(state, request, opened.attempt + 1, question, (placement, excluded), moment)]


def end(state: State, fact: RequestCompleted | RequestFailed | RequestCancelled) -> list[EventData]:
    """The request's one end."""
    return [fact] if fact.request in state.loads.open else []


def _assigned(
    state: State,
    request: RequestId,
    attempt: int,
    question: Question,
    placed: tuple[Placement, Counter[Exclusion]],
    moment: Moment,
) -> RequestAssigned:
    placement, excluded = placed
    winner = placement.winner
    return RequestAssigned(
        request=request,
        attempt=attempt,
        worker=winner.worker,
        degree=winner.degree,
        decode_worker=_decode_worker(state, node_of(winner.worker)),
        policy=placement.policy,
        uncached_tokens=question.prompt_tokens - winner.cached_tokens,
        cached_tokens=winner.cached_tokens,
        service_us=winner.service_us,
        queue_us=winner.queue_us,
        beta=placement.beta,
        lam=placement.lam,
        load=placement.load,
        ratio=winner.ratio,
        preferred_degree=placement.preferred_degree,
        candidates=placement.candidates,
        excluded=dict(excluded),
        price_digest=placement.price_digest,
        fetch_from=winner.fetch_from,
        fetch_blocks=_fetch_blocks(state.pool, winner),
        parameters_version=state.parameters.version,
        coefficients_version=state.coefficients.version,
        seen_seq=moment.seen_seq,
        now_ns=moment.now_ns,
    )


def _fetch_blocks(pool: Pool, winner: PricedCandidate) -> int:
    """How many leading blocks the source has."""
    spec = serving(pool)
    return winner.cached_tokens // spec.block_tokens if winner.fetch_from is not None and spec is not None else 0


def _decode_worker(state: State, node: NodeId) -> WorkerId | None:
    """The decode rank with the fewest reserved output tokens on the prefill's node (KV moves within a node), the lowest
    of equals; None if none lives there."""
    ranks = [decode_worker_id(each, rank) for each, rank in state.pool.decode_workers() if each == node]
    return min(ranks, key=lambda rank: (state.loads.output_tokens.get(rank, 0), rank), default=None)
