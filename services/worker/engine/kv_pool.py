"""The physical KV index of one node: which block lies in which slot, who needs it, and what may go. Torch-free and pure.

Rules:

1.  Every rank has `blocks_per_rank` slots. A slot is exactly one of *free*, *cached* (holds a block, may be evicted) and
    *pinned* (a request needs it). A slot's generation grows each time it is taken, so (rank, index, generation) names
    one content for ever and a late reader notices that it came too late.
2.  New blocks of a degree-C worker go to rank `first_rank + depth mod C` (cyclic layout). Where a block lies is
    recorded, not derived: after a switch the rule no longer describes the blocks that were there before.
3.  A worker *holds* a block that lies on one of its ranks and whose parent it holds too, as of the last `adopt` or
    `commit`. So holders are prefix-closed, and the longest match is the first gap in the chain.
4.  `adopt` moves nothing. A merge makes the blocks of all its ranks usable together; of two copies a pinned one stays held, or
    else the one that was used last. After a split, blocks whose parents lie on the sibling's ranks are *stranded*: they keep
    their slots, are first to be evicted, and are held again, with the age that they have, if a later merge brings their
    parents back.
5.  Under pressure the least recently used block of the rank that lacks room goes, a leaf before its parents, and with it its
    descendants on other ranks, deepest first. A block is used no later than its parent, so what goes was used no later than the
    victim (but where requests pinned both copies of a block when their workers were merged).
6.  Whole blocks get an id when they are committed. A prompt's partial last block never has one: it is the request's own
    and is free again when the request is released.
7.  Copies between workers keep the same rules: see `kv_copies`.
8.  Of two requests that compute the same block side by side, the second to commit takes over the first one's copy and gives
    its own back: a worker never holds a block twice, and rule 5 needs every request to pin the parents of its blocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.worker.engine.copy_plan import Evicted
from services.worker.engine.kv_copies import KvCopies
from services.worker.engine.kv_slots import KvSlots, ref_of
from services.worker.engine.protocol import EngineError, OutOfBlocks, Resident, Stored
from services.worker.engine.slot_ref import SlotRef
from shared.contracts.ids import BlockId, RequestId
from shared.model.blocks import reusable_tokens
from shared.model.lattice import Composition, Group


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


class KvPool:
    """See the module docstring for the rules. Calls are cheap and synchronous; one event loop owns a pool. `copies` is for
    what comes from another worker, is lent to one, or is to go."""

    def __init__(self, ranks: int, blocks_per_rank: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._slots = KvSlots(ranks, blocks_per_rank)
        self.copies = KvCopies(self._slots)
        self._reservations: dict[RequestId, Reservation] = {}
        # In the order in which they were begun: a set's would be another in every process, and so the age of what is released.
        self._unfinished: dict[RequestId, None] = {}

    def adopt(self, composition: Composition) -> None:
        """Regroup the ranks. Blocks, pins and slots stay as they are, but for requests that are unfinished: those are
        released, because their slots for the rest are placed for their old worker; and copies under way install nothing.
        ValueError for a composition of other ranks. Only while no step runs."""
        for request in tuple(self._unfinished):
            self.release(request)
        self._slots.adopt(composition)
        self.copies.void()

    # --- questions

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of the chain the worker holds. EngineError if the group is no worker of this epoch."""
        return self._slots.worker(group).longest(chain)

    def resident(self, group: Group) -> Resident:
        """Everything the worker holds. EngineError if the group is no worker of this epoch."""
        return self._slots.worker(group).resident()

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
        changed, but that what there is of the prompt counts as used.
        """
        worker = self._slots.worker(group)
        if request in self._unfinished:
            return self._resume(request, group, tuple(chain), prompt_tokens)
        if request in self._reservations:
            raise EngineError(f"request {request}: its KV is already reserved; release it first")
        held_blocks = self.cached_blocks(group, chain)
        held = [worker.held[block] for block in chain[:held_blocks]]
        blocks = -(-prompt_tokens // self.block_tokens)
        ranks = [group.first_rank + depth % group.degree for depth in range(held_blocks, blocks)]
        self._slots.pin(held)
        try:
            fresh = self._slots.take_all(f"request {request}", ranks)
        except OutOfBlocks as error:
            passing = self._slots.has_room_without(self.copies.pins(), ranks)
            self._slots.unpin(held)
            raise OutOfBlocks(str(error), passing=passing) from None
        reservation = Reservation(
            request=request,
            group=group,
            prompt_tokens=prompt_tokens,
            chain=tuple(chain),
            slots=tuple(map(ref_of, (*held, *fresh))),
            reused_blocks=self._reusable_blocks(held_blocks, prompt_tokens),
            held_blocks=held_blocks,
        )
        self._reservations[request] = reservation
        self._unfinished[request] = None
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
        worker, first = self._slots.worker(reservation.group), reservation.held_blocks
        whole_blocks = computed_tokens // self.block_tokens
        named = reservation.chain[first:whole_blocks]
        parent = reservation.chain[first - 1] if named and first else None
        slots = self._slots.pinned(reservation.slots[first : first + len(named)])
        self._slots.hold(worker, slots, named, parent, first)
        self._reservations[request] = replace(reservation, held_blocks=max(first, whole_blocks))
        if computed_tokens == reservation.prompt_tokens:
            del self._unfinished[request]
        return Stored(first, len(named))

    def _take_over(self, reservation: Reservation) -> Reservation:
        """Exchange the request's own slots for blocks that another request has stored since (rule 8)."""
        held_blocks, held = reservation.held_blocks, self._slots.worker(reservation.group).held
        stored = [slot for block in reservation.chain[held_blocks:] if (slot := held.get(block)) is not None]
        if not stored:
            return reservation
        until = held_blocks + len(stored)
        self._slots.pin(stored)
        self._slots.unpin(self._slots.pinned(reservation.slots[held_blocks:until]))
        slots = (*reservation.slots[:held_blocks], *map(ref_of, stored), *reservation.slots[until:])
        return replace(reservation, slots=slots, held_blocks=until)

    def release(self, request: RequestId) -> None:
        """Drop the request's pins; what was never committed of it is free again. Unknown requests are ignored."""
        reservation = self._reservations.pop(request, None)
        if reservation is not None:
            self._unfinished.pop(request, None)
            self._slots.unpin(self._slots.pinned(reservation.slots))

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        """The ids that left the worker to make room since the last call, in the order they went. EngineError if the group is no
        worker of this epoch."""
        self._slots.worker(group)
        evicted = tuple(self._slots.evicted[group])
        self._slots.evicted[group].clear()
        return evicted

    def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        """See `KvCopies.evict`; with what went before."""
        return replace(self.copies.evict(group, blocks), evicted=self.take_evicted(group))

    # --- self-check

    def counts(self, rank: int) -> tuple[int, int, int]:
        """See `KvSlots.counts`."""
        return self._slots.counts(rank)

    def check(self) -> None:
        """Assert that every slot is exactly one of free, cached and pinned, as often as requests and copies need it, and
        that every holder is prefix-closed."""
        pins = Counter(ref for reservation in self._reservations.values() for ref in reservation.slots)
        self._slots.check(pins + self.copies.pins())
