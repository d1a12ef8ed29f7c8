"""The rules of `kv_pool` and `kv_copies` once more, in as few and as slow words as they can be said: what the index is held
against after every operation.

It keeps no order and no table: whatever it wants to know it looks for in all slots. The index is asked which of several free
slots it took, which is nobody's concern, and every such answer must be one that the rules allow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.worker.engine.slot_ref import SlotRef
from shared.contracts.ids import BlockId
from shared.model.lattice import Composition, Group, groups_of


@dataclass(eq=False)
class Cell:
    """A slot. `used` is when its content was last let go, 0 before."""

    rank: int
    index: int
    generation: int = 0
    pins: int = 0
    used: int = 0
    block: BlockId | None = None
    parent: BlockId | None = None
    depth: int = 0

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.rank, self.index, self.generation)

    @property
    def is_free(self) -> bool:
        return self.block is None and not self.pins

    @property
    def is_cached(self) -> bool:
        return self.block is not None and not self.pins


@dataclass
class Begun:
    """A request that is being computed, or is done: `cells` are its pins, one per block of the prompt, `held` of them held."""

    group: Group
    chain: Sequence[BlockId]
    cells: list[Cell]
    held: int
    finished: bool = False


@dataclass
class Coming:
    """A copy under way into `cells`, below the pinned cells `above`."""

    group: Group
    above: list[Cell]
    blocks: Sequence[BlockId]
    cells: list[Cell]
    void: bool = False


@dataclass
class PoolModel:
    """Of `ranks` × `blocks_per_rank` slots. `evicted` are blocks that had to make room, and their parents, until taken."""

    ranks: int
    blocks_per_rank: int
    requests: dict[str, Begun] = field(default_factory=dict)
    coming: dict[str, Coming] = field(default_factory=dict)
    lent: dict[str, list[Cell]] = field(default_factory=dict)
    held: dict[Group, dict[BlockId, Cell]] = field(default_factory=dict)
    evicted: dict[Group, list[tuple[BlockId, BlockId | None]]] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.cells = [[Cell(rank, index) for index in range(self.blocks_per_rank)] for rank in range(self.ranks)]

    # --- questions

    def on(self, group: Group) -> list[Cell]:
        return [cell for rank in group.ranks for cell in self.cells[rank]]

    def cached(self, group: Group, chain: Sequence[BlockId]) -> int:
        return next((depth for depth, block in enumerate(chain) if block not in self.held[group]), len(chain))

    def counts(self, rank: int) -> tuple[int, int, int]:
        cells = self.cells[rank]
        free, cached = sum(cell.is_free for cell in cells), sum(cell.is_cached for cell in cells)
        return free, cached, len(cells) - free - cached

    def is_held(self, cell: Cell) -> bool:
        return any(cell in held.values() for held in self.held.values())

    def fits(self, group: Group, kept: Iterable[Cell], first: int, end: int) -> bool:
        """Whether there is room for the blocks at depths `first` to `end` while `kept` are pinned as well."""
        room = {rank: sum(self.counts(rank)[:2]) for rank in group.ranks}
        for cell in kept:
            room[cell.rank] -= cell.is_cached
        for depth in range(first, end):
            room[group.first_rank + depth % group.degree] -= 1
        return min(room.values()) >= 0

    def path(self, group: Group, block: BlockId) -> list[Cell]:
        """Held cells from the first block down to this one."""
        cell = self.held[group][block]
        return [*(self.path(group, cell.parent) if cell.parent is not None else []), cell]

    def take_evicted(self, group: Group) -> list[tuple[BlockId, BlockId | None]]:
        evicted, self.evicted[group] = self.evicted[group], []
        return evicted

    # --- geometry

    def adopt(self, composition: Composition) -> None:
        for name in [name for name, begun in self.requests.items() if not begun.finished]:
            self.release(name)
        for each in self.coming.values():
            each.void = True
        self.held = {group: self._reachable(group) for group in groups_of(composition)}
        self.evicted = {group: [] for group in self.held}

    def _reachable(self, group: Group) -> dict[BlockId, Cell]:
        """Blocks whose parents are reached too; of two copies the one that stays longer."""
        held: dict[BlockId, Cell] = {}
        while found := [
            cell
            for cell in self.on(group)
            if cell.block is not None and cell.block not in held and (cell.parent is None or cell.parent in held)
        ]:
            for block in {cell.block for cell in found if cell.block is not None}:
                copies = [cell for cell in found if cell.block == block]
                held[block] = max(copies, key=lambda cell: (cell.pins, cell.used, -cell.rank, -cell.index))
        return held

    # --- requests

    def reserve(self, name: str, group: Group, chain: Sequence[BlockId], refs: Sequence[SlotRef]) -> None:
        """The index has given the request these slots."""
        held = [self.held[group][block] for block in chain[: self.cached(group, chain)]]
        assert list(refs[: len(held)]) == [cell.ref for cell in held]
        self._pin(held)
        fresh = [self._taken(ref, group, depth) for depth, ref in enumerate(refs[len(held) :], len(held))]
        self.requests[name] = Begun(group, chain, [*held, *fresh], len(held))

    def refuse(self, cells: Sequence[Cell]) -> None:
        """For want of room: what there is of the prompt, or above the blocks, has been looked up and so was used."""
        self._pin(cells)
        self._unpin(cells)

    def take_over(self, name: str) -> None:
        """What others have stored of the prompt since replaces what the request has of its own."""
        begun = self.requests[name]
        until = max(begun.held, self.cached(begun.group, begun.chain))
        stored = [self.held[begun.group][block] for block in begun.chain[begun.held : until]]
        self._pin(stored)
        self._unpin(begun.cells[begun.held : until])
        begun.cells[begun.held : until], begun.held = stored, until

    def commit(self, name: str, blocks: int, *, finished: bool) -> None:
        """Of whole blocks, from the prompt's first on."""
        self.take_over(name)
        begun = self.requests[name]
        for depth in range(begun.held, min(blocks, len(begun.chain))):
            self._hold(begun.group, begun.cells[depth], begun.chain, depth)
        begun.held, begun.finished = max(begun.held, min(blocks, len(begun.chain))), finished

    def release(self, name: str) -> None:
        if begun := self.requests.pop(name, None):
            self._unpin(begun.cells)

    # --- copies, leases, evictions by order

    def install(
        self, name: str, group: Group, above: Sequence[BlockId], blocks: Sequence[BlockId], refs: Sequence[SlotRef]
    ) -> None:
        """The index has given the blocks, a path below `above`, these slots."""
        over = [self.held[group][block] for block in above]
        self._pin(over)
        fresh = [self._taken(ref, group, depth) for depth, ref in enumerate(refs, len(over))]
        self.coming[name] = Coming(group, over, blocks, fresh)

    def finish(self, name: str, arrived: int) -> list[BlockId]:
        """Which of the blocks the worker has got by it."""
        each = self.coming.pop(name)
        path = [*(cell.block for cell in each.above if cell.block is not None), *each.blocks]
        got = []
        for depth, cell in enumerate(each.cells[: 0 if each.void else arrived], len(each.above)):
            if path[depth] not in self.held[each.group]:
                self._hold(each.group, cell, path, depth)
                got.append(path[depth])
        self._unpin([*each.above, *each.cells])
        return got

    def lend(self, name: str, refs: Iterable[SlotRef | None], blocks: Sequence[BlockId]) -> None:
        """The index has lent these copies: held ones, where there are any, with what is held above them."""
        pinned: list[Cell] = []
        for ref, block in zip(refs, blocks, strict=True):
            copies = [cell for cells in self.cells for cell in cells if cell.block == block]
            held = [cell for cell in copies if self.is_held(cell)]
            if ref is None:
                assert not copies
                continue
            (cell,) = [cell for cell in held or copies if cell.ref == ref]
            group = next((group for group, known in self.held.items() if cell in known.values()), None)
            path = [cell] if group is None else self.path(group, block)
            pinned += [each for each in path if each not in pinned]
        self._pin(pinned)
        self.lent[name] = pinned

    def end_lease(self, name: str) -> None:
        self._unpin(self.lent.pop(name))

    def evict(self, group: Group, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Which of the blocks go, deepest first."""
        held, gone = self.held[group], []
        for block in sorted(set(blocks) & held.keys(), key=lambda block: -held[block].depth):
            if not held[block].pins and not any(cell.parent == block for cell in held.values()):
                gone.append(block)
                self._drop(group, block)
        return gone

    # --- slots

    def _hold(self, group: Group, cell: Cell, path: Sequence[BlockId], depth: int) -> None:
        cell.block, cell.parent, cell.depth = path[depth], path[depth - 1] if depth else None, depth
        self.held[group][path[depth]] = cell

    def _taken(self, ref: SlotRef, group: Group, depth: int) -> Cell:
        """A fresh slot, of the rank whose turn it is: a free one, else the one that has to go."""
        cell = self.cells[ref.rank][ref.index]
        assert ref.rank == group.first_rank + depth % group.degree, f"{ref}: is not cyclic"
        assert ref.generation > cell.generation, f"{ref}: names a content that was"
        if self.counts(ref.rank)[0]:
            assert cell.is_free, f"{ref}: was not free, and others were"
        else:
            self._pushed_out(cell)
        cell.generation, cell.pins, cell.used = ref.generation, 1, 0
        return cell

    def _pushed_out(self, cell: Cell) -> None:
        """Nothing is free on the rank: what no worker holds goes first, then what was used least recently, leaf first."""
        cached = [each for each in self.cells[cell.rank] if each.is_cached]
        stranded = [each for each in cached if not self.is_held(each)]
        assert cell in (stranded or cached), f"{cell}: is pinned, or held where something is stranded"
        if stranded:
            cell.block = None
            return
        assert self._turn(cell) == min(map(self._turn, cached)), f"{cell}: it was not its turn"
        assert cell.block is not None
        (group,) = [group for group, held in self.held.items() if cell in held.values()]
        self._drop_below(group, cell.block)

    @staticmethod
    def _turn(cell: Cell) -> tuple[int, int]:
        return cell.used, -cell.depth

    def _drop_below(self, group: Group, block: BlockId) -> None:
        for child in [below for below, cell in self.held[group].items() if cell.parent == block]:
            self._drop_below(group, child)
        self.evicted[group].append((block, self.held[group][block].parent))
        self._drop(group, block)

    def _drop(self, group: Group, block: BlockId) -> None:
        cell = self.held[group].pop(block)
        if not cell.pins:
            cell.block = None

    def _pin(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            cell.pins += 1

    def _unpin(self, cells: Iterable[Cell]) -> None:
        self.now += 1
        for cell in cells:
            cell.pins -= 1
            if not cell.pins:
                cell.used = self.now
