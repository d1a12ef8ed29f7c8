"""What each worker holds in the pool's own block ids, out of pages that its units hold. Pure.

1.  SGLang names a page by a hash of tokens; the pool names the same block by a keyed hash that only routers can compute. A
    request brings both: its tokens and its chain. So a page has a name here from the first request on that contained it;
    pages nobody has named (other clients', generated tokens) are held and not told of until one does.
2.  A worker's pages are those of its first unit. While units are merged they hold the same; after a split each child's first
    unit has what it kept.
3.  The agent is *told* of stores and evictions, in order: what was told and has left is named by `take_evicted`, children
    before parents, before anything new is by `take_stored`. So the pool's picture is never ahead of the pages, and behind
    by what nobody has asked for yet.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.worker.engine.holder import Holder, Slot
from services.worker.engine.protocol import EngineError, Resident, Stored
from services.worker.engine.sglang.page_hashes import PageHash
from services.worker.engine.sglang.unit_cache import UnitCache
from shared.contracts.ids import BlockId
from shared.model.lattice import Group

NAMES_PER_BLOCK = 4
"""Names are kept for four times as many blocks as a unit holds: a page that is evicted and computed again needs no new one."""


@dataclass(frozen=True, slots=True)
class Named:
    """A page's block: id, parent (None for the root), depth, and its tokens as u32 little-endian."""

    block: BlockId
    parent: BlockId | None
    depth: int
    tokens: bytes = field(repr=False)


class CacheIndex:
    """`units[r]` is the unit of prefill rank r; ranks of one server of fixed degree share one."""

    def __init__(self, units: Sequence[UnitCache], blocks_per_rank: int) -> None:
        self._units = units
        self._names_max = NAMES_PER_BLOCK * blocks_per_rank * len(set(map(id, units)))
        self._names: OrderedDict[PageHash, Named] = OrderedDict()
        self._pages: dict[BlockId, PageHash] = {}
        self._told: dict[Group, Holder] = {}
        self._left: dict[Group, set[BlockId]] = {}

    def adopt(self, groups: Iterable[Group]) -> None:
        """Other workers from now on, told of everything that they hold and that has a name."""
        self._note_gone()
        self._told = {group: self._named(group) for group in groups}
        self._left = {group: set() for group in self._told}

    # --- names

    def learn(self, pages: Sequence[PageHash], chain: Sequence[BlockId], raw: bytes) -> None:
        """A prompt's pages and what the pool calls them; `raw` is its tokens. Of an id that is known nothing changes."""
        page_bytes = len(raw) // len(pages) if pages else 0
        for depth, (page, block) in enumerate(zip(pages, chain, strict=False)):
            if page not in self._names:
                parent = chain[depth - 1] if depth else None
                tokens = raw[depth * page_bytes : (depth + 1) * page_bytes]
                self._names[page] = Named(block, parent, depth, tokens)
                self._pages[block] = page

    def prune(self, needed: Collection[PageHash]) -> None:
        """Forget the oldest names that no page and no running request needs, if there are too many. What is needed counts as
        new from then on, so that a call looks at few names that it does not forget."""
        for _ in range(len(self._names)):
            if len(self._names) <= self._names_max:
                return
            page = next(iter(self._names))
            if page in needed or self._needs(page, self._names[page].block):
                self._names.move_to_end(page)
            else:
                del self._pages[self._names.pop(page).block]

    def _needs(self, page: PageHash, block: BlockId) -> bool:
        """Whether a unit has the page, or a worker was told that it has."""
        return any(page in unit.held for unit in self._units) or any(block in each.held for each in self._told.values())

    def page(self, block: BlockId) -> PageHash | None:
        """SGLang's name for a block, if a request has brought it."""
        return self._pages.get(block)

    def path(self, block: BlockId) -> list[Named] | None:
        """The named blocks from the root to this one; None if one of them is not known."""
        found: list[Named] = []
        wanted: BlockId | None = block
        while wanted is not None:
            name = self._names.get(self._pages.get(wanted, 0))
            if name is None or name.block != wanted:
                return None
            found.append(name)
            wanted = name.parent
        return found[::-1]

    # --- what workers hold

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of the chain the worker holds. EngineError if the group is no worker."""
        self.worker(group)
        held = self._units[group.first_rank].held
        return next((depth for depth, block in enumerate(chain) if self._pages.get(block) not in held), len(chain))

    def resident(self, group: Group) -> Resident:
        """What the worker was told to hold; nothing is told by asking. After `take_evicted`, it holds all of it."""
        return self.worker(group).resident()

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        """What the worker was told to hold and does not, children before parents."""
        self._note_gone()
        told, held = self.worker(group), self._units[group.first_rank].held
        left, self._left[group] = self._left[group], set()
        gone: list[BlockId] = []
        for block in left:
            if block in told.held and self._pages[block] not in held:
                gone += [slot.block for slot in told.drop_subtree(block) if slot.block is not None]
        return tuple(gone)

    def take_stored(self, group: Group, chain: Sequence[BlockId]) -> Stored:
        """What of a prompt the worker holds and was not told of. After `take_evicted`, in the same turn."""
        told = self.worker(group)
        first, held_blocks = told.longest(chain), self.cached_blocks(group, chain)
        for block in chain[first:held_blocks]:
            told.hold(self._slot(group, self._names[self._pages[block]]))
        return Stored(first, max(0, held_blocks - first))

    def groups(self) -> Collection[Group]:
        """The workers of this epoch."""
        return self._told.keys()

    def told(self, group: Group) -> Collection[BlockId]:
        """The blocks that the worker is told to hold."""
        return self.worker(group).held.keys()

    def subtrees(self, group: Group, wanted: Collection[BlockId]) -> tuple[list[BlockId], list[BlockId]]:
        """Of told blocks, those that head a subtree which is wanted whole, and those with something below that is not."""
        told = self.worker(group)
        whole: dict[BlockId, bool] = {}
        for block in sorted(wanted, key=lambda block: told.held[block].depth, reverse=True):
            whole[block] = all(whole.get(child, False) for child in told.children.get(block, {}))
        heads = [block for block, free in whole.items() if free and not self._free_above(told, block, whole)]
        return heads, [block for block, free in whole.items() if not free]

    @staticmethod
    def _free_above(told: Holder, block: BlockId, whole: Mapping[BlockId, bool]) -> bool:
        parent = told.held[block].parent
        return parent is not None and whole.get(parent, False)

    def holds_any(self, group: Group, blocks: Iterable[BlockId]) -> bool:
        """Whether the worker still has one of these."""
        held = self._units[group.first_rank].held
        return any(self._pages.get(block) in held for block in blocks)

    def worker(self, group: Group) -> Holder:
        """EngineError if the group is none of this epoch's."""
        try:
            return self._told[group]
        except KeyError:
            raise EngineError(f"{group}: is not one of the workers {list(self._told)}") from None

    def _note_gone(self) -> None:
        """Spread what units have lost over the workers that were told to hold it."""
        for unit in self._units:
            if unit.gone:
                blocks = [self._names[page].block for page in unit.gone if page in self._names]
                unit.gone.clear()
                for group, left in self._left.items():
                    if self._units[group.first_rank] is unit:
                        left.update(blocks)

    def _named(self, group: Group) -> Holder:
        """Everything that the group's pages are named as, down to where a parent is not held or has no name."""
        held, holder = self._units[group.first_rank].held, Holder()
        named = (self._names[page] for page in held if page in self._names)
        for name in sorted(named, key=lambda name: (name.depth, name.block)):
            if name.parent is None or name.parent in holder.held:
                holder.hold(self._slot(group, name))
        return holder

    @staticmethod
    def _slot(group: Group, name: Named) -> Slot:
        """A holder of pages that lie on every rank alike: the slot says nothing of where."""
        return Slot(group.first_rank, 0, block=name.block, parent=name.parent, depth=name.depth)
