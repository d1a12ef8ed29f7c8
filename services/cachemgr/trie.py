"""The global prefix trie: a node per block that anybody holds or held, with the demand for it (paper, section 4.4).

Holders are `shared.model.holders`; the trie is told of each change (`held`, `dropped`) and keeps what they do not: the
tree, how many workers of each degree have a node, and two statistics per degree, `access` and `missed` (seconds).

1.  After every scan both statistics are multiplied by `decay`. Nobody walks the trie for that: a value is stored with the
    number of the scan it was true at, and read as value × decay ^ (scans since).
2.  Only *hot* nodes can be candidates for a copy, or be demanded enough to be kept: those with access of at least
    θ_reclaim or missed above θ_inter at some degree. They are noticed when demand is added, and let go when a copy relieves
    them or a scan, which walks only them, finds them cold. All else that has a replica is reclaimable: a known number.
3.  Reading never changes what is stored, so every process that folds the log has the same bits.
4.  A node without holders stays, for its demand may return, but only `HOLDERLESS_MAX` of them, oldest out first.
5.  Only where a worker holds nothing below a node can the node be reclaimed (`tips.py`).

Under the policy `regret` the same store holds another statistic in place of the marginal benefit: `missed` is the routing
cost lost for want of the node (`regret.py`), and `seen` counts requests whose prompt has it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest

from services.cachemgr.first_tips import FirstTips
from services.cachemgr.node import (
    COLD,
    INDEX,
    NO_DEMAND,
    NOWHERE,
    Candidate,
    Candidates,
    Demand,
    Factors,
    Node,
    Statistics,
    decayed,
    limits_of,
    power,
    with_more,
)  # fmt: skip
from services.cachemgr.tips import Tips
from shared.contracts.ids import BlockId, WorkerId
from shared.model.holders import Holders
from shared.model.lattice import DEGREES
from shared.model.parameters import Parameters

HOLDERLESS_MAX = 100_000
"""Nodes without a holder; with their demand about 50 MB."""

RECENT_MAX = 20_000
"""Nodes that were demanded last: where `hottest` looks."""


class Trie:
    """A `holders.Watcher`. Calls come from one fold."""

    __slots__ = ("_ceiling", "_holderless", "_hot", "_pairs", "_recent", "copies", "degrees", "first_tips", "limits", "nodes",
                 "scan", "tips")  # fmt: skip

    def __init__(self, parameters: Parameters, first_tips: FirstTips | None = None) -> None:
        self.nodes: dict[BlockId, Node] = {}
        self.degrees: dict[WorkerId, int] = {}
        self.scan = 0
        self.copies = 0
        """How many (worker, block) there are."""
        self.limits = limits_of(parameters)
        self._pairs = 0
        self._ceiling = 0.0
        self._hot: dict[BlockId, Node] = {}
        self._holderless: OrderedDict[BlockId, Node] = OrderedDict()
        self._recent: OrderedDict[BlockId, Node] = OrderedDict()
        self.tips, self.first_tips = Tips(), first_tips

    # --- holders

    def held(self, worker: WorkerId, parent: BlockId | None, blocks: Sequence[BlockId]) -> None:
        """A worker of a known degree holds more blocks, each the parent of the next."""
        index = INDEX[self.degrees[worker]]
        above = top = self.nodes[parent] if parent is not None else None
        for at, block in enumerate(blocks):
            node = self.nodes.get(block)
            if node is None or not any(node.replicas):
                above = self._first_held(index, above, blocks[at:])
                break
            self._pairs += not node.replicas[index]
            node.replicas = with_more(node.replicas, index, 1)
            if node.replicas[index] > 1:
                self._recounted(node)
            above = node
        if above is not None and above is not top:
            self.tips.held(worker, index, top, above)
        self.copies += len(blocks)

    def dropped(self, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
        """A worker holds these blocks no longer. Call `trim` after the last ones."""
        index = INDEX[self.degrees[worker]]
        lost = [self.nodes[block] for block in blocks]
        for node in lost:
            node.replicas = with_more(node.replicas, index, -1)
            self._pairs -= not node.replicas[index]
            if node.replicas[index] == 1:
                self._recounted(node)
            if not any(node.replicas):
                self._holderless[node.block] = node
                if self.first_tips is not None:
                    self.first_tips.no_holder(node)
        self.tips.dropped(worker, index, lost)
        self.copies -= len(lost)

    def trim(self) -> None:
        """Forget the oldest nodes without holders beyond the bound: leaves, as children lose their last holder first."""
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
        access = self._settled(node).access
        access[INDEX[degree]] = value = access[INDEX[degree]] + 1.0
        self._demanded(node, value, value >= self.limits.reclaim)

    def missed(self, node: Node, degree: int, benefit_s: float) -> None:
        """A request would have saved `benefit_s` at degree C, where nobody has the node."""
        missed = self._settled(node).missed
        missed[INDEX[degree]] = value = missed[INDEX[degree]] + benefit_s
        self._demanded(node, value, value > self.limits.inter)

    def noticed(self, node: Node) -> None:
        """A request's prompt has the node, whether or not it could be reused."""
        statistics = self._settled(node)
        statistics.seen += 1.0
        # It fades with the others, and none of them may be taken for gone while it is there.
        self._ceiling = max(self._ceiling, statistics.seen)

    def relieved(self, node: Node, degree: int, share: float) -> None:
        """A copy is on its way to degree C: only `share` of what was missed there still speaks for another."""
        if node.statistics is not None:
            statistics = self._settled(node)
            statistics.missed[INDEX[degree]] *= share
            if not statistics.is_hot(1.0, self.limits):  # as of this scan nothing has faded
                self._hot.pop(node.block, None)

    def demand(self, node: Node) -> Demand:
        """Both statistics now."""
        if (statistics := node.statistics) is None:
            return NO_DEMAND
        factor = self._factor(statistics)
        return Demand(decayed(statistics.access, factor), decayed(statistics.missed, factor))

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

    @property
    def warm(self) -> bool:
        """Whether any statistic may still be above 0."""
        return self._ceiling >= COLD

    def candidates(self) -> Candidates:
        """Algorithm 2's lists now, in no order."""
        inter, intra, kept, limits = [], [], 0, self.limits
        for node, told, factor in self._faded(self._hot):
            for degree, replicas, access, missed in zip(DEGREES, node.replicas, told.access, told.missed, strict=True):
                if replicas:
                    if (now := access * factor) > replicas * limits.intra:
                        intra.append(Candidate(node, degree, replicas, now / replicas))
                    kept += now >= replicas * limits.reclaim
                elif missed * factor > limits.inter:
                    inter.append(Candidate(node, degree, 0, missed * factor))
        return Candidates(inter, intra, self._pairs - kept)

    def regretted(self, seen_min: float) -> list[Candidate]:
        """Every (z, C) whose missed cost is worth a copy, held at C or not, of nodes seen at least so often. In no order."""
        found = []
        for node, told, factor in self._faded(self._hot):
            if told.seen * factor < seen_min:
                continue
            for degree, replicas, missed in zip(DEGREES, node.replicas, told.missed, strict=True):
                if missed * factor > self.limits.inter:
                    found.append(Candidate(node, degree, replicas, missed * factor))
        return found

    def hottest(self, limit: int) -> list[tuple[Node, Demand]]:
        """The most demanded of the nodes demanded last: by access, then by missed seconds."""
        demanded = ((node, self.demand(node)) for node in self._recent.values())
        return nlargest(limit, demanded, key=lambda each: (sum(each[1].access), sum(each[1].missed)))

    # --- time and thresholds

    def scanned(self, scan: int) -> None:
        """Scan number `scan` is over: statistics decay, and nodes cool."""
        # Where scans were dropped from the log it jumps, but never back.
        self.scan = max(scan, self.scan + 1)
        self._ceiling *= self.limits.decay
        self._hot = self._hot_among(self._hot)

    def retune(self, parameters: Parameters) -> None:
        """Other thresholds or another decay hold from here on. The one walk over all nodes; operators are rare."""
        for node in [each for each in self.nodes.values() if each.statistics is not None]:
            self._settled(node)
        self.limits = limits_of(parameters)
        self._hot = self._hot_among(self.nodes)

    # --- inside

    def _first_held(self, index: int, above: Node | None, blocks: Sequence[BlockId]) -> Node | None:
        """Nobody held these blocks, each the parent of the next, nor what is below them; the first is a child of `above`.
        Returns the last one's node."""
        replicas = with_more(NOWHERE, index, 1)
        first_tips, top = self.first_tips, above
        for block in blocks:
            known = self.nodes.get(block)
            node = self.nodes[block] = known or Node(block, above, above.depth + 1 if above else 0, self.scan)
            self._holderless.pop(block, None)
            node.replicas = replicas
            if above is not None:
                above.children += known is None
            above = node
        self._pairs += len(blocks)
        if first_tips is not None and above is not None:
            first_tips.first_held(top, above)
        return above

    def _recounted(self, node: Node) -> None:
        self.tips.recounted(node)
        if self.first_tips is not None:
            self.first_tips.recounted(node)

    def _factor(self, statistics: Statistics) -> float:
        return power(self.limits.decay, self.scan - statistics.stamp)

    def _settled(self, node: Node) -> Statistics:
        """The node's statistics as of this scan, so that something can be added."""
        if node.statistics is None:
            node.statistics = Statistics(self.scan)
        elif node.statistics.stamp != self.scan:
            node.statistics.settle(self._factor(node.statistics), self.scan)
        return node.statistics

    def _demanded(self, node: Node, value: float, makes_hot: bool) -> None:
        self._ceiling = max(self._ceiling, value)
        if makes_hot:
            self._hot[node.block] = node
        self.tips.demanded(node)
        if self.first_tips is not None:
            self.first_tips.demanded(node)
        self._recent[node.block] = node
        self._recent.move_to_end(node.block)
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    def _faded(self, nodes: Mapping[BlockId, Node]) -> Iterator[tuple[Node, Statistics, float]]:
        """Those that were asked for, with what their statistics have faded by since."""
        factors = Factors(self.limits.decay, self.scan)
        return ((node, told, factors[told.stamp]) for node in nodes.values() if (told := node.statistics) is not None)

    def _hot_among(self, nodes: Mapping[BlockId, Node]) -> dict[BlockId, Node]:
        return {node.block: node for node, told, factor in self._faded(nodes) if told.is_hot(factor, self.limits)}

    # --- self-check

    def check(self, holders: Holders) -> None:
        """The tree is whole, counts agree with the holders, and every index has exactly what it should."""
        for block, node in self.nodes.items():
            held = Counter(INDEX[self.degrees[worker]] for worker in holders.index.holders(block))
            copies = tuple(held[index] for index in range(len(DEGREES)))
            assert node.replicas == copies, f"{block.hex()}: {node.replicas} replicas are counted, {copies} are held"
            assert node.depth == (node.parent.depth + 1 if node.parent is not None else 0), f"{block.hex()}: its depth"
            if node.parent is not None:
                assert self.nodes.get(node.parent.block) is node.parent, f"{block.hex()}: its parent is forgotten"
            assert (block in self._holderless) != any(copies), f"{block.hex()}: holderless or not?"
            assert max(map(max, self.demand(node))) <= self._ceiling * (1 + 1e-9), f"{block.hex()}: above the ceiling"
        assert self._hot == self._hot_among(self.nodes), "hot or not?"
        self.tips.check(holders, self.degrees, self.nodes)
        if self.first_tips is not None:
            self.first_tips.check(self.nodes)
        children = Counter(node.parent.block for node in self.nodes.values() if node.parent is not None)
        assert all(node.children == children[block] for block, node in self.nodes.items()), "children are miscounted"
        for index in (self._hot, self._holderless, self._recent):
            assert all(self.nodes.get(block) is node for block, node in index.items()), "a forgotten node is indexed"
        assert holders.index.index.keys() <= self.nodes.keys(), "a held block has no node"
        assert self.copies == sum(holders.index.counts.values()), "copies are miscounted"
        assert self._pairs == sum(map(bool, (r for node in self.nodes.values() for r in node.replicas))), "pairs"
        assert len(self._holderless) <= HOLDERLESS_MAX, "too many nodes without holders are kept"
