"""Blocks that a split has left on ranks their worker does not have: assigned to it, and not usable before they are brought.

`placement-reconciled` says which they are. They are no cached blocks: nothing is credited for them but a fetch from the
worker's own node. They are pending until a prefill of the worker has passed them: then they are held like all its prompt,
whether they came or, because their slots were needed meanwhile, had to be computed. Block events say nothing of them,
as nobody holds them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shared.contracts.events import BlockRun
from shared.contracts.ids import BlockId, WorkerId, unpack_block_ids

Parents = Mapping[BlockId, BlockId | None]
"""Each block's parent; what is above it is in the mapping too, or held."""

NOTHING: Parents = MappingProxyType({})


@dataclass(slots=True)
class Pending:
    """Part of `Holders`. A worker with nothing pending has no entry."""

    of_worker: dict[WorkerId, dict[BlockId, BlockId | None]] = field(default_factory=dict)

    def at(self, worker: WorkerId) -> Parents:
        return self.of_worker.get(worker, NOTHING)

    def workers(self, block: BlockId) -> list[WorkerId]:
        """Where the block is pending."""
        return sorted(worker for worker, pending in self.of_worker.items() if block in pending)

    def reaches(self, worker: WorkerId, chain: Sequence[BlockId], held: int) -> int:
        """How many leading blocks of the chain the worker would have, of which it holds `held`, with what is pending there."""
        pending = self.of_worker.get(worker)
        if pending is None:
            return held
        return next((depth for depth in range(held, len(chain)) if chain[depth] not in pending), len(chain))

    def begin(self, worker: WorkerId, runs: Iterable[BlockRun]) -> None:
        """The worker exists from now on."""
        parents = parents_of(runs)
        if parents:
            self.of_worker[worker] = parents

    def passed(self, worker: WorkerId, blocks: Iterable[BlockId]) -> None:
        """A prefill of the worker has brought or computed these."""
        pending = self.of_worker.get(worker)
        if pending is not None:
            for block in blocks:
                pending.pop(block, None)
            if not pending:
                del self.of_worker[worker]

    def forget(self, worker: WorkerId) -> None:
        """The worker or what lies on its node is gone."""
        self.of_worker.pop(worker, None)


def parents_of(runs: Iterable[BlockRun]) -> dict[BlockId, BlockId | None]:
    """The blocks of some runs with the parent of each."""
    parents: dict[BlockId, BlockId | None] = {}
    for run in runs:
        above = BlockId(run.parent) if run.parent is not None else None
        for block in unpack_block_ids(run.block_ids):
            parents[block] = above
            above = block
    return parents
