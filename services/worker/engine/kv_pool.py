"""The physical KV index of one node: which block lies in which slot, who needs it, and what may go. Torch-free and pure.

Rules:

1.  Every rank has `blocks_per_rank` slots. A slot is exactly one of *free*, *cached* (holds a block, may be evicted) and
    *pinned* (a request needs it). A slot's generation grows each time it is taken, so (rank, index, generation) names
    one content for ever and a late reader notices that it came too late.
2.  New blocks of a degree-C worker go to rank `first_rank + depth mod C` (cyclic layout). Where a block lies is
    recorded, not derived: after a switch the rule no longer describes the blocks that were there before.
3.  A worker *holds* a block that lies on one of its ranks and whose parent it holds too, as of the last `adopt` or
    `commit`. So holders are prefix-closed, and the longest match is the first gap in the chain.
4.  `adopt` moves nothing. A merge makes the blocks of all its ranks usable together; of two copies one stays held. After
    a split, blocks whose parents lie on the sibling's ranks are *stranded*: they keep their slots, are first to be
    evicted, and are held again if a later merge brings their parents back.
5.  Under pressure the least recently used block of the rank that lacks room goes, together with its descendants, deepest
    first. A block is never used later than its parent, so everything that goes was used no later than the victim.
6.  Whole blocks get an id when they are committed. A prompt's partial last block never has one: it is the request's own
    and is free again when the request is released.
7.  Of two requests that compute the same block side by side, the second to commit takes over the first one's copy and gives
    its own back: a worker never holds a block twice, and rule 5 needs every request to pin the parents of its blocks.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.worker.engine.holder import Holder, Slot
from services.worker.engine.protocol import EngineError, OutOfBlocks, Resident, Stored
from shared.contracts.ids import BlockId, RequestId
from shared.model.blocks import reusable_tokens
from shared.model.lattice import Composition, Group, groups_of


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One content of one slot. Readers compare `generation` with the slot's after the read."""

    rank: int
    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where one request's KV lies: one slot per block of the prompt, the partial last block included.

    The first `reused_blocks` are read and not computed. Blocks from `held_blocks` on are to be written; a block between
    the two is resident but computed again, because at least one token of a prompt is always computed.
    """

    request: RequestId
    group: Group
    prompt_tokens: int
    chain: tuple[BlockId, ...]
    slots: tuple[SlotRef, ...]
    reused_blocks: int
    held_blocks: int


def _ref(slot: Slot) -> SlotRef:
    return SlotRef(slot.rank, slot.index, slot.generation)


class KvPool:
    """See the module docstring for the rules. Calls are cheap and synchronous; one event loop owns a pool."""

    def __init__(self, ranks: int, blocks_per_rank: int, block_tokens: int) -> None:
        if blocks_per_rank < 1:
            raise ValueError(f"blocks_per_rank: {blocks_per_rank} must be at least 1")
        self.blocks_per_rank = blocks_per_rank
        self.block_tokens = block_tokens
        self._slots = [[Slot(rank, index) for index in range(blocks_per_rank)] for rank in range(ranks)]
        self._free = [list(reversed(slots)) for slots in self._slots]
        # Cached slots only, least recently used first: an eviction finds its victim without looking at pinned slots.
        self._unpinned: list[OrderedDict[int, Slot]] = [OrderedDict() for _ in range(ranks)]
        self._workers: dict[Group, Holder] = {}
        self._group_of: list[Group] = []
        self._reservations: dict[RequestId, Reservation] = {}
        self._unfinished: set[RequestId] = set()
        self._evicted: dict[Group, list[BlockId]] = {}

    # --- geometry

    def adopt(self, composition: Composition) -> None:
        """Regroup the ranks. Blocks, pins and slots stay as they are, but for requests that are unfinished: those are
        released, because their slots for the rest are placed for their old worker. ValueError for a composition of other
        ranks. Only while no step runs."""
        groups = groups_of(composition)
        if sum(composition) != len(self._slots):
            raise ValueError(f"composition {composition}: covers {sum(composition)} of {len(self._slots)} ranks")
        for request in tuple(self._unfinished):
            self.release(request)
        self._workers = {
            group: Holder.of(slot for rank in group.ranks for slot in self._slots[rank]) for group in groups
        }
        self._group_of = [group for group in groups for _ in group.ranks]
        self._evicted = {group: [] for group in groups}
        for unpinned in self._unpinned:
            for slot in [slot for slot in unpinned.values() if not self._is_held(slot)]:
                unpinned.move_to_end(slot.index, last=False)

    def _is_held(self, slot: Slot) -> bool:
        return self._workers[self._group_of[slot.rank]].holds(slot)

    # --- questions

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of the chain the worker holds. EngineError if the group is no worker of this epoch."""
        return self._worker(group).longest(chain)

    def resident(self, group: Group) -> Resident:
        """Everything the worker holds. EngineError if the group is no worker of this epoch."""
        return self._worker(group).resident()

    def reservation(self, request: RequestId) -> Reservation | None:
        """The request's slots while it is pinned."""
        return self._reservations.get(request)

    def finished(self, request: RequestId) -> Reservation | None:
        """The same, if the whole prompt is computed."""
        return None if request in self._unfinished else self._reservations.get(request)

    # --- one request's life: reserve, commit, release

    def reserve(self, request: RequestId, group: Group, chain: Sequence[BlockId], prompt_tokens: int) -> Reservation:
        """Pin what the worker holds of the prompt and take slots for the rest, evicting if it must. An unfinished request
        keeps its slots, but for those whose blocks have come from elsewhere meanwhile.

        Errors: OutOfBlocks if even eviction cannot make room, EngineError if the request is finished and pinned, if its
        prompt or worker is another one than when it was begun, or if the group is no worker. After an error nothing has
        changed.
        """
        worker = self._worker(group)
        if request in self._unfinished:
            return self._resume(request, group, tuple(chain), prompt_tokens)
        if request in self._reservations:
            raise EngineError(f"request {request}: its KV is already reserved; release it first")
        held_blocks = self.cached_blocks(group, chain)
        held = [worker.held[block] for block in chain[:held_blocks]]
        blocks = -(-prompt_tokens // self.block_tokens)
        ranks = [group.first_rank + depth % group.degree for depth in range(held_blocks, blocks)]
        self._pin(held)
        try:
            self._check_room(request, Counter(ranks))
        except OutOfBlocks:
            self._unpin(held)
            raise
        fresh = [self._take(rank) for rank in ranks]
        reservation = Reservation(
            request=request,
            group=group,
            prompt_tokens=prompt_tokens,
            chain=tuple(chain),
            slots=tuple(map(_ref, (*held, *fresh))),
            reused_blocks=self._reusable_blocks(held_blocks, prompt_tokens),
            held_blocks=held_blocks,
        )
        self._reservations[request] = reservation
        self._unfinished.add(request)
        return reservation

    def _reusable_blocks(self, held_blocks: int, prompt_tokens: int) -> int:
        return reusable_tokens(held_blocks, self.block_tokens, prompt_tokens) // self.block_tokens

    def _resume(self, request: RequestId, group: Group, chain: tuple[BlockId, ...], prompt_tokens: int) -> Reservation:
        begun = self._reservations[request]
        if (begun.group, begun.chain, begun.prompt_tokens) != (group, chain, prompt_tokens):
            raise EngineError(f"request {request}: was begun with another prompt or at {begun.group}; release it first")
        begun = self._take_over(begun)
        reused_blocks = self._reusable_blocks(begun.held_blocks, prompt_tokens)
        self._reservations[request] = resumed = replace(begun, reused_blocks=reused_blocks)
        return resumed

    def commit(self, request: RequestId, computed_tokens: int) -> Stored:
        """The prompt is computed up to `computed_tokens`, its end or a multiple of the block size: from now on the worker
        holds the whole blocks so far. They stay pinned, as does the room for the rest."""
        reservation = self._take_over(self._reservations[request])
        worker, first = self._worker(reservation.group), reservation.held_blocks
        whole_blocks = computed_tokens // self.block_tokens
        named = range(first, min(whole_blocks, len(reservation.chain)))
        for depth in named:
            slot = self._slot(reservation.slots[depth])
            slot.block, slot.depth = reservation.chain[depth], depth
            slot.parent = reservation.chain[depth - 1] if depth else None
            worker.hold(slot)
        self._reservations[request] = replace(reservation, held_blocks=max(first, whole_blocks))
        if computed_tokens == reservation.prompt_tokens:
            self._unfinished.remove(request)
        return Stored(first, len(named))

    def _take_over(self, reservation: Reservation) -> Reservation:
        """Exchange the request's own slots for blocks that another request has stored since (rule 7)."""
        held_blocks, held = reservation.held_blocks, self._worker(reservation.group).held
        stored = [slot for block in reservation.chain[held_blocks:] if (slot := held.get(block)) is not None]
        until = held_blocks + len(stored)
        self._pin(stored)
        self._unpin([self._slot(ref) for ref in reservation.slots[held_blocks:until]])
        slots = (*reservation.slots[:held_blocks], *map(_ref, stored), *reservation.slots[until:])
        return replace(reservation, slots=slots, held_blocks=until)

    def release(self, request: RequestId) -> None:
        """Drop the request's pins; what was never committed of it is free again. Unknown requests are ignored."""
        reservation = self._reservations.pop(request, None)
        if reservation is not None:
            self._unfinished.discard(request)
            self._unpin([self._slot(ref) for ref in reservation.slots])

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        """The ids that left the worker since the last call, in the order they went."""
        evicted = tuple(self._evicted[group])
        self._evicted[group].clear()
        return evicted

    # --- slots

    def _worker(self, group: Group) -> Holder:
        worker = self._workers.get(group)
        if worker is None:
            known = [(known.first_rank, known.degree) for known in self._workers]
            raise EngineError(f"group ({group.first_rank}, {group.degree}): not one of the workers {known}")
        return worker

    def _slot(self, ref: SlotRef) -> Slot:
        slot = self._slots[ref.rank][ref.index]
        assert slot.generation == ref.generation, f"a pinned slot was taken again: {ref} is {slot}"
        return slot

    def _check_room(self, request: RequestId, needed: Counter[int]) -> None:
        for rank, blocks in needed.items():
            room = len(self._free[rank]) + len(self._unpinned[rank])
            if blocks > room:
                raise OutOfBlocks(f"request {request}: rank {rank} needs {blocks} blocks and can free {room}")

    def _take(self, rank: int) -> Slot:
        if not self._free[rank]:
            self._evict(next(iter(self._unpinned[rank].values())))
        slot = self._free[rank].pop()
        slot.generation += 1
        slot.pins = 1
        return slot

    def _evict(self, victim: Slot) -> None:
        """Free the victim and everything the worker holds below it. A pinned descendant stays in its slot, stranded."""
        assert victim.block is not None, "only cached slots are evicted"
        if not self._is_held(victim):
            self._clear(victim)
            return
        group = self._group_of[victim.rank]
        for slot in self._workers[group].drop_subtree(victim.block):
            assert slot.block is not None, "what was held has an id"
            self._evicted[group].append(slot.block)
            if slot.pins == 0:
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self._unpinned[slot.rank].pop(slot.index, None)
        slot.block = slot.parent = None
        slot.depth = 0
        self._free[slot.rank].append(slot)

    def _pin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.pins += 1
            self._unpinned[slot.rank].pop(slot.index, None)

    def _unpin(self, slots: Sequence[Slot]) -> None:
        """Deepest first, so that on every rank a parent counts as used later than its children."""
        for slot in reversed(slots):
            slot.pins -= 1
            if slot.pins == 0 and slot.block is None:
                self._clear(slot)
            elif slot.pins == 0:
                self._unpinned[slot.rank][slot.index] = slot
                if not self._is_held(slot):
                    self._unpinned[slot.rank].move_to_end(slot.index, last=False)

    # --- self-check

    def counts(self, rank: int) -> tuple[int, int, int]:
        """(free, cached, pinned) slots of a rank. They add up to `blocks_per_rank`."""
        free, cached = len(self._free[rank]), len(self._unpinned[rank])
        return free, cached, self.blocks_per_rank - free - cached

    def check(self) -> None:
        """Assert that every slot is exactly one of free, cached and pinned, and that every holder is prefix-closed."""
        pins = Counter(ref for reservation in self._reservations.values() for ref in reservation.slots)
        for rank, slots in enumerate(self._slots):
            free = {slot.index for slot in self._free[rank]}
            assert len(free) == len(self._free[rank]), f"rank {rank}: a slot is free twice"
            for slot in slots:
                needed = pins[SlotRef(rank, slot.index, slot.generation)]
                cached = slot.index in self._unpinned[rank]
                assert (slot.index in free) + cached + (slot.pins > 0) == 1, f"{slot}: not exactly one state"
                assert slot.pins == needed, f"{slot}: {needed} reservations name it"
                assert slot.block is not None or not cached, f"{slot}: cached without a block"
        for group, worker in self._workers.items():
            worker.check(group.ranks)
