"""What must hold of every event, in the turn in which the log stores it."""

from collections.abc import Callable
from typing import Any

from services.controller.opening import NEW_POOL
from services.ledger.lives import EpochLives, RequestLives
from shared.contracts.codec import decode_at
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    CacheLeadershipTaken,
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RequestAssigned,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId, node_of, worker_id
from shared.model.lattice import groups_of


class Violation(Exception):
    """Something does not hold that must."""


class LogChecker:
    """Is given every message in the turn in which it is stored. `events` keeps them. A pool that `is_new` must be opened."""

    def __init__(self, violated: Callable[[str], None], *, is_new: bool) -> None:
        self.events: list[Stored] = []
        self._unopened, self._opens_now = is_new, False
        self._violated = violated
        self._requests = RequestLives(violated)
        self._epochs = EpochLives(violated)
        self._last_of: dict[str, int] = {}
        self._terms: dict[type[Any], int] = {}
        self._nodes: dict[NodeId, NodeRegistered] = {}
        self._alive: set[NodeId] = set()
        self._assigned: dict[tuple[RequestId, int], WorkerId] = {}
        self._drained: set[WorkerId] = set()
        self._draining: dict[NodeId, tuple[WorkerId, ...]] = {}
        self._told: set[tuple[str, RequestId, int, int]] = set()

    @property
    def open_requests(self) -> int:
        """Received and without an end."""
        return len(self._requests.open)

    def take(self, subject: str, seq: int, raw: bytes) -> None:
        """The next message. Whatever is wrong with it is told to `violated`."""
        stored = Stored("memory", seq, decode_at(subject, raw))
        event = stored.event
        self.events.append(stored)
        before = self._last_of.get(event.source, 0)
        if event.source_seq != before + 1:
            self._violated(f"{seq}: {event.source} numbers {event.type} {event.source_seq} after {before}")
        self._last_of[event.source] = event.source_seq
        self._requests.fold(event, incomplete=False)
        self._epochs.fold(event, incomplete=False)
        self._check_opening(stored)
        self._check(stored)
        self._check_work(stored)

    def _check_opening(self, stored: Stored) -> None:
        """A new pool is opened by its first leader, in the batch that takes the term; no pool is opened at any other time."""
        data = stored.data
        opens = isinstance(data, ParametersChanged) and data.asked_by == NEW_POOL.asked_by
        if opens != self._opens_now:
            self._violated(
                f"{stored.stream_seq}: {stored.event.type} where the pool {'opens' if opens else 'must open'}"
            )
        self._opens_now = self._unopened and isinstance(data, LeadershipTaken)
        self._unopened = self._unopened and not self._opens_now

    def _check(self, stored: Stored) -> None:
        match stored.data:
            case LeadershipTaken() | CacheLeadershipTaken() as data:
                if data.term <= (before := self._terms.get(type(data), 0)):
                    self._violated(f"{stored.stream_seq}: term {data.term} of {data.leader} follows {before}")
                self._terms[type(data)] = data.term
            case NodeRegistered() as data:
                known = self._nodes.get(data.node)
                if known is not None and data.incarnation <= known.incarnation:
                    self._violated(f"node {data.node}: incarnation {data.incarnation} follows {known.incarnation}")
                if data.node in self._alive:
                    self._violated(f"node {data.node}: incarnation {data.incarnation} while another one lives")
                self._nodes[data.node] = data
                self._alive.add(data.node)
            case NodeLost() | NodeDeclaredLost() as data:
                if data.incarnation == self._nodes[data.node].incarnation:
                    self._alive.discard(data.node)
            case EpochCommitted() as data:
                self._check_composition(data)
            case _:
                pass

    def _check_work(self, stored: Stored) -> None:
        """Work begins where it was assigned, after that was stored, and never at a worker that has been drained."""
        match stored.data:
            case RequestAssigned() as data:
                self._assigned[data.request, data.attempt] = data.worker
            case PrefillStarted() as data:
                assigned = self._assigned.get((data.request, data.attempt))
                if assigned != data.worker:
                    self._violated(f"{data.request}/{data.attempt} begins at {data.worker}; it was given to {assigned}")
                if data.worker in self._drained:
                    self._violated(f"{data.request}/{data.attempt} begins at {data.worker}, which was drained")
                self._check_once("begins", data)
            case PrefillCompleted() | PrefillAborted() as data:
                self._check_once("ends", data)
            case DrainStarted() as data:
                self._draining[data.node] = data.workers
            case DrainCompleted() as data if self._draining.get(data.node) == data.workers:
                self._drained.update(data.workers)
            case EpochAborted() | NodeLost() | NodeDeclaredLost() as data:
                # What an agent says of a drain that was called off in the meantime means nothing any more.
                self._draining.pop(data.node, None)
                self._drained = {each for each in self._drained if node_of(each) != data.node}
            case _:
                pass

    def _check_once(self, what: str, data: PrefillStarted | PrefillCompleted | PrefillAborted) -> None:
        """A life of a node begins and ends each assignment once."""
        key = what, data.request, data.attempt, self._nodes[node_of(data.worker)].incarnation
        if key in self._told:
            self._violated(f"{data.request}/{data.attempt} {what} twice at {data.worker}")
        self._told.add(key)

    def _check_composition(self, data: EpochCommitted) -> None:
        """One composition at a time, and its workers cover every rank of the node once."""
        spec = self._nodes[data.node]
        expected = [worker_id(data.node, data.epoch, group.first_rank) for group in groups_of(data.composition)]
        if sum(data.composition) != spec.prefill_ranks or [each.worker for each in data.workers] != expected:
            self._violated(f"node {data.node}: epoch {data.epoch} is {data.composition}, its workers {expected}")
