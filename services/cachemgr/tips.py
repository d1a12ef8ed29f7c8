"""The ends of what is held: nodes below which nothing is held anywhere. Only these can be reclaimed.

They stand in the order in which each was last demanded or became one, so the coldest are found without a walk. Those that some
degree has more than once stand in a line of their own as well: they are few, and may be behind any number of older ones.
"""

from collections import OrderedDict
from collections.abc import Iterator, Set
from itertools import islice

from services.cachemgr.node import Node
from shared.contracts.ids import BlockId


class Tips:
    """Kept up by the trie, as its nodes gain and lose holders."""

    def __init__(self) -> None:
        self._all: OrderedDict[BlockId, Node] = OrderedDict()
        self._spare: OrderedDict[BlockId, Node] = OrderedDict()

    def add(self, node: Node) -> None:
        """It is one now."""
        self._all[node.block] = node
        self.recounted(node)

    def remove(self, node: Node) -> None:
        """It is none."""
        self._all.pop(node.block, None)
        self._spare.pop(node.block, None)

    def recounted(self, node: Node) -> None:
        """A node, tip or not, has gained or lost a replica."""
        if node.block in self._all and max(node.replicas) > 1:
            self._spare.setdefault(node.block, node)
        else:
            self._spare.pop(node.block, None)

    def demanded(self, node: Node) -> None:
        """A node, tip or not, was asked for."""
        for line in (self._all, self._spare):
            if node.block in line:
                line.move_to_end(node.block)

    def oldest(self, limit: int, *, spare: bool) -> Iterator[Node]:
        """The first ones, of all or of those that some degree has more than once."""
        return islice((self._spare if spare else self._all).values(), limit)

    def check(self, tips: Set[BlockId]) -> None:
        """Both lines have just the nodes they should; `tips` are the first one's."""
        assert self._all.keys() == tips, "tips are not those nodes below which nothing is held"
        twice = {block for block, node in self._all.items() if max(node.replicas) > 1}
        assert self._spare.keys() == twice, "spare copies are not those of tips that a degree has more than once"
