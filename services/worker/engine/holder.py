"""What one worker holds: a prefix-closed set of blocks, each in a slot of one of the worker's ranks. Torch-free and pure.

`KvPool` owns the slots and decides; a `Holder` knows the tree they form.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.worker.engine.protocol import Resident
from shared.contracts.ids import BlockId


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of one rank: equal to itself alone. `block` is None in a free slot and in one whose content has no id (yet).
    `used` counts up and says when its content was last let go; 0 before."""

    rank: int
    index: int
    generation: int = 0
    pins: int = 0
    used: int = 0
    block: BlockId | None = None
    parent: BlockId | None = None
    depth: int = 0


@dataclass(slots=True)
class Holder:
    """`children` has an entry for every held block with held children, and one under None for the first blocks."""

    held: dict[BlockId, Slot] = field(default_factory=dict)
    children: dict[BlockId | None, dict[BlockId, None]] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> "Holder":
        """The prefix-closed part of what lies in `slots`. Of two copies the one is held that stays longer: a pinned one, else
        the one that was used last, because what hangs on it goes with it."""
        holder = cls()
        copies = [slot for slot in slots if slot.block is not None]
        for slot in sorted(copies, key=lambda slot: (slot.depth, -slot.pins, -slot.used)):
            if slot.block not in holder.held and (slot.parent is None or slot.parent in holder.held):
                holder.hold(slot)
        return holder

    def hold(self, slot: Slot) -> None:
        """Add a block whose parent is held."""
        assert slot.block is not None, "only a block with an id can be held"
        assert slot.block not in self.held, "a worker never holds a block twice"
        assert slot.parent is None or slot.parent in self.held, "a holder never has a block without its parent"
        self.held[slot.block] = slot
        self.children.setdefault(slot.parent, {})[slot.block] = None

    def holds(self, slot: Slot) -> bool:
        """Whether this very copy of the block is the held one."""
        return slot.block is not None and self.held.get(slot.block) is slot

    def drop_subtree(self, block: BlockId) -> list[Slot]:
        """Stop holding `block` and everything below it. Returns their slots, children before parents."""
        found = [block]
        for parent in found:
            found.extend(self.children.pop(parent, {}))
        slots = [self.held.pop(below) for below in reversed(found)]
        siblings = self.children[slots[-1].parent]
        del siblings[block]
        if not siblings:
            del self.children[slots[-1].parent]
        return slots

    def longest(self, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of the chain are held."""
        return next((depth for depth, block in enumerate(chain) if block not in self.held), len(chain))

    def resident(self) -> Resident:
        """Everything held, as runs, parents before children. A run ends where the tree branches."""
        runs: list[tuple[BlockId | None, tuple[BlockId, ...]]] = []
        starts: list[tuple[BlockId | None, BlockId]] = [(None, block) for block in self.children.get(None, {})]
        for parent, block in starts:
            run, below = [block], self.children.get(block, {})
            while len(below) == 1:
                run.extend(below)
                below = self.children.get(run[-1], {})
            runs.append((parent, tuple(run)))
            starts.extend((run[-1], child) for child in below)
        return Resident(runs=tuple(runs))

    def check(self, ranks: range) -> None:
        """Assert that the tree is prefix-closed, agrees with its slots and lies on `ranks`."""
        for block, slot in self.held.items():
            assert slot.block == block, f"{slot}: is held as {block.hex()}"
            assert slot.rank in ranks, f"{slot}: outside {ranks}"
            assert slot.depth == 0 or self.held[self._parent(slot)].depth == slot.depth - 1, f"{slot}: parent"
            assert block in self.children[slot.parent], f"{slot}: unknown to its parent"
        assert sum(map(len, self.children.values())) == len(self.held), "a child that is not held"

    @staticmethod
    def _parent(slot: Slot) -> BlockId:
        assert slot.parent is not None, f"{slot}: only a first block has no parent"
        return slot.parent
