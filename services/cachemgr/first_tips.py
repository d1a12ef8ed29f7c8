"""Nodes below which nobody at all held anything: what could be reclaimed before `CacheScanCompleted.rules` 2.

Only who derives decisions of before keeps this beside a trie (`first_rules.py`); a manager that decides does not.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice

from services.cachemgr.node import Node
from shared.contracts.ids import BlockId


class FirstTips:
    """In the order in which each was last demanded or became one; those that some degree had more than once also apart."""

    __slots__ = ("_all", "_spare", "below")

    def __init__(self) -> None:
        self.below: Counter[BlockId] = Counter()
        """How many children of a node somebody holds."""
        self._all: OrderedDict[BlockId, Node] = OrderedDict()
        self._spare: OrderedDict[BlockId, Node] = OrderedDict()

    def first_held(self, above: Node | None, last: Node) -> None:
        """Nobody held the nodes below `above`, down to `last`, and somebody does now."""
        if above is not None:
            self._remove(above)
        for node in last.upwards():
            if node is above:
                break
            if node.parent is not None:
                self.below[node.parent.block] += 1
        self._add(last)

    def no_holder(self, node: Node) -> None:
        """Nobody holds it any longer."""
        self._remove(node)
        if (above := node.parent) is not None:
            self.below[above.block] -= 1
            if not self.below[above.block]:
                del self.below[above.block]
                if any(above.replicas):
                    self._add(above)

    def recounted(self, node: Node) -> None:
        """A node has gained or lost a replica."""
        if node.block in self._all and max(node.replicas) > 1:
            self._spare.setdefault(node.block, node)
        else:
            self._spare.pop(node.block, None)

    def demanded(self, node: Node) -> None:
        """A node was asked for."""
        for line in (self._all, self._spare):
            if node.block in line:
                line.move_to_end(node.block)

    def oldest(self, limit: int, *, spare: bool) -> Iterable[Node]:
        """The first ones, of all or of those that some degree had more than once."""
        return islice((self._spare if spare else self._all).values(), limit)

    def check(self, nodes: Mapping[BlockId, Node]) -> None:
        """Everything is what follows from the nodes' replicas."""
        below = Counter(n.parent.block for n in nodes.values() if n.parent is not None and any(n.replicas))
        assert self.below == below, "held children are miscounted"
        tips = {block for block, node in nodes.items() if any(node.replicas) and not below[block]}
        assert self._all.keys() == tips, "tips are not those nodes below which nothing is held"
        assert self._spare.keys() == {block for block in tips if max(nodes[block].replicas) > 1}, "spare ones"

    def _add(self, node: Node) -> None:
        self._all[node.block] = node
        self.recounted(node)

    def _remove(self, node: Node) -> None:
        self._all.pop(node.block, None)
        self._spare.pop(node.block, None)
