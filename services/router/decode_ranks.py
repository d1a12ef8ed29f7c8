"""Which decode rank goes on from a prefill. Pure.

A rank takes so many requests at a time (`NodeRegistered.decode_sequences`), and what is beyond that waits. So in this order:

1.  the ranks of the prefill's own node that have room, because KV moves within a node by a copy in memory;
2.  ranks of other nodes with the same model that have room, if the prefill's node can hand off to another;
3.  the node's own, and then the others', whatever waits there.

Of several it is the one with the fewest reserved output tokens, and of equals the lowest. A node that has not said how many it
takes has room for as many as come, and takes none from elsewhere. One whose agent did not answer comes last.
"""

from collections.abc import Collection, Iterable
from itertools import chain

from services.router.loads import Loads
from shared.contracts.ids import NodeId, WorkerId, decode_worker_id
from shared.model.pool import Node, Pool


def cheapest(pool: Pool, loads: Loads, prefill: NodeId, silent: Collection[NodeId] = ()) -> WorkerId | None:
    """None if nobody decodes what is prefilled there. Nodes in `silent` have not answered."""
    own = pool.nodes[prefill]
    ours = _ranks(pool, own)
    if (rank := _least(loads, _with_room(own, loads, ours))) is not None:
        return rank
    if own.spec is None or not own.spec.hands_off:
        return _least(loads, ours)
    others = [node for node in pool.nodes.values() if node.id != prefill and _takes_from(node, own)]
    free = chain.from_iterable(_with_room(node, loads, _ranks(pool, node)) for node in others if node.id not in silent)
    if (rank := _least(loads, free)) is not None:
        return rank
    return _least(loads, ours) or _least(loads, chain.from_iterable(_ranks(pool, node) for node in others))


def _ranks(pool: Pool, node: Node) -> list[WorkerId]:
    return [decode_worker_id(node.id, rank) for rank in pool.decode_ranks(node.id)]


def _takes_from(node: Node, prefill: Node) -> bool:
    """Whether `node` goes on from a prefill of the other. KV of another model, type or block size is refused there."""
    here, there = node.spec, prefill.spec
    return (
        node.alive
        and here is not None
        and there is not None
        and here.decode_sequences > 0
        and (here.engine, here.model, here.model_revision, here.dtype, here.block_tokens)
        == (there.engine, there.model, there.model_revision, there.dtype, there.block_tokens)
    )


def _with_room(node: Node, loads: Loads, ranks: Iterable[WorkerId]) -> list[WorkerId]:
    limit = node.spec.decode_sequences if node.spec is not None else 0
    return [rank for rank in ranks if not limit or loads.decoding.get(rank, 0) < limit]


def _least(loads: Loads, ranks: Iterable[WorkerId]) -> WorkerId | None:
    return min(ranks, key=lambda rank: (loads.output_tokens.get(rank, 0), rank), default=None)
