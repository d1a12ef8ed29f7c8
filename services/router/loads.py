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

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from services.router.in_flight import InFlight
from services.router.lines import Assignment, Load
from services.router.open_requests import OpenRequest
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
from shared.contracts.ids import NodeId, RequestId, WorkerId, node_of
from shared.model.holders import Chain
from shared.model.lost_routers import LostRouters

_Key = TypeVar("_Key", bound=str)

HEARD = frozenset(
    {
        RequestReceived, RequestAssigned, RequestRedirected, PrefillStarted, BlocksStored, PrefillCompleted, PrefillAborted,
        *ENDS, RouterLost, NodeRegistered, NodeLost, NodeDeclaredLost,
    }
)  # fmt: skip
"""What reserves or frees something."""


@dataclass(slots=True)
class Loads:
    """State of the fold; `evolve` is its only writer. What has no reservation has no entry: `decoding` and `output_tokens` are
    requests at a decode rank, and their tokens. `touched` are workers whose load has changed since the board looked."""

    open: dict[RequestId, OpenRequest] = field(default_factory=dict)
    of_worker: dict[WorkerId, Load] = field(default_factory=dict)
    output_tokens: dict[WorkerId, int] = field(default_factory=dict)
    decoding: dict[WorkerId, int] = field(default_factory=dict)
    fetching: dict[NodeId, int] = field(default_factory=dict)
    in_flight: InFlight = field(default_factory=InFlight)
    incarnations: dict[NodeId, int] = field(default_factory=dict)
    node_ended_seq: dict[NodeId, int] = field(default_factory=dict)
    specs: dict[NodeId, NodeRegistered] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)
    touched: set[WorkerId] = field(default_factory=set, compare=False)

    def has_company(self, request: RequestId, now_ns: int) -> bool:
        """Whether the request is still to be prefilled at a worker that gives signs of life and has others to serve too: then
        it may be overtaken, for as long as the worker's order lets anybody wait."""
        opened = self.open.get(request)
        if opened is None or (assignment := opened.assignment) is None or assignment.prefilled:
            return False
        load = self.of_worker[assignment.worker]
        return len(load.line) + len(load.running) > 1 and not load.at(now_ns)[1]

    def check(self) -> None:
        """The sums are those of the open requests."""
        waiting: dict[WorkerId, dict[RequestId, int]] = {}
        running: dict[WorkerId, set[RequestId]] = {}
        tokens, decoding, fetching = Counter[WorkerId](), Counter[WorkerId](), Counter[NodeId]()
        for request, each in self.open.items():
            if (assignment := each.assignment) is None:
                continue
            if assignment.decode_worker is not None:
                tokens[assignment.decode_worker] += assignment.output_tokens
                decoding[assignment.decode_worker] += 1
            if assignment.prefilled:
                continue
            if assignment.fetch_from is not None:
                fetching[node_of(assignment.fetch_from)] += 1
            if assignment.started:
                running.setdefault(assignment.worker, set()).add(request)
            else:
                waiting.setdefault(assignment.worker, {})[request] = assignment.service_us
        loads = self.of_worker.items()
        assert {worker: (set(each), sum(each.values())) for worker, each in waiting.items()} == {
            worker: (set(load.line), load.line.total_us) for worker, load in loads if load.line
        }
        assert running == {worker: set(load.running) for worker, load in loads if load.running}
        assert (tokens, decoding, fetching) == (self.output_tokens, self.decoding, self.fetching)
        assert all(self.of_worker.values()), "an empty load is kept"
        assert all((load.sign_ns is not None) == bool(load.running) for _, load in loads), (
            "the last sign of a worker is kept while something runs there"
        )
        self.in_flight.check()


def evolve(loads: Loads, stored: Stored, chains: Mapping[RequestId, Chain]) -> None:
    """Fold one event, whose request's chain is in `chains`. Events that reserve and free nothing leave the state as it is."""
    if type(stored.data) not in HEARD:
        return
    match stored.data:
        case RequestReceived() as data:
            if stored.event.source not in loads.lost_routers:
                loads.open[data.request] = OpenRequest(
                    stored.event.source, data.prompt_tokens, data.max_tokens, data.placed_only
                )
        case RequestAssigned() as data:
            _assign(loads, data, chains.get(data.request, ()))
        case RequestRedirected() as data:
            if (request := loads.open.get(data.request)) and request.attempt == data.attempt:
                request.avoid(data)
                _release(loads, data.request, request)
                request.worker = None
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
                loads.specs[data.node] = data
            if data.incarnation >= loads.incarnations.get(data.node, 0):
                loads.incarnations[data.node] = data.incarnation
                _end_node(loads, data.node, stored.stream_seq)
        case _:
            pass


def _assign(loads: Loads, data: RequestAssigned, chain: Chain) -> None:
    request = loads.open.get(data.request)
    if request is None:
        return
    _release(loads, data.request, request)
    request.attempt, request.worker = data.attempt, data.worker
    if data.seen_seq < loads.node_ended_seq.get(node_of(data.worker), 0):
        return
    assignment = request.assignment = Assignment(
        worker=data.worker,
        service_us=data.service_us,
        since_ns=data.now_ns,
        decode_worker=data.decode_worker,
        output_tokens=request.max_tokens,
        seen_seq=data.seen_seq,
        uncached_tokens=data.uncached_tokens,
        prompt_tokens=data.uncached_tokens + data.cached_tokens,
        left_us=data.service_us,
        chunk_us=_chunk_us(loads, data),
        fetch_from=data.fetch_from,
    )
    loads.of_worker.setdefault(data.worker, Load()).line.add(data.request, assignment)
    loads.touched.add(data.worker)
    loads.in_flight.add(data.request, data.worker, chain)
    if (rank := data.decode_worker) is not None:
        _change(loads.output_tokens, rank, request.max_tokens)
        _change(loads.decoding, rank, 1)
    if (source := data.fetch_from) is not None:
        _change(loads.fetching, node_of(source), 1)


def _chunk_us(loads: Loads, data: RequestAssigned) -> int:
    """The most that one step works on this prompt, by the chunks that its node cuts."""
    spec = loads.specs.get(node_of(data.worker))
    if spec is None or spec.chunk_tokens is None or spec.chunk_tokens >= data.uncached_tokens:
        return data.service_us
    return data.service_us * spec.chunk_tokens // data.uncached_tokens


def _change(counts: dict[_Key, int], key: _Key, by: int) -> None:
    """Nothing is kept where nothing is reserved."""
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]


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
    load.line.remove(request, assignment)
    load.running[request] = assignment
    loads.touched.add(assignment.worker)
    assignment.started = True


def _go_on(loads: Loads, data: BlocksStored) -> None:
    """A chunk, or the whole prompt, of a request at its worker is done. The event names no attempt: it speaks of the blocks,
    which are there whoever computed them."""
    opened = loads.open.get(data.request) if data.request is not None else None
    if opened is None or (assignment := opened.assignment) is None or assignment.worker != data.worker:
        return
    if assignment.started and not assignment.prefilled:
        spec = loads.specs.get(node_of(data.worker))
        done_tokens = (data.first_depth + data.blocks) * spec.block_tokens if spec else 0
        left_tokens = max(0, assignment.prompt_tokens - done_tokens)
        left_us = assignment.service_us * left_tokens // max(1, assignment.uncached_tokens)
        assignment.left_us = min(assignment.left_us, left_us)
        loads.touched.add(assignment.worker)


def _sign(loads: Loads, worker: WorkerId, time_ns: int) -> None:
    """The worker lives."""
    load = loads.of_worker.get(worker)
    if load is not None and load.running:
        load.sign_ns = time_ns
        loads.touched.add(worker)


def _free_worker(loads: Loads, request: RequestId, assignment: Assignment) -> None:
    """End the prefill's part of the reservation."""
    if assignment.prefilled:
        return
    assignment.prefilled = True
    loads.in_flight.remove(request)
    if (source := assignment.fetch_from) is not None:
        _change(loads.fetching, node_of(source), -1)
    load = loads.of_worker[assignment.worker]
    loads.touched.add(assignment.worker)
    if not assignment.started:
        load.line.remove(request, assignment)
    else:
        del load.running[request]
        if not load.running:
            load.sign_ns = None
    if not load:
        del loads.of_worker[assignment.worker]


def _release(loads: Loads, request: RequestId, opened: OpenRequest) -> None:
    """End both parts of the reservation, at the worker and at the decode rank."""
    if (assignment := opened.assignment) is None:
        return
    _free_worker(loads, request, assignment)
    if (rank := assignment.decode_worker) is not None:
        _change(loads.output_tokens, rank, -assignment.output_tokens)
        _change(loads.decoding, rank, -1)
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
        opened.outlives(node, seq)
        assignment = opened.assignment
        if assignment and assignment.seen_seq < seq and node_of(assignment.worker) == node:
            _release(loads, request, opened)
