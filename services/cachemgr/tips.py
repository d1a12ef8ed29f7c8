"""The ends of what each worker holds: nodes below which it holds nothing. There, only these can be reclaimed (model, 2.4).

Nodes that are an end at some worker stand in one line, in the order in which each was last demanded or became one, so the
coldest are found without a walk; what a scan has passed over in vain goes to the end. Those that some degree holds more than
once stand in a line of their own as well: they are few, and may be behind any number of older ones.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice, zip_longest

from services.cachemgr.node import INDEX, Node, Replicas, with_more
from shared.contracts.ids import BlockId, WorkerId
from shared.model.holders import Holders


class Tips:
    """Kept up by the trie, as workers gain and lose nodes. `Node.ends` says at how many workers of each degree it is one."""

    __slots__ = ("_all", "_spare", "below")

    def __init__(self) -> None:
        self._all: OrderedDict[BlockId, Node] = OrderedDict()
        self._spare: OrderedDict[BlockId, Node] = OrderedDict()
        self.below: dict[WorkerId, dict[BlockId, int]] = {}
        """How many children of a node its holder has too: of ends and of forks, as most nodes have one."""

    def is_end(self, worker: WorkerId, block: BlockId) -> bool:
        """Whether the worker holds the node, and nothing below it."""
        return not self.below.get(worker, {}).get(block, 1)

    def forks(self, worker: WorkerId, block: BlockId) -> bool:
        """Whether the worker, which holds the node, has several of its children."""
        return self.below.get(worker, {}).get(block, 1) > 1

    def held(self, worker: WorkerId, index: int, above: Node | None, last: Node) -> None:
        """A worker of a degree, by `INDEX`, holds more of one path: what is below `above`, down to `last`."""
        below = self.below.setdefault(worker, {})
        if above is not None:
            self._more_below(below, index, above, 1)
        below[last.block] = 0
        self._count(last, index, 1)

    def dropped(self, worker: WorkerId, index: int, lost: Sequence[Node]) -> None:
        """A worker holds these nodes no longer, children before their parents."""
        below = self.below[worker]
        emptied: Node | None = None
        for node, after in zip_longest(lost, lost[1:]):
            if node is not emptied:
                del below[node.block]
                self._count(node, index, -1)
            above, emptied = node.parent, None
            if above is not None and above is after and below.get(above.block, 1) == 1:
                emptied = above  # it goes next, so nobody needs to know that it is an end
            elif above is not None:
                self._more_below(below, index, above, -1)
        if not below:
            del self.below[worker]

    def recounted(self, node: Node) -> None:
        """A node, end or not, has gained or lost a replica."""
        if _is_spare(node.ends, node.replicas):
            self._spare.setdefault(node.block, node)
        else:
            self._spare.pop(node.block, None)

    def demanded(self, node: Node) -> None:
        """A node, end or not, was asked for."""
        for line in (self._all, self._spare):
            if node.block in line:
                line.move_to_end(node.block)

    def oldest(self, *, spare: bool) -> Iterable[Node]:
        """All of them, or those that a degree has more than once, in the order of their line."""
        return (self._spare if spare else self._all).values()

    def passed(self, nodes: int, *, spare: bool) -> None:
        """A scan has found nothing to give up in so many of the first ones: they go to the end."""
        line = self._spare if spare else self._all
        for block in list(islice(line, nodes)):
            line.move_to_end(block)

    def check(self, holders: Holders, degrees: Mapping[WorkerId, int], nodes: Mapping[BlockId, Node]) -> None:
        """Everything is what follows from who holds what."""
        found = {worker: _ends_and_forks(holders, worker) for worker in holders.index.counts}
        assert self.below == found, "ends and forks are not those of what the workers hold"
        for block, node in nodes.items():
            at = [degrees[worker] for worker, below in found.items() if below.get(block) == 0]
            ends = tuple(at.count(degree) for degree in INDEX)
            assert node.ends == ends, f"{block.hex()}: {node.ends} ends are counted, {ends} there are"
        assert self._all.keys() == {block for block, node in nodes.items() if any(node.ends)}, "not all ends"
        spare = {block for block, node in nodes.items() if _is_spare(node.ends, node.replicas)}
        assert self._spare.keys() == spare, "spare copies are not those of ends that a degree has more than once"

    def _more_below(self, below: dict[BlockId, int], index: int, node: Node, more: int) -> None:
        """The worker has a child of the node more, or less."""
        before = below.pop(node.block, 1)
        if (now := before + more) != 1:
            below[node.block] = now
        if not (before and now):
            self._count(node, index, -more)

    def _count(self, node: Node, index: int, more: int) -> None:
        """The node is an end at a worker more, or less."""
        node.ends = with_more(node.ends, index, more)
        if any(node.ends):
            self._all.setdefault(node.block, node)
        else:
            self._all.pop(node.block, None)
        self.recounted(node)


@lru_cache(maxsize=4_096)
def _is_spare(ends: Replicas, replicas: Replicas) -> bool:
    """Whether it is an end at a worker of a degree that holds it more than once. Cached, as there are few such pairs."""
    return any(end and copies > 1 for end, copies in zip(ends, replicas, strict=True))


def _ends_and_forks(holders: Holders, worker: WorkerId) -> dict[BlockId, int]:
    below: dict[BlockId, int] = {}
    for block, parent in holders.index.held(worker):
        below[block] = 0
        if parent is not None:
            below[parent] += 1
    return {block: count for block, count in below.items() if count != 1}
