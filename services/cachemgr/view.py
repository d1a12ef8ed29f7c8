"""What a scan's choices look at: load, room and pressure of workers, out of the folded state. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from services.cachemgr.replication import Operations, computes_copies
from services.cachemgr.trie import Trie
from shared.contracts.ids import BlockId, WorkerId, node_of
from shared.model.backlog import Backlog
from shared.model.cost import Coefficients
from shared.model.holders import Holders
from shared.model.parameters import Parameters
from shared.model.pool import Pool, Worker

FIRST, SECOND, PRESENT = 1, 2, 3
"""The rules of scans that do not say theirs, those that looked no further than what nobody could give up or copy (ADR 20), and
those of today."""


class Load(NamedTuple):
    """Sorts by what waits there."""

    service_us: int
    worker: WorkerId


class Destination(NamedTuple):
    """A worker that may take z, with what it lacks of the path. Sorts by `rank`, then by load."""

    rank: int
    load: Load
    worker: Worker
    blocks: int


@dataclass(frozen=True, slots=True)
class View:
    """What a choice looks at, and by which `rules` (`CacheScanCompleted.rules`). `promised` are the blocks that it has chosen
    to copy, by destination."""

    trie: Trie
    holders: Holders
    pool: Pool
    backlog: Backlog
    operations: Operations
    parameters: Parameters
    coefficients: Coefficients
    rules: int
    promised: Counter[WorkerId] = field(default_factory=Counter)

    def copy_us(self, place: Destination, path_blocks: int) -> int:
        """What a copy of a path costs the ranks of its destination: nothing where it is read beside their steps."""
        if not computes_copies(self.pool, place.worker):
            return 0
        spec = self.pool.nodes[place.worker.node].spec
        assert spec is not None, "a worker's node has registered"
        cached_tokens = (path_blocks - place.blocks) * spec.block_tokens
        return self.coefficients.prefill_us(place.worker.degree, place.blocks * spec.block_tokens, cached_tokens)

    def capacity(self, worker: Worker) -> int:
        """Blocks of KV memory."""
        spec = self.pool.nodes[worker.node].spec
        assert spec is not None, "a worker's node has registered"
        return spec.blocks_per_rank * (worker.degree if spec.kv_layout == "cyclic" else 1)

    def evicts(self, worker: Worker) -> bool:
        """Whether it can give up one prefix without the others."""
        spec = self.pool.nodes[worker.node].spec
        assert spec is not None, "a worker's node has registered"
        return spec.evicts

    def gives_up(self, worker: Worker) -> bool:
        """Whether it may be asked to give up a prefix now."""
        return self.pool.schedulable(worker) and self.evicts(worker)

    def room(self, worker: Worker) -> int:
        """Blocks that neither prompts under way nor copies need, on their way or chosen. Cached ones make room."""
        spec = self.pool.nodes[worker.node].spec
        assert spec is not None, "a worker's node has registered"
        prompts = -(-self.backlog.at(worker.id).prompt_tokens // spec.block_tokens)
        copies = sum(each.asked.blocks for each in self.operations.open.values() if each.asked.destination == worker.id)
        return self.capacity(worker) - prompts - copies - self.promised[worker.id]

    def load(self, worker: WorkerId) -> Load:
        return Load(self.backlog.at(worker).service_us, worker)

    def pressure(self, worker: Worker) -> float:
        """How full its cache is."""
        return self.holders.index.counts.get(worker.id, 0) / self.capacity(worker)

    def can_lend(self, block: BlockId, reader: Worker) -> list[WorkerId]:
        """The holders of a block that have the reader's engine: what another kind lends it could not read."""
        holders = self.holders.index.holders(block)
        if self.rules == FIRST:
            return holders
        return [each for each in holders if self.engine(each) == self.engine(reader.id)]

    def engine(self, worker: WorkerId) -> str | None:
        """What runs there; None for a worker of a node that is not known."""
        node = self.pool.nodes.get(node_of(worker))
        return node.spec.engine if node is not None and node.spec is not None else None

    def holding(self, block: BlockId, degree: int) -> list[Worker]:
        """The workers of a degree that have a block, and may be asked something."""
        holders = map(self.pool.workers.get, self.holders.index.holders(block))
        return [each for each in holders if each is not None and each.degree == degree and self.pool.schedulable(each)]

    def of_degree(self, degree: int) -> list[Worker]:
        """The workers that may be given something."""
        return [each for each in self.pool.workers.values() if each.degree == degree and self.pool.schedulable(each)]
