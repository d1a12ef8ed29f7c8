"""What every open request reserves: the fold behind `q` and behind the choice of a decode rank.

An assignment reserves its predicted seconds at its worker until the prefill has completed or was aborted, the request was
redirected or ended, or its router or its node was lost. Rules that keep the fold independent of how a router's own events
(folded when they are recorded) interleave with the log:

1.  What an agent says counts for the attempt it names, if that is the request's current one, and for nothing else.
2.  The end of a node's incarnation voids exactly the assignments that were decided without having seen it: those whose
    `seen_seq` is lower. It makes no difference which of the two is folded first.
3.  A request of a router that was declared lost is not open, whatever that router still writes.
4.  What runs at a worker has gone on since the worker's last *sign*: a start, a completion or stored blocks. Signs count
    per worker and not per request, and none is kept while nothing runs.

A worker packs several requests into a step, and takes long prompts in chunks between which others run. It is still one
server: the time since its last sign is spent on all that runs there together, and the blocks that a chunk has stored say
how much of its prompt is left.
"""

from dataclasses import dataclass, field

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
    BlocksStored,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RequestAssigned,
    RequestReceived,
    RequestRedirected,
    RouterLost,
)
from shared.contracts.ids import NodeId, RequestId, Source, WorkerId, node_of
from shared.model.lost_routers import LostRouters

HUNG_FACTOR = 3
HUNG_US_MIN = 5_000_000
"""A worker that has given no sign for longer than both bounds is ineligible: a hung worker must not look idle."""


@dataclass(slots=True)
class Assignment:
    """Where one attempt is. `started` says that its first step has begun, `left_us` what is left of `service_us` as of the
    last blocks that it stored; `prefilled` ends the prefill's reservation."""

    worker: WorkerId
    service_us: int
    decode_worker: WorkerId | None
    output_tokens: int
    seen_seq: int
    uncached_tokens: int
    prompt_tokens: int
    left_us: int
    started: bool = False
    prefilled: bool = False


@dataclass(slots=True)
class OpenRequest:
    """A received request without an end. `worker` is None before the first assignment and between a redirection and the
    next one; `assignment` is what it reserves there, None when the node has ended in the meantime."""

    source: Source
    prompt_tokens: int
    max_tokens: int
    attempt: int = 0
    worker: WorkerId | None = None
    assignment: Assignment | None = None
    refused_by: tuple[WorkerId, ...] = ()


@dataclass(slots=True)
class Load:
    """One worker: how many assignments wait there with how many predicted microseconds, those whose first step has begun,
    and the wall clock of the worker's last sign."""

    queued: int = 0
    queued_us: int = 0
    running: dict[RequestId, Assignment] = field(default_factory=dict)
    sign_ns: int | None = None

    def at(self, now_ns: int) -> tuple[int, bool]:
        """q, and whether what runs is past every bound. It needs the rest of its prediction, or a quarter of the time since
        the last sign if that is more. How much of it the current step holds is not known here, so the bound is for all."""
        if self.sign_ns is None:
            return self.queued_us, False
        elapsed_us = max(0, now_ns - self.sign_ns) // 1_000
        left_us = sum(each.left_us for each in self.running.values())
        hung = elapsed_us > max(HUNG_FACTOR * left_us, HUNG_US_MIN)
        return self.queued_us + max(left_us - elapsed_us, elapsed_us // 4), hung


@dataclass(slots=True)
class Loads:
    """State of the fold; `evolve` is its only writer. A worker or decode rank without a reservation has no entry."""

    open: dict[RequestId, OpenRequest] = field(default_factory=dict)
    of_worker: dict[WorkerId, Load] = field(default_factory=dict)
    output_tokens: dict[WorkerId, int] = field(default_factory=dict)
    incarnations: dict[NodeId, int] = field(default_factory=dict)
    node_ended_seq: dict[NodeId, int] = field(default_factory=dict)
    block_tokens: dict[NodeId, int] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)

    def check(self) -> None:
        """The sums are those of the open requests."""
        queued: dict[WorkerId, list[int]] = {}
        running: dict[WorkerId, set[RequestId]] = {}
        tokens: dict[WorkerId, int] = {}
        for request, each in self.open.items():
            if (assignment := each.assignment) is None:
                continue
            if not assignment.started and not assignment.prefilled:
                queued.setdefault(assignment.worker, []).append(assignment.service_us)
            elif not assignment.prefilled:
                running.setdefault(assignment.worker, set()).add(request)
            if assignment.decode_worker is not None:
                rank = assignment.decode_worker
                tokens[rank] = tokens.get(rank, 0) + assignment.output_tokens
        assert {worker: (len(each), sum(each)) for worker, each in queued.items()} == {
            worker: (load.queued, load.queued_us) for worker, load in self.of_worker.items() if load.queued
        }
        assert running == {worker: set(load.running) for worker, load in self.of_worker.items() if load.running}
        assert tokens == self.output_tokens
        assert all(load.queued or load.running for load in self.of_worker.values()), "an empty load is kept"
        assert all((load.sign_ns is not None) == bool(load.running) for load in self.of_worker.values()), (
            "the last sign of a worker is kept while something runs there"
        )


def evolve(loads: Loads, stored: Stored) -> None:
    """Fold one event. Events that reserve and free nothing leave the state as it is."""
    match stored.data:
        case RequestReceived() as data:
            if stored.event.source not in loads.lost_routers:
                loads.open[data.request] = OpenRequest(stored.event.source, data.prompt_tokens, data.max_tokens)
        case RequestAssigned() as data:
            _assign(loads, data)
        case RequestRedirected() as data:
            if (request := loads.open.get(data.request)) and request.attempt == data.attempt:
                _release(loads, data.request, request)
                request.worker = None
                request.refused_by += (data.worker,)
        case PrefillStarted() as data:
            if assignment := _current(loads, data.request, data.attempt):
                _start(loads, data.request, assignment)
            _sign(loads, data.worker, stored.event.time_ns)
        case BlocksStored() as data if data.cause == "prefill":
            _go_on(loads, data)
            _sign(loads, data.worker, stored.event.time_ns)
        case PrefillCompleted() as data:
            if assignment := _current(loads, data.request, data.attempt):
                _free_worker(loads, data.request, assignment)
            _sign(loads, data.worker, stored.event.time_ns)
        case PrefillAborted() as data:
            if assignment := _current(loads, data.request, data.attempt):
                _free_worker(loads, data.request, assignment)
        case ended if isinstance(ended, ENDS):
            _end(loads, ended.request)
        case RouterLost() as data:
            _lose_router(loads, data.source)
        case NodeRegistered() | NodeLost() | NodeDeclaredLost() as data:
            if isinstance(data, NodeRegistered):
                loads.block_tokens[data.node] = data.block_tokens
            if data.incarnation >= loads.incarnations.get(data.node, 0):
                loads.incarnations[data.node] = data.incarnation
                _end_node(loads, data.node, stored.stream_seq)
        case _:
            pass


def _assign(loads: Loads, data: RequestAssigned) -> None:
    request = loads.open.get(data.request)
    if request is None:
        return
    _release(loads, data.request, request)
    request.attempt, request.worker = data.attempt, data.worker
    if data.seen_seq < loads.node_ended_seq.get(node_of(data.worker), 0):
        return
    request.assignment = Assignment(
        worker=data.worker,
        service_us=data.service_us,
        decode_worker=data.decode_worker,
        output_tokens=request.max_tokens,
        seen_seq=data.seen_seq,
        uncached_tokens=data.uncached_tokens,
        prompt_tokens=data.uncached_tokens + data.cached_tokens,
        left_us=data.service_us,
    )
    load = loads.of_worker.setdefault(data.worker, Load())
    load.queued += 1
    load.queued_us += data.service_us
    if (rank := data.decode_worker) is not None:
        loads.output_tokens[rank] = loads.output_tokens.get(rank, 0) + request.max_tokens


def _current(loads: Loads, request: RequestId, attempt: int) -> Assignment | None:
    """The assignment an agent speaks of, while it still counts."""
    opened = loads.open.get(request)
    if opened is None or opened.attempt != attempt or opened.assignment is None or opened.assignment.prefilled:
        return None
    return opened.assignment


def _start(loads: Loads, request: RequestId, assignment: Assignment) -> None:
    if assignment.started:
        return
    load = loads.of_worker[assignment.worker]
    load.queued -= 1
    load.queued_us -= assignment.service_us
    load.running[request] = assignment
    assignment.started = True


def _go_on(loads: Loads, data: BlocksStored) -> None:
    """A chunk, or the whole prompt, of a request at its worker is done. The event names no attempt: it speaks of the blocks,
    which are there whoever computed them."""
    opened = loads.open.get(data.request) if data.request is not None else None
    if opened is None or (assignment := opened.assignment) is None or assignment.worker != data.worker:
        return
    if assignment.started and not assignment.prefilled:
        done_tokens = (data.first_depth + data.blocks) * loads.block_tokens.get(node_of(data.worker), 0)
        left_tokens = max(0, assignment.prompt_tokens - done_tokens)
        left_us = assignment.service_us * left_tokens // max(1, assignment.uncached_tokens)
        assignment.left_us = min(assignment.left_us, left_us)


def _sign(loads: Loads, worker: WorkerId, time_ns: int) -> None:
    """The worker lives."""
    load = loads.of_worker.get(worker)
    if load is not None and load.running:
        load.sign_ns = time_ns


def _free_worker(loads: Loads, request: RequestId, assignment: Assignment) -> None:
    """End the prefill's part of the reservation."""
    if assignment.prefilled:
        return
    assignment.prefilled = True
    load = loads.of_worker[assignment.worker]
    if not assignment.started:
        load.queued -= 1
        load.queued_us -= assignment.service_us
    else:
        del load.running[request]
        if not load.running:
            load.sign_ns = None
    if not load.queued and not load.running:
        del loads.of_worker[assignment.worker]


def _release(loads: Loads, request: RequestId, opened: OpenRequest) -> None:
    """End both parts of the reservation, at the worker and at the decode rank."""
    if (assignment := opened.assignment) is None:
        return
    _free_worker(loads, request, assignment)
    if (rank := assignment.decode_worker) is not None:
        loads.output_tokens[rank] -= assignment.output_tokens
        if not loads.output_tokens[rank]:
            del loads.output_tokens[rank]
    opened.assignment = None


def _end(loads: Loads, request: RequestId) -> None:
    if (opened := loads.open.pop(request, None)) is not None:
        _release(loads, request, opened)


def _lose_router(loads: Loads, source: str) -> None:
    for request in [each for each, opened in loads.open.items() if opened.source == source]:
        _end(loads, request)
    loads.lost_routers.add(source)


def _end_node(loads: Loads, node: NodeId, seq: int) -> None:
    loads.node_ended_seq[node] = seq
    for request, opened in loads.open.items():
        assignment = opened.assignment
        if assignment and assignment.seen_seq < seq and node_of(assignment.worker) == node:
            _release(loads, request, opened)
