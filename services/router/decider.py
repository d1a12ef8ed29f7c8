"""A router's decisions as pure functions: what becomes of a request, given what this router has folded.

State is the log folded to `seen_seq` plus the router's own events, which it folds when it records them; `loads.py` says why
the order between those two does not matter. A request's events, in order:

    request-received → request-rejected
    request-received → [request-held →] request-assigned(1) → [request-redirected(n) → request-assigned(n + 1)]… → one end

Every function here is pure and safe to repeat: what was decided already, or concerns a request that has ended, gives [].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router import admission
from services.router import loads as loads_model
from services.router import usage as usage_model
from services.router.admission import Books
from services.router.assigning import assigned
from services.router.board import Board
from services.router.fitting import fitting
from services.router.loads import Loads
from services.router.outlook import Outlook, forecast, in_force, weights
from services.router.placement import RUNNERS_UP, Able, Placement, Question, cached_tokens, choose, eligible
from services.router.rate import Rate
from services.router.roster import DIGEST_VERSION
from services.router.usage import Usage
from shared.contracts.envelope import Channel, EventData, Stored
from shared.contracts.events import (
    SERVING,
    CalibrationUpdated,
    EpochAborted,
    EpochCommitted,
    Exclusion,
    NodeRegistered,
    PrefillAborted,
    PrefillCompleted,
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
from shared.contracts.ids import BlockId, RequestId, TenantId, WorkerId
from shared.contracts.made import made
from shared.model import calibration as calibration_model
from shared.model import cost as cost_model
from shared.model import holders as holders_model
from shared.model import parameters as parameters_model
from shared.model import pool as pool_model
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Coefficients, Ints
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

TOUCHED_MAX = 10_000
"""Workers that wait to be read anew. Where nobody asks, the board is made anew when somebody does."""

RETRY_AFTER_S = 5
"""What a client that found no worker is told to wait: about the length of a restart or a switch."""


@dataclass(slots=True)
class State:
    """Everything a decision reads. `coefficients` begin as configured and follow `calibration-updated`; the board is made out
    of the rest."""

    coefficients: Coefficients
    pool: Pool = field(default_factory=Pool)
    holders: Holders = field(default_factory=Holders)
    parameters: Parameters = field(default_factory=Parameters)
    loads: Loads = field(default_factory=Loads)
    rate: Rate = field(default_factory=Rate)
    usage: Usage = field(default_factory=Usage)
    calibration: Calibration = field(default_factory=Calibration)
    board: Board = field(default_factory=Board, compare=False)


class Arrival(NamedTuple):
    """A request that passed every check. `chain` holds the ids of the prompt's whole blocks, `client_digest` stands for the id
    that its client gave it; `placed_only` is forwarded by somebody else. What None leaves open, its tenant's entry says: the
    TTFT objective, without one the model's, and whether the request is refused rather than late."""

    request: RequestId
    tenant: TenantId
    model: str
    prompt_tokens: int
    max_tokens: int
    slo_us: int | None
    stream: bool
    chain: tuple[BlockId, ...]
    client_digest: str | None = None
    placed_only: bool = False
    hard_slo: bool | None = None
    priority: int = 0


class Moment(NamedTuple):
    """When a decision is made: the wall clock and the log position folded. An older decision that is made again has the digest
    of its own version."""

    now_ns: int
    seen_seq: int
    digest_version: int = DIGEST_VERSION


Place = Callable[[State, Question], tuple[Placement | None, Mapping[WorkerId, Exclusion]]]
"""A placement rule: where a request goes, and the reason against each worker that may not have it."""


def initial(coefficients: Coefficients) -> State:
    """Before the first event."""
    return State(coefficients)


def evolve(state: State, stored: Stored) -> None:
    """Fold one event."""
    data = stored.data
    serving = type(data) in SERVING
    if not serving:
        pool_model.evolve(state.pool, stored)
        state.parameters = parameters_model.evolve(state.parameters, stored)
        state.coefficients = cost_model.evolve(state.coefficients, stored)
    holders_model.evolve(state.holders, stored)
    loads_model.evolve(state.loads, stored, state.holders.chains)
    if not serving or isinstance(data, PrefillCompleted):
        calibration_model.evolve(state.calibration, stored, state.pool, state.coefficients, state.parameters)
    usage_model.evolve(state.usage, stored, state.loads, state.parameters)
    match data:
        case RequestAssigned():
            state.rate.fold(data)
        case PrefillCompleted():
            state.loads.touched.add(data.worker)
        case CalibrationUpdated():
            state.board.forget()
        case _:
            pass
    if len(state.loads.touched) > TOUCHED_MAX:
        state.board.forget()
        state.loads.touched.clear()


def weigh(
    state: State, question: Question, runners_up: int = RUNNERS_UP
) -> tuple[Placement | None, dict[WorkerId, Exclusion]]:
    """Our rule: the cheapest worker by the pool's parameters. `runners_up` says how many more of the candidates are named."""
    able, excluded, cached_W = look(state, question)
    if able is None:
        return None, excluded
    outlook, readable = look_out(state, question.now_ns), able
    priced = forecast(outlook, able.roster.smallest, readable, question, cached_W, state.holders.trust)
    while question.within_us is not None or question.idle_only:
        smallest = able.roster.smallest
        able = fitting(able, priced, question, state.loads.of_worker, excluded)
        if able is None:
            return None, excluded
        if able.roster.smallest == smallest:
            break
        # λ counts from another degree now, so that a worker's cheapest way may be another, and that one may be late: at most
        # once for each degree. Who is too busy for the request can still be read from.
        priced = forecast(outlook, able.roster.smallest, readable, question, cached_W, state.holders.trust)
    return choose(able, priced, state.holders.trust, runners_up, outlook.load_ppm / PPM), excluded


def look(state: State, question: Question) -> tuple[Able | None, dict[WorkerId, Exclusion], Ints]:
    """Who may take a request, why nobody else, and how much of its prompt each worker holds."""
    board, now_ns = state.board, question.now_ns
    board.look(state.pool, state.loads, state.calibration, now_ns)
    able, excluded = eligible(board.members, board.hung(now_ns), question)
    return able, excluded, cached_tokens(board.members, state.holders.matched(question.chain), question)


def look_out(state: State, now_ns: int) -> Outlook:
    """What `vertumnus` reads of the state, with the weights of the policy in force. The board has looked."""
    parameters, load_ppm = state.parameters, 0
    if in_force(parameters) == "vertumnus":
        load_ppm = state.rate.load_ppm(now_ns, state.board.members.counted)
    return Outlook(
        state.board,
        state.loads,
        state.calibration,
        state.coefficients,
        parameters,
        weights(parameters, load_ppm),
        load_ppm,
        state.holders.pending,
        now_ns,
    )


def receive(state: State, arrival: Arrival, moment: Moment, by: Place = weigh) -> list[EventData]:
    """`request-received`, and where the request goes, that it waits for its tenant's turn, or why it goes nowhere."""
    if arrival.request in state.loads.open:
        return []
    limits = state.usage.shares.of(arrival.tenant)
    slo_us = arrival.slo_us if arrival.slo_us is not None else limits.slo_ms * 1_000 or None
    fields = {
        "request": arrival.request,
        "tenant": arrival.tenant,
        "model": arrival.model,
        "prompt_tokens": arrival.prompt_tokens,
        "max_tokens": arrival.max_tokens,
        "slo_us": state.coefficients.slo_us(arrival.prompt_tokens) if slo_us is None else slo_us,
        "hard_slo": limits.hard_slo if arrival.hard_slo is None else arrival.hard_slo,
        "priority": min(arrival.priority, limits.priority_max),
        "stream": arrival.stream,
        "client_digest": arrival.client_digest,
        "placed_only": arrival.placed_only,
        "known_blocks": 0,
        "known_block": None,
        "block_ids": b"".join(arrival.chain),
        "seen_seq": moment.seen_seq,
    }
    received = made(RequestReceived, fields)
    return [received, _next(state, received, arrival.chain, moment, by)]


def _next(state: State, received: RequestReceived, chain: tuple[BlockId, ...], moment: Moment, by: Place) -> EventData:
    """What becomes of a received request."""
    books = Books(state.usage, state.parameters, state.pool, state.loads)
    if (refused := admission.refused(books, received, moment.now_ns)) is not None:
        return refused
    question = Question(received.prompt_tokens, chain, moment.now_ns)
    placement, excluded = by(state, question)
    if placement is None:
        fits_nowhere = bool(excluded) and set(excluded.values()) <= {"too-long", "full"}
        reason, wait_s = ("too-long", None) if fits_nowhere else ("no-worker", RETRY_AFTER_S)
        return RequestRejected(request=received.request, reason=reason, retry_after_s=wait_s)
    late = admission.late(books, received, placement.winner, moment.now_ns)
    if late is not None:
        placement, excluded = by(state, question._replace(within_us=received.slo_us))
        if placement is None:
            return late
    held = admission.held(books, received, placement.winner, moment.now_ns)
    if held is not None and not state.usage.ahead(received.tenant) and admission.has_idle(books):
        idle, excluded = by(state, question._replace(within_us=received.slo_us if late else None, idle_only=True))
        placement, held = (idle, None) if idle else (placement, held)
    return held or assigned(state, received.request, 1, question, (placement, excluded), moment)


def redirect(
    state: State, request: RequestId, attempt: int, reason: RedirectReason, *, node_silent: bool = False
) -> list[EventData]:
    """Attempt `attempt` goes no further: free what it reserved. `assign_again` says where to next, unless the request
    has failed by having no attempt left. `node_silent`: the agent did not answer."""
    opened = state.loads.open.get(request)
    if opened is None or opened.attempt != attempt or opened.worker is None:
        return []
    redirected = RequestRedirected(
        request=request, attempt=attempt, worker=opened.worker, reason=reason, node_silent=node_silent
    )
    if attempt < state.parameters.attempts_max:
        return [redirected]
    return [redirected, RequestFailed(request=request, reason="attempts-exhausted")]


def assign_again(
    state: State, request: RequestId, generated_tokens: int, moment: Moment, by: Place = weigh
) -> list[EventData]:
    """The next assignment of a request that was redirected or has waited for its turn, whose prompt now ends with what was
    generated; [] without a worker."""
    opened = state.loads.open.get(request)
    if opened is None or opened.worker is not None:
        return []
    question = Question.again(opened, state.holders.chains[request], generated_tokens, moment.now_ns)
    placement, excluded = by(state, question)
    if placement is None:
        return []
    return [assigned(state, request, opened.attempt + 1, question, (placement, excluded), moment)]


def end(state: State, fact: RequestCompleted | RequestFailed | RequestCancelled) -> list[EventData]:
    """The request's one end."""
    return [fact] if fact.request in state.loads.open else []
