"""What every open request reserves: the fold behind `q` and behind the choice of a decode rank.

An assignment reserves its predicted seconds at its worker until the prefill has completed or was aborted, the request was
redirected or ended, or its router or its node was lost. Rules that keep the fold independent of how a router's own events
(folded when they are recorded) interleave with the log:

1.  What an agent says counts for the attempt it names, if that is the request's current one, and for nothing else.
2.  The end of a node's incarnation voids exactly the assignments that were decided without having seen it: those whose
    `seen_seq` is lower. It makes no difference which of the two is folded first.
3.  A request of a router that was declared lost is not open, whatever that router still writes.
"""

from dataclasses import dataclass, field

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
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
"""A step that has run longer than both bounds makes its worker ineligible: a hung worker must not look idle."""


@dataclass(slots=True)
class Assignment:
    """Where one attempt is. `started_ns` is the wall clock of its first step, `prefilled` ends the prefill's reservation."""

    worker: WorkerId
    service_us: int
    decode_worker: WorkerId | None
    output_tokens: int
    seen_seq: int
    started_ns: int | None = None
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
    """One worker: how many assignments wait there with how many predicted microseconds, and those whose steps run."""

    queued: int = 0
    queued_us: int = 0
    running: dict[RequestId, Assignment] = field(default_factory=dict)

    def at(self, now_ns: int) -> tuple[int, bool]:
        """q, and whether a running step is past every bound. What runs needs the rest of its prediction, or a quarter of
        the time it has taken if that is more."""
        queue_us, hung = self.queued_us, False
        for each in self.running.values():
            assert each.started_ns is not None, "what runs has started"
            elapsed_us = max(0, now_ns - each.started_ns) // 1_000
            queue_us += max(each.service_us - elapsed_us, elapsed_us // 4)
            hung = hung or elapsed_us > max(HUNG_FACTOR * each.service_us, HUNG_US_MIN)
        return queue_us, hung


@dataclass(slots=True)
class Loads:
    """State of the fold; `evolve` is its only writer. A worker or decode rank without a reservation has no entry."""

    open: dict[RequestId, OpenRequest] = field(default_factory=dict)
    of_worker: dict[WorkerId, Load] = field(default_factory=dict)
    output_tokens: dict[WorkerId, int] = field(default_factory=dict)
    incarnations: dict[NodeId, int] = field(default_factory=dict)
    node_ended_seq: dict[NodeId, int] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)

    def check(self) -> None:
        """The sums are those of the open requests."""
        queued: dict[WorkerId, list[int]] = {}
        running: dict[WorkerId, set[RequestId]] = {}
        tokens: dict[WorkerId, int] = {}
        for request, each in self.open.items():
            if (assignment := each.assignment) is None:
                continue
            if assignment.started_ns is None and not assignment.prefilled:
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
                _start(loads, data.request, assignment, stored.event.time_ns)
        case PrefillCompleted() | PrefillAborted() as data:
            if assignment := _current(loads, data.request, data.attempt):
                _free_worker(loads, data.request, assignment)
        case ended if isinstance(ended, ENDS):
            _end(loads, ended.request)
        case RouterLost() as data:
            _lose_router(loads, data.source)
        case NodeRegistered() | NodeLost() | NodeDeclaredLost() as data:
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
    request.assignment = Assignment(data.worker, data.service_us, data.decode_worker, request.max_tokens, data.seen_seq)
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


def _start(loads: Loads, request: RequestId, assignment: Assignment, time_ns: int) -> None:
    if assignment.started_ns is not None:
        return
    load = loads.of_worker[assignment.worker]
    load.queued -= 1
    load.queued_us -= assignment.service_us
    load.running[request] = assignment
    assignment.started_ns = time_ns


def _free_worker(loads: Loads, request: RequestId, assignment: Assignment) -> None:
    """End the prefill's part of the reservation."""
    if assignment.prefilled:
        return
    assignment.prefilled = True
    load = loads.of_worker[assignment.worker]
    if assignment.started_ns is None:
        load.queued -= 1
        load.queued_us -= assignment.service_us
    else:
        del load.running[request]
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
