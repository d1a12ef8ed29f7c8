"""The slots of one node's KV memory: free, cached or pinned, who holds what lies in them, and what goes under pressure.

The lower half of `kv_pool`, whose rules it keeps: a `KvSlots` knows slots and holders, and neither requests nor copies.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from services.worker.engine.holder import Holder, Slot
from services.worker.engine.protocol import EngineError, OutOfBlocks
from services.worker.engine.slot_ref import SlotRef
from shared.contracts.ids import BlockId
from shared.model.lattice import Composition, Group, groups_of


def ref_of(slot: Slot) -> SlotRef:
    """The slot's content as it is now."""
    return SlotRef(slot.rank, slot.index, slot.generation)


class KvSlots:
    """`evicted` collects, per worker, what went under pressure until somebody asks for it."""

    def __init__(self, ranks: int, blocks_per_rank: int) -> None:
        if blocks_per_rank < 1:
            raise ValueError(f"blocks_per_rank: {blocks_per_rank} must be at least 1")
        self.blocks_per_rank = blocks_per_rank
        self._slots = [[Slot(rank, index) for index in range(blocks_per_rank)] for rank in range(ranks)]
        self._free = [list(reversed(slots)) for slots in self._slots]
        # Cached slots only, those that nobody holds first, then the least recently used: an eviction finds its victim without
        # looking at pinned slots.
        self._unpinned: list[OrderedDict[int, Slot]] = [OrderedDict() for _ in range(ranks)]
        # Every slot that has the block, held or stranded: of two copies of a block either may be read.
        self._copies: defaultdict[BlockId, list[Slot]] = defaultdict(list)
        self._now = 0
        self._workers: dict[Group, Holder] = {}
        self._group_of: list[Group] = []
        self._holder_of: list[Holder] = []
        self.evicted: dict[Group, list[BlockId]] = {}

    # --- geometry

    def adopt(self, composition: Composition) -> None:
        """Regroup the ranks; blocks and pins stay where they are. ValueError for a composition of other ranks."""
        groups = groups_of(composition)
        if sum(composition) != len(self._slots):
            raise ValueError(f"composition {composition}: covers {sum(composition)} of {len(self._slots)} ranks")
        self._workers = {
            group: Holder.of(slot for rank in group.ranks for slot in self._slots[rank]) for group in groups
        }
        self._group_of = [group for group in groups for _ in group.ranks]
        self._holder_of = [self._workers[group] for group in self._group_of]
        self.evicted = {group: [] for group in groups}
        for rank, unpinned in enumerate(self._unpinned):
            in_turn = sorted(unpinned.values(), key=lambda slot: (self._is_held(slot), slot.used, -slot.depth))
            self._unpinned[rank] = OrderedDict((slot.index, slot) for slot in in_turn)

    def worker(self, group: Group) -> Holder:
        """EngineError if the group is no worker of this epoch."""
        worker = self._workers.get(group)
        if worker is None:
            known = [(known.first_rank, known.degree) for known in self._workers]
            raise EngineError(f"group ({group.first_rank}, {group.degree}): not one of the workers {known}")
        return worker

    def _is_held(self, slot: Slot) -> bool:
        return self._holder_of[slot.rank].holds(slot)

    # --- slots

    def pinned(self, refs: Iterable[SlotRef]) -> list[Slot]:
        """Pinned slots by what they were promised to have."""
        slots = []
        for ref in refs:
            slot = self._slots[ref.rank][ref.index]
            assert slot.generation == ref.generation, f"a pinned slot was taken again: {ref} is {slot}"
            slots.append(slot)
        return slots

    def copies_of(self, block: BlockId) -> Sequence[Slot]:
        """Every slot that has the block."""
        return self._copies.get(block, ())

    def copy_of(self, block: BlockId) -> Slot | None:
        """Some slot that has the block: a held one if there is one, because stranded ones are the first to go."""
        copies = self.copies_of(block)
        return next((slot for slot in copies if self._is_held(slot)), copies[0] if copies else None)

    def paths(self, slots: Iterable[Slot]) -> list[Slot]:
        """From the first blocks down to `slots`, as far as the workers that have them hold them, each slot once, parents first;
        a stranded one alone. Looks at each of them once, so a whole prompt costs no more than its last block."""
        found: dict[Slot, None] = {}
        for slot in slots:
            held, below = self._holder_of[slot.rank].held, slot
            while below not in found:
                found[below] = None
                if below.parent is None or not self._is_held(below):
                    break
                below = held[below.parent]
        return sorted(found, key=lambda slot: slot.depth)

    def take_all(self, what: str, ranks: Sequence[int]) -> list[Slot]:
        """A fresh slot, pinned once, on each of `ranks`, evicting if need be. OutOfBlocks, before anything has changed, if
        even that cannot make room; it names `what` wanted them."""
        for rank, blocks in Counter(ranks).items():
            room = len(self._free[rank]) + len(self._unpinned[rank])
            if blocks > room:
                raise OutOfBlocks(f"{what}: rank {rank} needs {blocks} blocks and can free {room}")
        slots = []
        for rank in ranks:
            free = self._free[rank]
            if not free:
                self._push_out(next(iter(self._unpinned[rank].values())))
            slot = free.pop()
            slot.generation += 1
            slot.pins, slot.used = 1, 0
            slots.append(slot)
        return slots

    def has_room_without(self, pins: Counter[SlotRef], ranks: Sequence[int]) -> bool:
        """Whether `take_all` would find room if nobody held `pins`, all of them pins of slots that are pinned now. Looks at
        those alone: whoever finds no room asks again a hundred times a second."""
        let_go = Counter(ref.rank for ref, held in pins.items() if self._slots[ref.rank][ref.index].pins == held)
        return all(
            blocks <= len(self._free[rank]) + len(self._unpinned[rank]) + let_go[rank]
            for rank, blocks in Counter(ranks).items()
        )

    def hold(
        self, worker: Holder, slots: Iterable[Slot], blocks: Iterable[BlockId], parent: BlockId | None, depth: int
    ) -> None:
        """`slots` have the blocks from now on, the first at `depth` below `parent` and each below the one before; `worker`,
        which holds the parent, holds them."""
        for slot, block in zip(slots, blocks, strict=True):
            slot.block, slot.parent, slot.depth = block, parent, depth
            self._copies[block].append(slot)
            worker.hold(slot)
            parent, depth = block, depth + 1

    def _push_out(self, victim: Slot) -> None:
        """Free the victim and everything the worker holds below it. A pinned descendant stays in its slot, stranded."""
        assert victim.block is not None, "only cached slots are evicted"
        if not self._is_held(victim):
            self._clear(victim)
            return
        group = self._group_of[victim.rank]
        self.evicted[group] += self.drop(group, victim.block)

    def drop(self, group: Group, block: BlockId) -> list[BlockId]:
        """Stop holding the block and what is below it; free what nobody has pinned. Children before parents."""
        gone = []
        for slot in self._workers[group].drop_subtree(block):
            assert slot.block is not None, "what was held has an id"
            gone.append(slot.block)
            if slot.pins == 0:
                self._clear(slot)
        return gone

    def _clear(self, slot: Slot) -> None:
        self._unpinned[slot.rank].pop(slot.index, None)
        if slot.block is not None:
            copies = self._copies[slot.block]
            copies.remove(slot)
            if not copies:
                del self._copies[slot.block]
        slot.block = slot.parent = None
        slot.depth = 0
        self._free[slot.rank].append(slot)

    def pin(self, slots: Iterable[Slot]) -> None:
        """They stay until as many `unpin`s."""
        for slot in slots:
            slot.pins += 1
            self._unpinned[slot.rank].pop(slot.index, None)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Parents first in `slots`; they are let go deepest first, so that on every rank a parent counts as used later than
        its children. A slot whose content never got an id is free at once."""
        self._now += 1
        for slot in reversed(slots):
            slot.pins -= 1
            if slot.pins:
                continue
            if slot.block is None:
                self._clear(slot)
                continue
            slot.used = self._now
            unpinned = self._unpinned[slot.rank]
            unpinned[slot.index] = slot
            # `_is_held`, without its two calls for every block of every prompt.
            if self._holder_of[slot.rank].held.get(slot.block) is not slot:
                unpinned.move_to_end(slot.index, last=False)

    # --- self-check

    def counts(self, rank: int) -> tuple[int, int, int]:
        """(free, cached, pinned) slots of a rank. They add up to `blocks_per_rank`."""
        free, cached = len(self._free[rank]), len(self._unpinned[rank])
        return free, cached, self.blocks_per_rank - free - cached

    def check(self, pins: Counter[SlotRef]) -> None:
        """Assert that every slot is exactly one of free, cached and pinned, `pins` times, that every copy is known, and that
        every holder is prefix-closed."""
        for rank, slots in enumerate(self._slots):
            free = {slot.index for slot in self._free[rank]}
            assert len(free) == len(self._free[rank]), f"rank {rank}: a slot is free twice"
            for slot in slots:
                needed = pins[ref_of(slot)]
                cached = slot.index in self._unpinned[rank]
                assert (slot.index in free) + cached + (slot.pins > 0) == 1, f"{slot}: not exactly one state"
                assert slot.pins == needed, f"{slot}: {needed} pins are accounted for"
                assert slot.block is not None or not cached, f"{slot}: cached without a block"
                assert slot.block is None or slot in self._copies[slot.block], f"{slot}: an unknown copy"
        named = sum(slot.block is not None for slots in self._slots for slot in slots)
        assert named == sum(map(len, self._copies.values())), "a copy that is in no slot"
        for group, worker in self._workers.items():
            worker.check(group.ranks)
