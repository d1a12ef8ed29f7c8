"""What the workers of a coming epoch start with: the prefix metadata of a switch (paper, section 4.3).

Nothing moves in a switch, so what is certain follows from which ranks stay together:

    the same ranks           everything the worker held
    a merge, cyclic layout   everything either sibling held: its blocks lie on ranks of the merged worker
    a merge, replicated      what both siblings held: a block has to be on all ranks
    a split, replicated      everything the parent held, at both children
    a split, cyclic layout   nothing: where a block lies depends on the geometry it was stored under, which only the
                             agent knows; its report after the switch says what each child can use

In a split with the cyclic layout each prefix is assigned to one child, hot ones to all (`assigning.py`), and is *pending*
there: its blocks lie on the siblings' ranks too, and come with the first request that wants them. What was pending before
stays so, also through another switch. Metadata that does not fit one event is left out; of certain blocks the agent's report
brings it.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

from services.cachemgr.assigning import assign
from services.cachemgr.node import INDEX
from services.cachemgr.trie import Trie
from shared.contracts.events import BlockRun, PlacementReconciled, ReconciledWorker, ReconfigurationPlanned
from shared.contracts.ids import BlockId, worker_id
from shared.model.holders import Holders
from shared.model.lattice import Group, groups_of
from shared.model.parameters import Parameters
from shared.model.pending import Parents
from shared.model.pool import Node, Worker

METADATA_BYTES_MAX = 800_000
"""Of one event, which may have 1,000,000."""

RUN_BYTES, BLOCK_BYTES = 90, 22
"""What a run and each of its blocks take in JSON, at most."""


class Known(NamedTuple):
    """What the metadata follows from, besides the plan and its node."""

    holders: Holders
    trie: Trie
    parameters: Parameters


def reconcile(plan: ReconfigurationPlanned, node: Node, known: Known) -> PlacementReconciled:
    """The metadata of the plan's epoch. `node` still has the workers of the old one."""
    assert node.spec is not None, "a node that is reconfigured has registered"
    cyclic = node.spec.kv_layout == "cyclic"
    groups = groups_of(plan.new_composition)
    certain = {group: _certain(group, node, known.holders, cyclic) for group in groups}
    pending = _pending(groups, node, known) if cyclic else {}
    retained: dict[Group, tuple[BlockRun, ...]] = {}
    room = METADATA_BYTES_MAX
    for group in groups:
        retained[group], room = _fitting(runs_of(certain[group]), room)
    workers = []
    for number, group in enumerate(groups):
        # What one worker does not need of its share is the next one's.
        share = room // (len(groups) - number)
        runs, left = _fitting(runs_of(pending.get(group, {})), share)
        room -= share - left
        worker = worker_id(plan.node, plan.epoch, group.first_rank)
        workers.append(ReconciledWorker(worker=worker, retained=retained[group], pending=runs))
    return PlacementReconciled(node=plan.node, epoch=plan.epoch, workers=tuple(workers))


def _fitting(runs: Iterable[BlockRun], room: int) -> tuple[tuple[BlockRun, ...], int]:
    """The first of `runs` that have room together, and what is left of it."""
    found: list[BlockRun] = []
    for run in runs:
        needed = RUN_BYTES + len(run.block_ids) // 16 * BLOCK_BYTES
        if needed > room:
            break
        room -= needed
        found.append(run)
    return tuple(found), room


def _overlapping(group: Group, node: Node) -> list[Worker]:
    return [worker for worker in node.workers if set(worker.group.ranks) & set(group.ranks)]


def _certain(group: Group, node: Node, holders: Holders, cyclic: bool) -> Parents:
    """What the group's worker can surely use."""
    old = _overlapping(group, node)
    held: list[dict[BlockId, BlockId | None]] = [dict(holders.index.held(worker.id)) for worker in old]
    if len(old) == 1 and old[0].group != group and cyclic:
        return {}
    if len(old) == 1:
        return held[0]
    kept = reduce(or_ if cyclic else and_, (each.keys() for each in held))
    together = reduce(or_, held)
    return {block: parent for block, parent in together.items() if block in kept}


def _pending(groups: Iterable[Group], node: Node, known: Known) -> dict[Group, Parents]:
    """What each group's worker may bring from other ranks: what it was assigned, or what its parts had pending."""
    found: dict[Group, Parents] = {}
    children: dict[Group, list[Group]] = {}
    for group in groups:
        old = _overlapping(group, node)
        if len(old) == 1 and old[0].group != group:
            children.setdefault(old[0].group, []).append(group)
        else:
            found[group] = reduce(or_, (dict(known.holders.pending.at(worker.id)) for worker in old))
    for worker in node.workers:
        if worker.group in children:
            found.update(_assigned(worker, children[worker.group], node, known))
    return found


def _assigned(ending: Worker, children: list[Group], node: Node, known: Known) -> Iterator[tuple[Group, Parents]]:
    """What `ending` held, and what was pending there, by child."""
    assert node.spec is not None, "a node that is reconfigured has registered"
    degree, trie = INDEX[ending.degree], known.trie

    def demand(block: BlockId) -> float:
        found = trie.nodes.get(block)
        return trie.demand(found).access[degree] / max(1, found.replicas[degree]) if found is not None else 0.0

    parents = {**known.holders.pending.at(ending.id), **dict(known.holders.index.held(ending.id))}
    rooms = [node.spec.blocks_per_rank * child.degree for child in children]
    return zip(children, assign(parents, demand, known.parameters.theta_intra, rooms), strict=True)


def runs_of(parents: Parents) -> Iterator[BlockRun]:
    """The tree as runs, parents before children. A run ends where the tree branches."""
    children: dict[BlockId | None, list[BlockId]] = {}
    for block, parent in parents.items():
        children.setdefault(parent, []).append(block)
    starts: list[tuple[BlockId | None, BlockId]] = [(None, block) for block in children.get(None, ())]
    for parent, block in starts:
        run = [block]
        while len(below := children.get(run[-1], [])) == 1:
            run.append(below[0])
        yield BlockRun(parent=parent, block_ids=b"".join(run))
        starts.extend((run[-1], child) for child in below)
