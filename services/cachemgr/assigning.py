"""Which child of a split gets which prefix of the worker that ends (paper, section 4.3): by demand and room. Pure.

1.  Prefixes are taken as the trees below their first blocks, the most demanded first.
2.  A block is *hot* if its demand per copy would ask for another one (θ_intra) and its parent is hot: every child gets it.
3.  The rest of a tree goes to the child with the least demand so far among those that have room for all of it, of equals to
    the one with the most room. Where none has room for all, the one with the most gets what fits, from the top.

Ties go to the lower block id, and to the child with the lower ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.ids import BlockId
from shared.model.pending import Parents

DemandOf = Callable[[BlockId], float]


class _Part(NamedTuple):
    """Blocks of one tree, parents before children, and what they are asked for together."""

    blocks: list[BlockId]
    demand: float


class _Tree(NamedTuple):
    """All that hangs below one first block."""

    root: BlockId
    hot: _Part
    rest: _Part


@dataclass(slots=True)
class _Child:
    room: int
    demand: float = 0.0
    assigned: dict[BlockId, BlockId | None] = field(default_factory=dict)

    def take(self, parents: Parents, part: _Part) -> None:
        """As much as there is room for. Nothing is left where not all of the blocks above have fitted."""
        taken = part.blocks[: self.room]
        self.assigned.update((block, parents[block]) for block in taken)
        self.room -= len(taken)
        self.demand += part.demand


def assign(
    parents: Parents, demand: DemandOf, hot_above: float, rooms: Sequence[int]
) -> list[dict[BlockId, BlockId | None]]:
    """The blocks of each child with their parents, prefix-closed, the most demanded first.

    `parents` is what the ending worker has, `demand` what each of its blocks was asked for per copy, `rooms` how many blocks
    each child can hold. What hangs below no first block is left out.
    """
    children = [_Child(room) for room in rooms]
    for tree in sorted(_trees(parents, demand, hot_above), key=_most_demanded):
        for child in children:
            child.take(parents, tree.hot)
        if tree.rest.blocks:
            _place_of(tree.rest, children).take(parents, tree.rest)
    return [child.assigned for child in children]


def _place_of(part: _Part, children: Sequence[_Child]) -> _Child:
    roomy = [child for child in children if child.room >= len(part.blocks)]
    if roomy:
        return min(roomy, key=lambda child: (child.demand, -child.room))
    return max(children, key=lambda child: child.room)


def _most_demanded(tree: _Tree) -> tuple[float, BlockId]:
    return -(tree.hot.demand + tree.rest.demand), tree.root


def _trees(parents: Parents, demand: DemandOf, hot_above: float) -> Iterator[_Tree]:
    children: dict[BlockId | None, list[BlockId]] = {}
    for block, parent in parents.items():
        children.setdefault(parent, []).append(block)
    for root in children.get(None, ()):
        blocks = [root]
        for block in blocks:
            blocks.extend(children.get(block, ()))
        asked = {block: demand(block) for block in blocks}
        hot: dict[BlockId, None] = {}
        for block in blocks:
            parent = parents[block]
            if asked[block] > hot_above and (parent is None or parent in hot):
                hot[block] = None
        rest = [block for block in blocks if block not in hot]
        yield _Tree(root, *(_Part(list(part), sum(map(asked.__getitem__, part))) for part in (hot, rest)))
