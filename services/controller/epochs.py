"""Which epoch each node should serve outside of a saga, and the commit that makes it so.

    never committed                  adopt epoch 1, the configured composition; commit
    booted something older           adopt the committed epoch again; nothing to commit
    adopted something uncommitted    adopt the committed composition under a number that nobody has used; commit
    new ranks do not fit             adopt the configured composition under the next number; commit

The agent answers when every rank has adopted. A leader that dies between that answer and its commit leaves a node whose
ranks serve an uncommitted epoch; the next leader finds it here. Epoch 1 is asked for again under its own number, and the agent
answers again, unless it was configured otherwise meanwhile: then it refuses, and the next number is asked for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from services.controller.capacity import CapacityOf
from services.controller.decider import Incarnation, State
from services.controller.misfits import misfit
from services.controller.saga import committed_workers
from shared.contracts.commands import Adopt
from shared.contracts.envelope import EventData
from shared.contracts.events import EpochCommitted, NodeRegistered
from shared.contracts.ids import NodeId
from shared.model.lattice import Composition
from shared.model.pool import Node


class Configured(NamedTuple):
    """Compositions by node, and the one for every other node."""

    default: Composition
    by_node: Mapping[NodeId, Composition]

    def of(self, node: NodeId) -> Composition:
        return self.by_node.get(node, self.default)


class Wanted(NamedTuple):
    """What one incarnation of a node should serve; `misfit` says why it cannot."""

    node: NodeId
    incarnation: int
    epoch: int
    composition: Composition
    misfit: str | None = None

    def adopt(self, term: int) -> Adopt:
        return Adopt(
            term=term,
            node=self.node,
            incarnation=self.incarnation,
            epoch=self.epoch,
            composition=self.composition,
        )


def wanted(state: State, configured: Configured, refused: Mapping[Incarnation, int]) -> list[Wanted]:
    """One entry for each living node that serves something else than it should and is not in a saga, in id order.

    `refused` holds the newest epoch that an incarnation has refused as stale.
    """
    nodes = sorted(state.pool.nodes.values(), key=lambda node: node.id)
    found = (
        _wanted(
            node,
            node.spec,
            configured.of(node.id),
            max(state.sagas.last_epoch.get(node.id, 0), refused.get(Incarnation(node.id, node.incarnation), 0)),
        )
        for node in nodes
        if node.alive and node.spec is not None and node.id not in state.sagas.open
    )
    return [each for each in found if each is not None]


def _wanted(node: Node, spec: NodeRegistered, configured: Composition, used: int) -> Wanted | None:
    """`used` is the newest epoch number that may not be taken for another composition."""
    served = set(node.adopted.values())
    if node.epoch and served == {node.epoch} and misfit(spec, node.composition) is None:
        return None
    unused = max(node.epoch, used, *served) + 1
    if node.epoch == 0:
        epoch, composition = (unused if used else 1), configured
    elif misfit(spec, node.composition):
        epoch, composition = unused, configured
    elif max(served) > node.epoch:
        epoch, composition = unused, node.composition
    else:
        epoch, composition = node.epoch, node.composition
    return Wanted(node.id, node.incarnation, epoch, composition, misfit(spec, composition))


def commit(state: State, adopted: Wanted, capacity_of: CapacityOf) -> list[EventData]:
    """`epoch-committed` for what a node has adopted; [] if it is committed, or the node has moved on since."""
    node = state.pool.nodes[adopted.node]
    moved_on = not node.alive or node.incarnation != adopted.incarnation or adopted.node in state.sagas.open
    if moved_on or adopted.epoch <= node.epoch:
        return []
    return [
        EpochCommitted(
            node=adopted.node,
            epoch=adopted.epoch,
            composition=adopted.composition,
            workers=committed_workers(adopted.node, adopted.epoch, adopted.composition, capacity_of),
        )
    ]
