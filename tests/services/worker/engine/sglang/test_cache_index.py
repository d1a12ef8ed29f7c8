"""What agents are told of a cache that changes by itself: never ahead of the pages, never out of order."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.engine.protocol import EngineError, Resident, Stored
from services.worker.engine.sglang.cache_index import CacheIndex
from services.worker.engine.sglang.kv_messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Message
from services.worker.engine.sglang.page_hashes import page_hashes, salt_of
from services.worker.engine.sglang.unit_cache import UnitCache
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import Composition, Group, groups_of

PAGE = 4


def tokens_of(text: str) -> Tokens:
    """A block for each letter."""
    return np.repeat(np.array([ord(letter) for letter in text], dtype=np.uint32), PAGE)


def chain_of(text: str) -> tuple[BlockId, ...]:
    return tuple(block_chain(tokens_of(text), PAGE, b"k" * 32))


def pages_of(text: str) -> list[int]:
    return page_hashes(tokens_of(text), PAGE, salt_of(RequestId(text), chain_of(text)))


class Node:
    """Units and the index over them."""

    def __init__(self, ranks: int, *composition: int) -> None:
        self.units = [UnitCache() for _ in range(ranks)]
        self.index = CacheIndex(self.units, blocks_per_rank=100)
        self.groups = groups_of(composition)
        self.index.adopt(self.groups)

    def events(self, rank: int, *events: Event) -> None:
        unit = self.units[rank]
        unit.fold(Message(unit.next_sequence or 0, list(events)))

    def store(self, rank: int, text: str) -> None:
        self.events(rank, BlockStored(pages_of(text), None, PAGE, "GPU"))

    def remove(self, rank: int, text: str, below: int) -> None:
        self.events(rank, BlockRemoved(pages_of(text)[below:], "GPU"))

    def name(self, text: str) -> None:
        self.index.learn(pages_of(text), chain_of(text), tokens_of(text).tobytes())


def test_a_page_is_told_of_once_a_request_has_named_it() -> None:
    node = Node(1, 1)
    (group,) = node.groups
    node.store(0, "abc")
    assert node.index.resident(group) == Resident(())
    assert node.index.cached_blocks(group, chain_of("abc")) == 0
    node.name("abcd")
    assert node.index.cached_blocks(group, chain_of("abcd")) == 3
    assert node.index.resident(group) == Resident(()), "a report tells nothing that no event has told"
    assert node.index.take_stored(group, chain_of("abcd")) == Stored(0, 3)
    assert node.index.take_stored(group, chain_of("abcd")) == Stored(3, 0)
    assert node.index.resident(group).runs == ((None, chain_of("abc")),)


def test_what_leaves_is_told_children_first_and_before_what_comes() -> None:
    node = Node(1, 1)
    (group,) = node.groups
    node.name("abcd")
    node.store(0, "abcd")
    node.index.take_stored(group, chain_of("abcd"))
    node.remove(0, "abcd", below=1)
    assert node.index.take_evicted(group) == tuple(reversed(chain_of("abcd")[1:]))
    assert node.index.take_evicted(group) == ()
    node.store(0, "abc")
    assert node.index.take_stored(group, chain_of("abcd")) == Stored(1, 2)


def test_what_left_and_came_back_untold_has_not_left() -> None:
    node = Node(1, 1)
    (group,) = node.groups
    node.name("ab")
    node.store(0, "ab")
    node.index.take_stored(group, chain_of("ab"))
    node.events(0, AllBlocksCleared(), BlockStored(pages_of("ab"), None, PAGE, "GPU"))
    assert node.index.take_evicted(group) == ()
    assert node.index.take_stored(group, chain_of("ab")) == Stored(2, 0)


def test_units_keep_caches_of_their_own_and_groups_have_their_first_unit_s() -> None:
    node = Node(4, 2, 1, 1)
    node.name("ab")
    for rank in (0, 1, 2):
        node.store(rank, "ab")
    assert [node.index.cached_blocks(group, chain_of("ab")) for group in node.groups] == [2, 2, 0]
    node.index.adopt(groups_of((1, 1, 2)))
    assert [len(node.index.resident(group).runs) for group in groups_of((1, 1, 2))] == [1, 1, 1]
    with pytest.raises(EngineError, match="is not one of the workers"):
        node.index.cached_blocks(Group(0, 2), chain_of("ab"))


def test_the_path_to_a_block_has_its_tokens() -> None:
    node = Node(1, 1)
    node.name("abc")
    named = node.index.path(chain_of("abc")[1])
    assert named is not None
    assert [name.block for name in named] == list(chain_of("ab"))
    assert b"".join(name.tokens for name in named) == tokens_of("ab").tobytes()
    assert node.index.path(BlockId(b"?" * 16)) is None


def test_subtrees_that_are_wanted_whole_go_by_their_heads() -> None:
    node = Node(1, 1)
    (group,) = node.groups
    for text in ("abcd", "abxy"):
        node.name(text)
        node.store(0, text)
        node.index.take_stored(group, chain_of(text))
    b, c, d = chain_of("abcd")[1:]
    assert node.index.subtrees(group, {c, d}) == ([c], [])
    assert node.index.subtrees(group, {b, c, d}) == ([c], [b])
    x, y = chain_of("abxy")[2:]
    assert node.index.subtrees(group, {b, c, d, x, y}) == ([b], [])
    assert node.index.subtrees(group, {c}) == ([], [c])


def test_names_that_nobody_needs_are_forgotten_oldest_first() -> None:
    unit = UnitCache()
    index = CacheIndex([unit], blocks_per_rank=1)
    index.adopt(groups_of((1,)))
    for text in ("abc", "def"):
        index.learn(pages_of(text), chain_of(text), tokens_of(text).tobytes())
    unit.fold(Message(0, [BlockStored(pages_of("a"), None, PAGE, "GPU")]))
    index.prune(needed=pages_of("ab"))
    known = [block for text in ("abc", "def") for block in chain_of(text) if index.page(block) is not None]
    assert known == [*chain_of("ab"), *chain_of("def")[1:]]


def test_to_forget_a_name_few_are_looked_at() -> None:
    """A node at the limit of its names meets it with every prompt, and has hundreds of thousands."""
    unit = UnitCache()
    index = CacheIndex([unit], blocks_per_rank=5_000)
    index.adopt(groups_of((1,)))
    pages = range(1, 20_010)
    index.learn(pages, [BlockId(page.to_bytes(BLOCK_ID_BYTES, "big")) for page in pages], bytes(20_009 * 4))
    unit.held = set(pages[:4])
    index.prune(needed=set(pages[:2]))
    tracemalloc.start()
    for page in range(30_000, 30_020):
        index.learn([page], [BlockId(page.to_bytes(BLOCK_ID_BYTES, "big"))], bytes(4))
        index.prune(needed=set())
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown < 20_000, "no copy of all names"
    assert index.page(BlockId((1).to_bytes(BLOCK_ID_BYTES, "big"))) == 1
    assert index.page(BlockId((30_019).to_bytes(BLOCK_ID_BYTES, "big"))) == 30_019


class Told(RuleBasedStateMachine):
    """A cache that behaves as SGLang's: it stores paths, evicts leaves, clears, and says so; an agent listens to the index."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(2, 1, 1)
        self.trees: list[set[str]] = [set(), set()]
        self.told: dict[Group, dict[BlockId, BlockId | None]] = {group: {} for group in self.node.groups}

    @rule(rank=st.integers(0, 1), text=st.text("ab", min_size=1, max_size=5))
    def computes(self, rank: int, text: str) -> None:
        new = [text[:end] for end in range(1, len(text) + 1) if text[:end] not in self.trees[rank]]
        self.trees[rank].update(new)
        if new:
            parent = pages_of(text)[: len(new[0]) - 1]
            self.node.events(
                rank, BlockStored(pages_of(text)[len(new[0]) - 1 :], parent[-1] if parent else None, 4, "GPU")
            )

    @precondition(lambda self: any(self.trees))
    @rule(rank=st.integers(0, 1), number=st.integers(0, 99))
    def evicts(self, rank: int, number: int) -> None:
        tree = self.trees[rank]
        leaves = sorted(text for text in tree if not any(other[:-1] == text for other in tree))
        if leaves:
            leaf = leaves[number % len(leaves)]
            tree.discard(leaf)
            self.node.events(rank, BlockRemoved([pages_of(leaf)[-1]], "GPU"))

    @rule(rank=st.integers(0, 1), keeps=st.booleans())
    def clears(self, rank: int, keeps: bool) -> None:
        if not keeps:
            self.trees[rank].clear()
        again = [BlockStored([pages_of(text)[-1]], None, 4, "GPU") for text in sorted(self.trees[rank], key=len)]
        self.node.events(rank, AllBlocksCleared(), *again)

    @rule(text=st.text("ab", min_size=1, max_size=5))
    def names(self, text: str) -> None:
        self.node.name(text)

    @rule(worker=st.integers(0, 1), text=st.text("ab", min_size=1, max_size=5))
    def asks(self, worker: int, text: str) -> None:
        """A prefill that has ended: what left, then what came."""
        group, chain = self.node.groups[worker % len(self.node.groups)], chain_of(text)
        self.node.name(text)
        self._leave(group, self.node.index.take_evicted(group))
        stored = self.node.index.take_stored(group, chain)
        for depth in range(stored.first_depth, stored.first_depth + stored.blocks):
            assert chain[depth] not in self.told[group], "told twice"
            assert depth == 0 or chain[depth - 1] in self.told[group], "told before its parent"
            self.told[group][chain[depth]] = chain[depth - 1] if depth else None
        assert self.node.index.cached_blocks(group, chain) == len(
            [end for end in range(1, len(text) + 1) if text[:end] in self.trees[group.first_rank]]
        )

    @rule(composition=st.sampled_from([(1, 1), (2,)]))
    def adopts(self, composition: Composition) -> None:
        """Two units that merge keep what both have."""
        if composition == (2,) and len(self.node.groups) == 2:
            both = self.trees[0] & self.trees[1]
            self.trees = [set(both), set(both)]
            for rank in (0, 1):
                self.clears(rank, keeps=True)
        self.node.groups = groups_of(composition)
        self.node.index.adopt(self.node.groups)
        self.told = {group: self._resident(group) for group in self.node.groups}

    def _leave(self, group: Group, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            assert block not in self.told[group].values(), "told to leave before what is below it"
            del self.told[group][block]

    def _resident(self, group: Group) -> dict[BlockId, BlockId | None]:
        found: dict[BlockId, BlockId | None] = {}
        for parent, blocks in self.node.index.resident(group).runs:
            for block in blocks:
                found[block], parent = parent, block
        return found

    @invariant()
    def what_is_told_and_not_taken_back_is_held(self) -> None:
        for group in self.node.groups:
            self._leave(group, self.node.index.take_evicted(group))
            held = {chain_of(text)[-1] for text in self.trees[group.first_rank]}
            assert self.told[group].keys() <= held, "the pool believes in pages that are gone"
            assert self._resident(group) == self.told[group], "a report says something else than the events before it"


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
