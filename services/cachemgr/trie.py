"""The global prefix trie: a node per block that anybody holds or held, with the demand for it (paper, section 4.4).

Holders are `shared.model.holders`; the trie is told of each change (`held`, `dropped`) and keeps what they do not: the
tree, how many workers of each degree have a node, and two statistics per degree, `access` and `missed` (seconds).

1.  After every scan both statistics are multiplied by `decay`. Nobody walks the trie for that: a value is stored with the
    number of the scan it was true at, and read as value × decay ^ (scans since).
2.  Only *hot* nodes can be candidates for a copy, or be demanded enough to be kept: those with access of at least
    θ_reclaim or missed above θ_inter at some degree. They are noticed when demand is added; a scan walks only them. What
    is reclaimable is everything else that has a replica, and that number is known.
3.  Reading never changes what is stored, so every process that folds the log has the same bits.
4.  A node without holders stays, for its demand may return, but only `HOLDERLESS_MAX` of them, oldest out first.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import nlargest
from typing import NamedTuple

from shared.contracts.ids import BlockId, WorkerId
from shared.model.holders import Holders
from shared.model.lattice import DEGREES
from shared.model.parameters import Parameters

HOLDERLESS_MAX = 100_000
"""Nodes without a holder; with their demand about 50 MB."""

RECENT_MAX = 20_000
"""Nodes that were demanded last: where `hottest` looks."""

COLD = 1e-6
"""A statistic below this is 0: under any allowed threshold by a factor of 1,000."""

INDEX = {degree: index for index, degree in enumerate(DEGREES)}


@dataclass(slots=True, eq=False)
class Node:
    """One block. Lists are by degree (`INDEX`); `access` and `missed` are as of scan `stamp`, None if there never was any."""

    block: BlockId
    parent: "Node | None"
    depth: int
    children: int = 0
    replicas: list[int] = field(default_factory=lambda: [0] * len(DEGREES))
    access: list[float] | None = None
    missed: list[float] | None = None
    stamp: int = 0


class Demand(NamedTuple):
    """Both statistics of a node now, by `INDEX`."""

    access: tuple[float, ...]
    missed: tuple[float, ...]


class Candidate(NamedTuple):
    """A (z, C) of one of Algorithm 2's lists, with its replicas and its statistic."""

    node: Node
    degree: int
    replicas: int
    score: float


class Candidates(NamedTuple):
    """Algorithm 2's lists. Reclaimable pairs are counted only: a cold trie is all of them."""

    inter: list[Candidate]
    intra: list[Candidate]
    reclaimable: int


NONE = (0.0,) * len(DEGREES)


class Trie:
    """A `holders.Watcher`. Calls come from one fold."""

    def __init__(self, parameters: Parameters) -> None:
        self.nodes: dict[BlockId, Node] = {}
        self.degrees: dict[WorkerId, int] = {}
        self.scan = 0
        self.copies = 0
        """How many (worker, block) there are."""
        self._parameters = parameters
        self._pairs = 0
        self._ceiling = 0.0
        self._hot: dict[BlockId, Node] = {}
        self._holderless: OrderedDict[BlockId, Node] = OrderedDict()
        self._recent: OrderedDict[BlockId, Node] = OrderedDict()

    # --- holders

    def held(self, worker: WorkerId, parent: BlockId | None, blocks: Sequence[BlockId]) -> None:
        """A worker of a known degree holds more blocks, each the parent of the next."""
        index = INDEX[self.degrees[worker]]
        for block in blocks:
            node = self.nodes.get(block) or self._plant(block, parent)
            if not any(node.replicas):
                self._holderless.pop(block, None)
            self._pairs += not node.replicas[index]
            node.replicas[index] += 1
            parent = block
        self.copies += len(blocks)

    def dropped(self, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
        """A worker holds these blocks no longer. Call `trim` after the last ones."""
        index = INDEX[self.degrees[worker]]
        for block in blocks:
            node = self.nodes[block]
            node.replicas[index] -= 1
            self._pairs -= not node.replicas[index]
            if not any(node.replicas):
                self._holderless[block] = node
        self.copies -= len(blocks)

    def trim(self) -> None:
        """Forget the oldest nodes without holders beyond the bound. A child loses its last holder before its parent does, so
        the oldest is a leaf."""
        while len(self._holderless) > HOLDERLESS_MAX:
            block, node = self._holderless.popitem(last=False)
            assert not node.children, f"{block.hex()}: lost its last holder before its children did"
            if node.parent is not None:
                node.parent.children -= 1
            for index in (self.nodes, self._hot, self._recent):
                index.pop(block, None)

    # --- demand

    def accessed(self, node: Node, degree: int) -> None:
        """A request reused the node at a degree-C worker."""
        self._settle(node)
        if node.access is None:
            node.access = list(NONE)
        node.access[INDEX[degree]] = value = node.access[INDEX[degree]] + 1.0
        self._demanded(node, value, value >= self._parameters.theta_reclaim)

    def missed(self, node: Node, degree: int, benefit_s: float) -> None:
        """A request would have saved `benefit_s` at degree C, where nobody has the node."""
        self._settle(node)
        if node.missed is None:
            node.missed = list(NONE)
        node.missed[INDEX[degree]] = value = node.missed[INDEX[degree]] + benefit_s
        self._demanded(node, value, value > self._parameters.theta_inter)

    def demand(self, node: Node) -> Demand:
        """Both statistics now."""
        factor = power(self._parameters.decay, self.scan - node.stamp)
        return Demand(_decayed(node.access or NONE, factor), _decayed(node.missed or NONE, factor))

    # --- questions

    def matched(self, chain: Sequence[BlockId], degree: int | None = None) -> int:
        """How many leading blocks of the chain somebody holds, or some worker of one degree: O(log blocks)."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            node = self.nodes.get(chain[middle - 1])
            if node is not None and (any(node.replicas) if degree is None else node.replicas[INDEX[degree]]):
                low = middle
            else:
                high = middle - 1
        return low

    def path(self, node: Node) -> list[BlockId]:
        """The blocks from the root to `node`."""
        blocks = []
        above: Node | None = node
        while above is not None:
            blocks.append(above.block)
            above = above.parent
        return blocks[::-1]

    @property
    def warm(self) -> bool:
        """Whether any statistic may still be above 0."""
        return self._ceiling >= COLD

    def candidates(self) -> Candidates:
        """Algorithm 2's lists now, in no order."""
        inter, intra, kept = [], [], 0
        limits, decay = self._parameters, self._parameters.decay
        for node in self._hot.values():
            factor = power(decay, self.scan - node.stamp)
            demand = zip(DEGREES, node.replicas, node.access or NONE, node.missed or NONE, strict=True)
            for degree, replicas, access, missed in demand:
                if replicas:
                    if access * factor > replicas * limits.theta_intra:
                        intra.append(Candidate(node, degree, replicas, access * factor / replicas))
                    kept += access * factor >= replicas * limits.theta_reclaim
                elif missed * factor > limits.theta_inter:
                    inter.append(Candidate(node, degree, 0, missed * factor))
        return Candidates(inter, intra, self._pairs - kept)

    def hottest(self, limit: int) -> list[tuple[Node, Demand]]:
        """The most demanded of the nodes demanded last: by access, then by missed seconds."""
        demanded = ((node, self.demand(node)) for node in self._recent.values())
        return nlargest(limit, demanded, key=lambda each: (sum(each[1].access), sum(each[1].missed)))

    # --- time and thresholds

    def scanned(self, scan: int) -> None:
        """Scan number `scan` is over: statistics decay, and nodes cool."""
        # Where scans were dropped from the log it jumps, but never back.
        self.scan = max(scan, self.scan + 1)
        self._ceiling *= self._parameters.decay
        self._hot = {block: node for block, node in self._hot.items() if self._is_hot(node)}

    def retune(self, parameters: Parameters) -> None:
        """Other thresholds or another decay hold from here on. The one walk over all nodes; operators are rare."""
        for node in self.nodes.values():
            self._settle(node)
        self._parameters = parameters
        self._hot = {block: node for block, node in self.nodes.items() if self._is_hot(node)}

    # --- inside

    def _plant(self, block: BlockId, parent: BlockId | None) -> Node:
        above = self.nodes[parent] if parent is not None else None
        node = self.nodes[block] = Node(block, above, above.depth + 1 if above else 0, stamp=self.scan)
        if above is not None:
            above.children += 1
        return node

    def _settle(self, node: Node) -> None:
        """Bring the stored values to this scan, so that something can be added."""
        if node.stamp == self.scan:
            return
        factor = power(self._parameters.decay, self.scan - node.stamp)
        node.access = node.access and list(_decayed(node.access, factor))
        node.missed = node.missed and list(_decayed(node.missed, factor))
        node.stamp = self.scan

    def _demanded(self, node: Node, value: float, makes_hot: bool) -> None:
        self._ceiling = max(self._ceiling, value)
        if makes_hot:
            self._hot[node.block] = node
        self._recent[node.block] = node
        self._recent.move_to_end(node.block)
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    def _is_hot(self, node: Node) -> bool:
        factor = power(self._parameters.decay, self.scan - node.stamp)
        if node.access is not None and max(node.access) * factor >= self._parameters.theta_reclaim:
            return True
        return node.missed is not None and max(node.missed) * factor > self._parameters.theta_inter

    # --- self-check

    def check(self, holders: Holders) -> None:
        """The tree is whole, counts agree with the holders, and every index has exactly what it should."""
        for block, node in self.nodes.items():
            copies = [0] * len(DEGREES)
            for worker in holders.index.holders(block):
                copies[INDEX[self.degrees[worker]]] += 1
            assert node.replicas == copies, f"{block.hex()}: {node.replicas} replicas are counted, {copies} are held"
            assert (node.parent is None) == (node.depth == 0), f"{block.hex()}: its depth is {node.depth}"
            if node.parent is not None:
                assert self.nodes.get(node.parent.block) is node.parent, f"{block.hex()}: its parent is forgotten"
                assert node.depth == node.parent.depth + 1, f"{block.hex()}: its depth is {node.depth}"
            assert (block in self._holderless) != any(copies), f"{block.hex()}: holderless or not?"
            assert (block in self._hot) == self._is_hot(node), f"{block.hex()}: hot or not?"
            assert max(map(max, self.demand(node))) <= self._ceiling * (1 + 1e-9), f"{block.hex()}: above the ceiling"
        children = Counter(node.parent.block for node in self.nodes.values() if node.parent is not None)
        assert all(node.children == children[block] for block, node in self.nodes.items()), "children are miscounted"
        for index in (self._hot, self._holderless, self._recent):
            assert all(self.nodes.get(block) is node for block, node in index.items()), "a forgotten node is indexed"
        assert holders.index.index.keys() <= self.nodes.keys(), "a held block has no node"
        assert self.copies == sum(holders.index.counts.values()), "copies are miscounted"
        assert self._pairs == sum(map(bool, (r for node in self.nodes.values() for r in node.replicas))), "pairs"
        assert len(self._holderless) <= HOLDERLESS_MAX, "too many nodes without holders are kept"


def _decayed(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(value * factor if value * factor >= COLD else 0.0 for value in values)


@lru_cache(maxsize=4_096)
def power(decay: float, scans: int) -> float:
    """decay ^ scans by multiplications alone: `pow` may differ in the last bit from one machine to another."""
    result, square = 1.0, decay
    while scans:
        if scans & 1:
            result *= square
        square *= square
        scans >>= 1
    return result
