"""One replica given up, from the request to the worker's report that it is gone.

    reclamation-requested ──evict to the agent──▶ blocks-evicted ──▶ replica-reclaimed
                          ──in use, limit passed──▶ reclamation-failed

Which, `reclaiming.py` chooses. Children go before parents, and the agent keeps what is in use or has descendants that stay.
"""

from typing import NamedTuple

from services.cachemgr.replication import Operations, Reclaiming
from services.cachemgr.trie import Trie
from shared.contracts.copy_commands import Evict
from shared.contracts.envelope import EventData
from shared.contracts.events import ReclamationFailed, ReclamationRequested, ReplicaReclaimed
from shared.contracts.ids import BlockId, WorkerId
from shared.model.holders import Holders

RECLAIM_S_MAX = 5.0
"""An eviction is bookkeeping, so an agent that has not done it by then does not answer."""

TOO_LONG = f"took longer than {RECLAIM_S_MAX:g} s"


class Excess(NamedTuple):
    """A replica that is not worth its room: `blocks` of the path up from z. `operation` is an id that nobody has used."""

    operation: str
    z: BlockId
    worker: WorkerId
    blocks: int
    score: float


def request(operations: Operations, holders: Holders, excess: Excess) -> list[ReclamationRequested]:
    """`reclamation-requested`, or [] if it is under way or done."""
    if excess.operation in operations.reclaiming or not holders.index.holds(excess.worker, excess.z):
        return []
    if any((each.asked.z, each.asked.worker) == (excess.z, excess.worker) for each in operations.reclaiming.values()):
        return []
    return [
        ReclamationRequested(
            operation=excess.operation,
            z=excess.z,
            worker=excess.worker,
            blocks=excess.blocks,
            score=excess.score,
        )
    ]


def order(reclaiming: Reclaiming, trie: Trie, term: int) -> Evict | None:
    """What to ask of the worker's agent; None once z is gone."""
    asked = reclaiming.asked
    node = trie.nodes.get(BlockId(asked.z))
    if reclaiming.gone_ns is not None or node is None:
        return None
    path = [each.block for each, _ in zip(node.upwards(), range(asked.blocks), strict=False)]
    return Evict(term=term, operation=asked.operation, worker=asked.worker, block_ids=b"".join(path[::-1]))


def settle(reclaiming: Reclaiming, now_ns: int, told: str | None = None) -> list[EventData]:
    """`replica-reclaimed`, `reclamation-failed`, or nothing yet. `told` is why the agent says that it cannot be."""
    asked = reclaiming.asked
    if reclaiming.gone_ns is not None:
        freed = reclaiming.freed_blocks
        return [ReplicaReclaimed(operation=asked.operation, z=asked.z, worker=asked.worker, blocks=freed)]
    if told is None and now_ns - reclaiming.since_ns <= RECLAIM_S_MAX * 1e9:
        return []
    return [ReclamationFailed(operation=asked.operation, z=asked.z, worker=asked.worker, reason=told or TOO_LONG)]
