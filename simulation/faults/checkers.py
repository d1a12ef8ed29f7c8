"""What must hold of every event, in the turn in which the log stores it."""

from collections.abc import Callable
from typing import Any

from services.ledger.lives import EpochLives, RequestLives
from shared.contracts.codec import decode_at
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    CacheLeadershipTaken,
    EpochCommitted,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
)
from shared.contracts.ids import NodeId, worker_id
from shared.model.lattice import groups_of


class Violation(Exception):
    """Something does not hold that must."""


class LogChecker:
    """Is given every message in the turn in which it is stored. `events` keeps them."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self.events: list[Stored] = []
        self._violated = violated
        self._requests = RequestLives(violated)
        self._epochs = EpochLives(violated)
        self._last_of: dict[str, int] = {}
        self._terms: dict[type[Any], int] = {}
        self._nodes: dict[NodeId, NodeRegistered] = {}
        self._alive: set[NodeId] = set()

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
        self._check(stored)

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

    def _check_composition(self, data: EpochCommitted) -> None:
        """One composition at a time, and its workers cover every rank of the node once."""
        spec = self._nodes[data.node]
        expected = [worker_id(data.node, data.epoch, group.first_rank) for group in groups_of(data.composition)]
        if sum(data.composition) != spec.prefill_ranks or [each.worker for each in data.workers] != expected:
            self._violated(f"node {data.node}: epoch {data.epoch} is {data.composition}, its workers {expected}")
