"""Blocks that move: room for those that come from another worker, pins for those that are lent, and removal on demand. Pure.

Rules, beside those of `kv_pool`:

1.  An *installation* is to a copy what a reservation is to a prompt: the path above the new blocks is pinned, slots for them
    are taken by the worker's own layout, and nothing is held before `finish`. What did arrive is installed from the top
    without a gap, the rest is free again. So a copy that fails half-way leaves a shorter prefix and never a hole.
2.  A switch voids the installations under way: their slots were placed for a worker that is gone. They stay taken until
    `finish`, because something may still be written to them.
3.  A *lease* pins blocks for a reader elsewhere, wherever on the node they lie and with what their worker holds above them;
    it ends when its holder says so, whatever became of the reader.
4.  Eviction on demand goes leaf first. It never takes a pinned block, nor one that still has a held block below it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.engine.copy_plan import Evicted, KeptReason
from services.worker.engine.kv_slots import KvSlots, ref_of
from services.worker.engine.protocol import EngineError, OutOfBlocks
from services.worker.engine.slot_ref import SlotRef
from shared.contracts.ids import BlockId
from shared.model.lattice import Group


@dataclass(frozen=True, slots=True)
class Installation:
    """`blocks` are those of the plan that the worker lacks, the first of them at `first_depth` below `parent`; `slots` is
    where each of them goes. `above` are the pinned blocks over them, the plan's own that are there already included."""

    operation: str
    group: Group
    parent: BlockId | None
    first_depth: int
    blocks: tuple[BlockId, ...]
    slots: tuple[SlotRef, ...]
    above: tuple[SlotRef, ...]


class Installed(NamedTuple):
    """What a worker has got of an installation: `blocks` below `parent`, from `first_depth` on; none of them if it is void or
    nothing arrived."""

    parent: BlockId | None
    first_depth: int
    blocks: tuple[BlockId, ...]


class KvCopies:
    """Part of a `KvPool`."""

    def __init__(self, slots: KvSlots) -> None:
        self._slots = slots
        self._installations: dict[str, Installation] = {}
        self._void: set[str] = set()
        self._leases: dict[str, tuple[tuple[SlotRef | None, ...], tuple[SlotRef, ...]]] = {}

    # --- blocks that come

    def install(self, operation: str, group: Group, parent: BlockId | None, blocks: Sequence[BlockId]) -> Installation:
        """Take room for the blocks of a path below `parent` that the worker lacks, evicting if it must.

        Errors: OutOfBlocks if even eviction cannot make room; EngineError if the worker lacks the parent, the operation is
        under way, or the group is no worker. After an error nothing has changed, but that the path above counts as used.
        """
        worker = self._slots.worker(group)
        if operation in self._installations:
            raise EngineError(f"operation {operation}: is under way")
        if parent is not None and parent not in worker.held:
            raise EngineError(f"parent {parent.hex()}: the worker does not hold it, and the plan does not bring it")
        there = worker.longest(blocks)
        last = blocks[there - 1] if there else parent
        above = self._slots.paths([worker.held[last]]) if last is not None else []
        missing, first_depth = tuple(blocks[there:]), len(above)
        self._slots.pin(above)
        try:
            ranks = [group.first_rank + (first_depth + offset) % group.degree for offset in range(len(missing))]
            fresh = self._slots.take_all(f"operation {operation}", ranks)
        except OutOfBlocks:
            self._slots.unpin(above)
            raise
        installation = self._installations[operation] = Installation(
            operation=operation,
            group=group,
            parent=last,
            first_depth=first_depth,
            blocks=missing,
            slots=tuple(map(ref_of, fresh)),
            above=tuple(map(ref_of, above)),
        )
        return installation

    def under_way(self, group: Group) -> list[str]:
        """The operations that hold slots on the ranks of `group`."""
        return [
            operation
            for operation, each in self._installations.items()
            if any(ref.rank in group.ranks for ref in (*each.above, *each.slots))
        ]

    def is_void(self, operation: str) -> bool:
        """Whether the geometry has changed since `install`."""
        return operation in self._void

    def finish(self, operation: str, arrived_blocks: int) -> Installed:
        """The first `arrived_blocks` of the installation are in their slots, and nothing more will be written. The worker
        holds them from now on, unless the installation is void; what somebody else has stored meanwhile gives its slot
        back."""
        installation = self._installations.pop(operation)
        installed = self._hold(installation, 0 if operation in self._void else arrived_blocks)
        self._void.discard(operation)
        self._slots.unpin(self._slots.pinned((*installation.above, *installation.slots)))
        return installed

    def _hold(self, installation: Installation, arrived_blocks: int) -> Installed:
        parent, first_depth = installation.parent, installation.first_depth
        installed: list[BlockId] = []
        arrived = zip(installation.blocks[:arrived_blocks], installation.slots, strict=False)
        for depth, (block, ref) in enumerate(arrived, installation.first_depth):
            worker = self._slots.worker(installation.group)
            if block not in worker.held:
                above = installed[-1] if installed else parent
                self._slots.hold(worker, self._slots.pinned([ref]), [block], above, depth)
                installed.append(block)
            else:
                parent, first_depth = block, depth + 1
        return Installed(parent, first_depth, tuple(installed))

    def void(self) -> None:
        """The geometry has changed."""
        self._void.update(self._installations)

    # --- blocks that are lent

    def lend(self, lease: str, blocks: Sequence[BlockId]) -> tuple[SlotRef | None, ...]:
        """Pin whatever of `blocks` lies on the node, on any rank, and say where; None for a block that does not. A lease
        that is repeated gets the same answer."""
        if lease not in self._leases:
            found = [self._slots.copy_of(block) for block in blocks]
            pinned = self._slots.paths(slot for slot in found if slot is not None)
            self._slots.pin(pinned)
            refs = tuple(None if slot is None else ref_of(slot) for slot in found)
            self._leases[lease] = refs, tuple(map(ref_of, pinned))
        return self._leases[lease][0]

    def lies_at(self, ref: SlotRef, block: BlockId) -> bool:
        """Whether that content is still in that slot."""
        return ref in map(ref_of, self._slots.copies_of(block))

    def end_lease(self, lease: str) -> None:
        """Unknown leases are ignored."""
        _, pinned = self._leases.pop(lease, ((), ()))
        self._slots.unpin(self._slots.pinned(pinned))

    @property
    def leases(self) -> int:
        """How many are open."""
        return len(self._leases)

    # --- blocks that go

    def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        """Remove what may go of `blocks`, deepest first. EngineError if the group is no worker of this epoch."""
        worker = self._slots.worker(group)
        freed: list[BlockId] = []
        kept: list[tuple[BlockId, KeptReason]] = [(block, "not-held") for block in blocks if block not in worker.held]
        there = {block: worker.held[block] for block in blocks if block in worker.held}
        for block, slot in sorted(there.items(), key=lambda found: -found[1].depth):
            if slot.pins:
                kept.append((block, "pinned"))
            elif worker.children.get(block):
                kept.append((block, "has-descendants"))
            else:
                freed += self._slots.drop(group, block)
        return Evicted(tuple(freed), tuple(kept))

    # --- self-check

    def pins(self) -> Counter[SlotRef]:
        """How often installations and leases need each slot."""
        installing = (ref for each in self._installations.values() for ref in (*each.above, *each.slots))
        lent = (ref for _, pinned in self._leases.values() for ref in pinned)
        return Counter(installing) + Counter(lent)
