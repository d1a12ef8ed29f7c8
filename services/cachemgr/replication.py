"""One copy of a prefix to a worker that lacks it, from the request to the report of the destination.

    replication-requested ──copy to the agent──▶ blocks-stored at the destination ──▶ replica-installed
                          ──the agent says why not, limit passed, destination gone──▶ replication-failed

The destination's own report is what counts: a copy is installed when every block of the path is known to be there,
however it came. `order` and `settle` may be repeated, so a new leader goes on with what it finds open in the log.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from services.cachemgr.trie import Trie
from shared.contracts.copy_commands import (
    Copy,
)
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    CacheScanCompleted,
    EpochCommitted,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ReclamationFailed,
    ReclamationRequested,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
    ReplicationRequested,
)
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, WorkerId
from shared.model.cost import US_PER_S
from shared.model.holders import Holders
from shared.model.pool import Pool, Worker

COPY_S_MAX = 10.0
"""A copy that takes longer has no room or no source any more; 1 GB at 1 Gbit/s takes 8 s."""


DESTINATION_LOST = "destination-lost"
TOO_LONG = f"took longer than {COPY_S_MAX:g} s"

OPEN_MAX = 64
"""Copies, and reclamations, under way in the pool. More would wait at the agents, which take in a few at a time."""

REST_SCANS = 30
"""What fails would fail again at once, and demand for it is still there: without a rest each scan asked for it."""

LOSSES = (BlocksEvicted, CacheReported, NodeLost, NodeDeclaredLost, NodeRegistered, EpochCommitted)
"""Events after which a worker may hold less."""

HEARD = frozenset(
    {
        *LOSSES, BlocksStored, ReplicationRequested, ReplicaInstalled, ReplicationFailed, ReclamationRequested,
        ReplicaReclaimed, ReclamationFailed, CacheScanCompleted,
    }
)  # fmt: skip
"""What operations follow."""


@dataclass(slots=True)
class Operation:
    """A copy under way. Times are the clocks of the events that said so."""

    asked: ReplicationRequested
    since_ns: int
    copied_ns: int | None = None


@dataclass(slots=True)
class Reclaiming:
    """A reclamation under way; see `reclamation`."""

    asked: ReclamationRequested
    since_ns: int
    gone_ns: int | None = None
    freed_blocks: int = 0


@dataclass(slots=True)
class Operations:
    """State of the fold: open copies and open reclamations by id. `resting` counts the scans until what has failed for a block
    at a worker may be asked for there again."""

    open: dict[str, Operation] = field(default_factory=dict)
    reclaiming: dict[str, Reclaiming] = field(default_factory=dict)
    resting: dict[tuple[bytes, WorkerId], int] = field(default_factory=dict)


class Wish(NamedTuple):
    """A copy that demand asks for. `operation` is an id that nobody has used; `sources` hold z, the best first."""

    operation: str
    z: BlockId
    degree: int
    kind: Literal["inter", "intra"]
    sources: tuple[WorkerId, ...]
    destination: WorkerId
    score: float


def evolve(operations: Operations, stored: Stored, holders: Holders) -> None:
    """Fold one event. `holders` have folded it already."""
    if type(stored.data) not in HEARD:
        return
    if isinstance(stored.data, LOSSES):
        _notice_losses(operations, stored, holders)
    match stored.data:
        case ReplicationRequested() as data:
            # What came or went while the request was being stored has no event behind it that would end the operation.
            there = holders.index.holds(data.destination, BlockId(data.z))
            now_ns = stored.event.time_ns
            operations.open[data.operation] = Operation(data, now_ns, copied_ns=now_ns if there else None)
        case ReplicaInstalled() as data:
            operations.open.pop(data.operation, None)
        case ReplicationFailed() as data:
            operations.open.pop(data.operation, None)
            operations.resting[data.z, data.destination] = REST_SCANS
        case BlocksStored() | CacheReported() as data:
            for each in operations.open.values():
                there = each.asked.destination == data.worker and holders.index.holds(
                    data.worker, BlockId(each.asked.z)
                )
                if there and each.copied_ns is None:
                    each.copied_ns = stored.event.time_ns
        case ReclamationRequested() as data:
            gone = not holders.index.holds(data.worker, BlockId(data.z))
            now_ns = stored.event.time_ns
            operations.reclaiming[data.operation] = Reclaiming(data, now_ns, gone_ns=now_ns if gone else None)
        case ReplicaReclaimed() as data:
            operations.reclaiming.pop(data.operation, None)
        case ReclamationFailed() as data:
            operations.reclaiming.pop(data.operation, None)
            operations.resting[data.z, data.worker] = REST_SCANS
        case CacheScanCompleted():
            operations.resting = {each: left - 1 for each, left in operations.resting.items() if left > 1}
        case _:
            pass


def _notice_losses(operations: Operations, stored: Stored, holders: Holders) -> None:
    """z may be gone by the reclamation or by itself; only the agent's answer to the former counts as freed by it."""
    asked_for = operations.reclaiming.get(stored.event.correlation or "")
    if asked_for is not None and isinstance(stored.data, BlocksEvicted):
        asked_for.freed_blocks += len(stored.data.block_ids) // BLOCK_ID_BYTES
    for each in operations.reclaiming.values():
        if each.gone_ns is None and not holders.index.holds(each.asked.worker, BlockId(each.asked.z)):
            each.gone_ns = stored.event.time_ns


def request(operations: Operations, trie: Trie, holders: Holders, pool: Pool, wish: Wish) -> list[ReplicationRequested]:
    """`replication-requested`, or [] if it is under way, done, or cannot be: the destination must be schedulable, and a
    source must hold z."""
    node, destination = trie.nodes.get(wish.z), pool.workers.get(wish.destination)
    sources = tuple(source for source in wish.sources if holders.index.holds(source, wish.z))
    twin = any(
        each.asked.z == wish.z and each.asked.destination == wish.destination for each in operations.open.values()
    )
    if node is None or destination is None or not sources or twin or wish.operation in operations.open:
        return []
    if not pool.schedulable(destination) or holders.index.holds(wish.destination, wish.z):
        return []
    first_depth = holders.matched(node.path).get(wish.destination, 0)
    return [
        ReplicationRequested(
            operation=wish.operation,
            z=wish.z,
            degree=wish.degree,
            kind=wish.kind,
            sources=sources,
            destination=wish.destination,
            first_depth=first_depth,
            blocks=node.depth + 1 - first_depth,
            score=wish.score,
            way="computed" if computes_copies(pool, destination) else "read",
        )
    ]


def computes_copies(pool: Pool, worker: Worker) -> bool:
    """Whether the worker's engine has no way to read blocks, so that a copy costs it a prefill of what it lacks."""
    spec = pool.nodes[worker.node].spec
    return spec is not None and spec.engine == "sglang"


def order(operation: Operation, trie: Trie, term: int) -> Copy | None:
    """What to ask of the destination's agent; None once it is copied or z is forgotten, and if z is not below `first_depth`."""
    asked = operation.asked
    node = trie.nodes.get(BlockId(asked.z))
    if operation.copied_ns is not None or node is None or asked.first_depth > node.depth:
        return None
    path = node.path
    return Copy(
        term=term,
        operation=asked.operation,
        source=asked.sources[0],
        destination=asked.destination,
        parent=path[asked.first_depth - 1] if asked.first_depth else None,
        block_ids=b"".join(path[asked.first_depth :]),
        deadline_us=round(COPY_S_MAX * US_PER_S),
        more_sources=asked.sources[1:],
    )


def settle(operation: Operation, pool: Pool, now_ns: int, told: str | None = None) -> list[EventData]:
    """`replica-installed`, `replication-failed`, or nothing yet. `told` is why the agent says that it cannot be."""
    asked = operation.asked
    if operation.copied_ns is not None:
        copy_us = (operation.copied_ns - operation.since_ns) // 1_000
        return [
            ReplicaInstalled(
                operation=asked.operation,
                z=asked.z,
                destination=asked.destination,
                blocks=asked.blocks,
                copy_us=copy_us,
            )
        ]
    destination = pool.workers.get(asked.destination)
    if destination is None or not pool.nodes[destination.node].alive:
        reason = DESTINATION_LOST
    elif told is not None:
        reason = told
    elif now_ns - operation.since_ns > COPY_S_MAX * 1e9:
        reason = TOO_LONG
    else:
        return []
    return [ReplicationFailed(operation=asked.operation, z=asked.z, destination=asked.destination, reason=reason)]
