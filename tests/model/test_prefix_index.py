"""The tree of runs against sets of paths, whatever is told in whatever order."""

from collections.abc import Iterable
from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.contracts.ids import BlockId, WorkerId
from shared.model.prefix_index import PrefixIndex

WORKERS = tuple(WorkerId(f"n/1/{first_rank}") for first_rank in range(4))
PATHS = st.text("ab", min_size=1, max_size=9)
WHO = st.sampled_from(WORKERS)


def block(path: str) -> BlockId:
    """The block that ends a path: a letter a block."""
    return BlockId(path.encode().rjust(16))


def chain(path: str) -> tuple[BlockId, ...]:
    return tuple(block(path[: depth + 1]) for depth in range(len(path)))


def common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class AgainstSets(RuleBasedStateMachine):
    """The model: for each holder the set of paths whose last block it has."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixIndex[WorkerId] = PrefixIndex()
        self.paths: dict[WorkerId, set[str]] = {worker: set() for worker in WORKERS}

    @rule(worker=WHO, path=PATHS, since=st.integers(0, 4))
    def store(self, worker: WorkerId, path: str, since: int) -> None:
        """A run from some depth on; it counts only if what is above it is there."""
        since = min(since, len(path) - 1)
        told = chain(path)
        new = self.tree.add(worker, told[since - 1] if since else None, told[since:])
        held = self.paths[worker]
        if since and path[:since] not in held:
            assert not new
            return
        expected = {path[: depth + 1] for depth in range(since, len(path))} - held
        assert list(new) == [block(each) for each in sorted(expected, key=len)]
        held |= expected

    @rule(worker=WHO, path=PATHS, leaf_first=st.booleans())
    def evict(self, worker: WorkerId, path: str, leaf_first: bool) -> None:
        """A block goes with all below it, whether they are named after it, before it, or not at all."""
        held = self.paths[worker]
        gone = sorted((each for each in held if each.startswith(path)), key=len, reverse=True)
        self.lost(worker, self.tree.remove(worker, map(block, gone if leaf_first else [path, *gone])), gone)

    @rule(worker=WHO, tops=st.lists(PATHS, max_size=4))
    def evict_several(self, worker: WorkerId, tops: list[str]) -> None:
        gone = [each for each in self.paths[worker] if any(each.startswith(top) for top in tops)]
        self.lost(worker, self.tree.remove(worker, map(block, tops)), gone)

    @rule(worker=WHO)
    def clear(self, worker: WorkerId) -> None:
        self.lost(worker, self.tree.clear(worker), set(self.paths[worker]))

    def lost(self, worker: WorkerId, told: list[BlockId], gone: Iterable[str]) -> None:
        gone = set(gone)
        assert sorted(told) == sorted(map(block, gone)), "each once, and no other"
        depth = {block(each): len(each) for each in gone}
        for parent in gone:
            below = [told.index(block(each)) for each in gone if each[:-1] == parent]
            assert all(at < told.index(block(parent)) for at in below), f"children first: {depth}"
        self.paths[worker] -= gone

    @rule(worker=WHO, path=PATHS, parent=PATHS)
    def lie(self, worker: WorkerId, path: str, parent: str) -> None:
        """A known block below a parent that is not its own counts for nothing, nor does what is below it."""
        known = any(path in held for held in self.paths.values())
        if known and parent != path[:-1] and len(parent) >= len(path):
            assert not self.tree.add(worker, block(parent), [block(path), block(path + "a")])

    @invariant()
    def every_answer_agrees(self) -> None:
        self.tree.check()
        everything = set().union(*self.paths.values())
        assert self.tree.index.keys() == set(map(block, everything))
        for worker, held in self.paths.items():
            assert self.tree.counts.get(worker, 0) == len(held)
            told = list(self.tree.held(worker))
            assert dict(told) == {block(each): block(each[:-1]) if each[:-1] else None for each in held}
            seen: set[BlockId | None] = {None}
            assert all(parent in seen and not seen.add(each) for each, parent in told), "parents first"
            assert {each for each in everything if self.tree.holds(worker, block(each))} == held
        for each in everything:
            assert set(self.tree.holders(block(each))) == {w for w, held in self.paths.items() if each in held}

    @rule(path=PATHS)
    def match(self, path: str) -> None:
        depths = {w: max((common(path, each) for each in held), default=0) for w, held in self.paths.items()}
        assert self.tree.matched(chain(path)) == {worker: depth for worker, depth in depths.items() if depth}


AgainstSets.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstSets = AgainstSets.TestCase


def test_a_copy_is_whole_and_apart_however_long_a_path() -> None:
    tree: PrefixIndex[WorkerId] = PrefixIndex()
    trunk = [BlockId(number.to_bytes(16)) for number in range(500)]
    for depth in range(1, 500):  # a branch, and so a run, at each block
        tree.add(WORKERS[depth % 4], None, [*trunk[:depth], BlockId((depth + 10_000).to_bytes(16))])
    copy = deepcopy(tree)
    copy.check()
    assert copy.matched(trunk) == tree.matched(trunk)
    assert [list(copy.held(worker)) for worker in WORKERS] == [list(tree.held(worker)) for worker in WORKERS]
    for worker in WORKERS:
        copy.clear(worker)
    assert not copy.index
    tree.check()


def test_a_block_twice_in_one_word_counts_once() -> None:
    tree: PrefixIndex[WorkerId] = PrefixIndex()
    a, ab = chain("ab")
    assert list(tree.add(WORKERS[0], None, [a, ab, a, ab])) == [a, ab]
    tree.check()
    assert tree.remove(WORKERS[0], [ab, ab, a]) == [ab, a]
    tree.check()
    assert not tree.index
    assert tree.matched(()) == {}
