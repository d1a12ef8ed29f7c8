"""The pool as the log describes it: nodes, their epochs, their workers, and which of those may be given work.

Every service folds the same events with this code, so all of them agree on what exists at a sequence number.
A worker exists from its `epoch-committed` to the next one of its node. It is schedulable while its node is alive, every rank
of its group has adopted the epoch, and it is not draining; a cordoned node's workers exist but get nothing new.
"""

from dataclasses import dataclass, field

from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    CompositionPinned,
    CompositionUnpinned,
    Cordoned,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    RankAdoptedEpoch,
    Uncordoned,
)
from shared.contracts.ids import NodeId, WorkerId
from shared.model.lattice import Composition, Group


@dataclass(frozen=True, slots=True)
class Worker:
    """One committed worker. `capacity_us` is κ_C."""

    id: WorkerId
    node: NodeId
    group: Group
    capacity_us: int

    @property
    def degree(self) -> int:
        return self.group.degree


@dataclass(slots=True)
class Node:
    """One node. `spec` is its newest registration, `adopted` the epoch each prefill rank serves. No policy changes the
    composition of a `pinned` one."""

    id: NodeId
    spec: NodeRegistered | None = None
    alive: bool = False
    cordoned: bool = False
    pinned: bool = False
    epoch: int = 0
    composition: Composition = ()
    workers: tuple[Worker, ...] = ()
    draining: frozenset[WorkerId] = frozenset()
    adopted: dict[int, int] = field(default_factory=dict)

    @property
    def incarnation(self) -> int:
        """0 before the first registration."""
        return self.spec.incarnation if self.spec else 0

    def has_adopted(self, worker: Worker) -> bool:
        return all(self.adopted.get(rank) == self.epoch for rank in worker.group.ranks)


@dataclass(slots=True)
class Pool:
    """State of the fold; `evolve` is its only writer. `changes` counts the events that said something about nodes, so that
    what is made out of the pool can tell when to make it anew."""

    nodes: dict[NodeId, Node] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    changes: int = field(default=0, compare=False)

    @property
    def alive(self) -> set[NodeId]:
        """The nodes whose newest incarnation has not ended."""
        return {node.id for node in self.nodes.values() if node.alive}

    def schedulable(self, worker: Worker) -> bool:
        node = self.nodes[worker.node]
        return node.alive and not node.cordoned and worker.id not in node.draining and node.has_adopted(worker)

    def decode_ranks(self, node: NodeId) -> range:
        """The decode ranks of a node, if it lives."""
        found = self.nodes.get(node)
        return range(found.spec.decode_ranks if found is not None and found.alive and found.spec is not None else 0)


def evolve(pool: Pool, stored: Stored) -> None:
    """Fold one event. Events that say nothing about nodes leave the pool as it is."""
    data: EventData = stored.data
    match data:
        case NodeRegistered():
            node = _node(pool, data.node)
            if data.incarnation > node.incarnation:
                node.spec, node.alive = data, True
                node.adopted = dict.fromkeys(range(data.prefill_ranks), data.epoch)
        case NodeLost() | NodeDeclaredLost():
            node = _node(pool, data.node)
            if data.incarnation == node.incarnation:
                node.alive = False
        case RankAdoptedEpoch():
            node = _node(pool, data.node)
            if data.incarnation == node.incarnation:
                node.adopted[data.rank] = data.epoch
        case EpochCommitted():
            _commit(pool, _node(pool, data.node), data)
        case DrainStarted():
            _node(pool, data.node).draining = frozenset(data.workers)
        case EpochAborted():
            _node(pool, data.node).draining = frozenset()
        case Cordoned():
            _node(pool, data.node).cordoned = True
        case Uncordoned():
            _node(pool, data.node).cordoned = False
        case CompositionPinned():
            _node(pool, data.node).pinned = True
        case CompositionUnpinned():
            _node(pool, data.node).pinned = False
        case _:
            return
    pool.changes += 1


def _node(pool: Pool, node: NodeId) -> Node:
    return pool.nodes.setdefault(node, Node(node))


def _commit(pool: Pool, node: Node, data: EpochCommitted) -> None:
    for retired in node.workers:
        pool.workers.pop(retired.id, None)
    node.epoch, node.composition, node.draining = data.epoch, data.composition, frozenset()
    node.workers = tuple(
        Worker(each.worker, node.id, Group(each.first_rank, each.degree), each.capacity_us) for each in data.workers
    )
    pool.workers.update((worker.id, worker) for worker in node.workers)
