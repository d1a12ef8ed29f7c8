"""What the workers of a coming epoch start with: the prefix metadata of a switch (paper, section 4.3).

Nothing moves in a switch, so what is certain follows from which ranks stay together:

    the same ranks           everything the worker held
    a merge, cyclic layout   everything either sibling held: its blocks lie on ranks of the merged worker
    a merge, replicated      what both siblings held: a block has to be on all ranks
    a split, replicated      everything the parent held, at both children
    a split, cyclic layout   nothing: where a block lies depends on the geometry it was stored under, which only the
                             agent knows; its report after the switch says what each child can use

Metadata that does not fit one event is left out; the agent's report brings it. Choosing which child serves which prefix by
demand, and fetching what lies on the sibling, is a policy and not here.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import and_, or_

from shared.contracts.events import BlockRun, PlacementReconciled, ReconciledWorker, ReconfigurationPlanned
from shared.contracts.ids import BlockId, worker_id
from shared.model.holders import Holders
from shared.model.lattice import Group, groups_of
from shared.model.pool import Node

METADATA_BYTES_MAX = 800_000
"""Of one event, which may have 1,000,000."""

RUN_BYTES, BLOCK_BYTES = 90, 22
"""What a run and each of its blocks take in JSON, at most."""

Parents = Mapping[BlockId, BlockId | None]
"""Each held block's parent; prefix-closed."""


def reconcile(plan: ReconfigurationPlanned, node: Node, holders: Holders) -> PlacementReconciled:
    """The metadata of the plan's epoch. `node` still has the workers of the old one."""
    assert node.spec is not None, "a node that is reconfigured has registered"
    room = METADATA_BYTES_MAX
    workers = []
    for group in groups_of(plan.new_composition):
        retained: list[BlockRun] = []
        for run in runs_of(_certain(group, node, holders, node.spec.kv_layout == "cyclic")):
            room -= RUN_BYTES + len(run.block_ids) // 16 * BLOCK_BYTES
            if room < 0:
                break
            retained.append(run)
        worker = worker_id(plan.node, plan.epoch, group.first_rank)
        workers.append(ReconciledWorker(worker=worker, retained=tuple(retained)))
    return PlacementReconciled(node=plan.node, epoch=plan.epoch, workers=tuple(workers))


def _certain(group: Group, node: Node, holders: Holders, cyclic: bool) -> Parents:
    """What the group's worker can surely use."""
    old = [worker for worker in node.workers if set(worker.group.ranks) & set(group.ranks)]
    held: list[dict[BlockId, BlockId | None]] = [dict(holders.index.held(worker.id)) for worker in old]
    if len(old) == 1 and old[0].group != group and cyclic:
        return {}
    if len(old) == 1:
        return held[0]
    kept = reduce(or_ if cyclic else and_, (each.keys() for each in held))
    together = reduce(or_, held)
    return {block: parent for block, parent in together.items() if block in kept}


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
