"""Blocks that come, are lent and go: random histories of everything a pool can do, and the rules one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, invariant, multiple, rule

from services.worker.engine.kv_copies import Installation
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.protocol import EngineError, OutOfBlocks
from services.worker.engine.slot_ref import SlotRef
from shared.contracts.ids import BlockId
from shared.model.lattice import Group
from tests.services.worker.engine.test_kv_pool import BLOCK_TOKENS, PoolMachine, chain_of, pool_of, request, stored

TEXTS = st.text(alphabet="ab", min_size=1, max_size=6)


class MovingMachine(PoolMachine):
    """A pool whose prompts come and go while blocks are copied in, lent out, evicted by order, and the geometry changes."""

    installing = Bundle("installing")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.installations: dict[str, Installation] = {}
        self.lent: dict[str, dict[SlotRef, BlockId]] = {}

    def room(self) -> list[tuple[int, int, int]]:
        return [self.pool.counts(rank) for rank in range(4)]

    @rule(target=installing, worker=st.integers(0, 3), text=TEXTS, below=st.integers(0, 5))
    def install(self, worker: int, text: str, below: int) -> object:
        group, chain = self.groups[worker % len(self.groups)], chain_of(text)
        below = min(below, len(chain) - 1)
        parent, name = chain[below - 1] if below else None, f"o{self.count}"
        held, before = self.pool.cached_blocks(group, chain), self.room()
        try:
            installation = self.pool.copies.install(name, group, parent, chain[below:])
        except OutOfBlocks:
            assert self.room() == before
            return multiple()
        except EngineError:
            assert held < below
            assert self.room() == before
            return multiple()
        self.count += 1
        self.installations[name] = installation
        assert held >= below
        assert installation.first_depth == held
        assert list(installation.blocks) == chain[held:]
        for depth, ref in enumerate(installation.slots, held):
            assert ref.rank == group.first_rank + depth % group.degree
            assert self.memory.get((ref.rank, ref.index), (0, b""))[0] < ref.generation
        return name

    @rule(name=consumes(installing), share=st.floats(0, 1))
    def arrive(self, name: str, share: float) -> None:
        """A part of it, from none to all, as a copy does that fails somewhere."""
        installation = self.installations.pop(name)
        arrived = round(share * len(installation.blocks))
        for ref, block in zip(installation.slots[:arrived], installation.blocks, strict=False):
            self.memory[ref.rank, ref.index] = (ref.generation, block)
        void, group, path = self.pool.copies.is_void(name), installation.group, self.path_to(installation)
        complete = len(path) - len(installation.blocks) + arrived
        before = 0 if void else self.pool.cached_blocks(group, path)
        installed = self.pool.copies.finish(name, arrived).blocks
        if void:
            assert installed == ()
            return
        assert installed == tuple(path[before:complete])
        assert self.pool.cached_blocks(group, path) == max(before, complete)

    def path_to(self, installation: Installation) -> list[BlockId]:
        """The ids of everything the installation pinned above, then its own."""
        above = [self.memory[ref.rank, ref.index][1] for ref in installation.above]
        return [*above, *installation.blocks]

    @rule(target=leases, text=TEXTS, stray=st.booleans())
    def lend(self, text: str, stray: bool) -> str:
        name, chain = f"l{self.count}", chain_of(text)
        self.count += 1
        asked = [*chain, BlockId(b"unknown of length")[:16]] if stray else chain
        refs = self.pool.copies.lend(name, asked)
        assert refs == self.pool.copies.lend(name, []), "a repeated lease is answered as the first"
        assert not stray or refs[-1] is None
        self.lent[name] = {ref: block for ref, block in zip(refs, asked, strict=True) if ref is not None}
        for group in self.groups:
            assert sum(ref is not None for ref in refs) >= self.pool.cached_blocks(group, chain)
        return name

    @rule(name=consumes(leases))
    def end_lease(self, name: str) -> None:
        self.pool.copies.end_lease(name)
        self.pool.copies.end_lease(name)
        del self.lent[name]

    @rule(worker=st.integers(0, 3), text=TEXTS, above=st.integers(0, 6))
    def evict(self, worker: int, text: str, above: int) -> None:
        group, chain = self.groups[worker % len(self.groups)], chain_of(text)
        held = self.pool.cached_blocks(group, chain)
        pinned = {block for block, slot in self.pool._slots.worker(group).held.items() if slot.pins}
        gone = self.pool.copies.evict(group, chain[above:])
        assert {*gone.freed, *(block for block, _ in gone.kept)} == set(chain[above:])
        assert not pinned & set(gone.freed)
        assert self.pool.cached_blocks(group, chain) == held - len(gone.freed)
        assert list(gone.freed) == chain[held - len(gone.freed) : held][::-1], "leaf first"

    @invariant()
    def what_is_lent_stays(self) -> None:
        for promised in self.lent.values():
            for ref, block in promised.items():
                assert self.memory[ref.rank, ref.index] == (ref.generation, block)

    def teardown(self) -> None:
        for name in self.installations:
            self.pool.copies.finish(name, 0)
        for name in self.lent:
            self.pool.copies.end_lease(name)
        super().teardown()
        self.pool.check()


TestMovingMachine = MovingMachine.TestCase
TestMovingMachine.settings = settings(max_examples=180, stateful_step_count=60, deadline=None)


def arrived(pool: KvPool, name: str, group: Group, text: str, blocks: int) -> tuple[BlockId, ...]:
    pool.copies.install(name, group, None, chain_of(text))
    return pool.copies.finish(name, blocks).blocks


def test_blocks_from_elsewhere_are_placed_by_the_workers_own_layout_and_held_when_they_are_there() -> None:
    pool = pool_of((4,))
    installation = pool.copies.install("o", Group(0, 4), None, chain_of("abcdef"))
    assert [ref.rank for ref in installation.slots] == [0, 1, 2, 3, 0, 1]
    assert pool.cached_blocks(Group(0, 4), chain_of("abcdef")) == 0
    assert pool.copies.finish("o", 6).blocks == tuple(chain_of("abcdef"))
    assert pool.cached_blocks(Group(0, 4), chain_of("abcdef")) == 6
    assert [pool.counts(rank)[2] for rank in range(4)] == [0, 0, 0, 0]


def test_what_arrived_before_a_failure_is_a_shorter_prefix() -> None:
    pool = pool_of((2,))
    assert arrived(pool, "o", Group(0, 2), "abcd", 3) == tuple(chain_of("abc"))
    assert pool.cached_blocks(Group(0, 2), chain_of("abcd")) == 3
    assert [pool.counts(rank) for rank in range(2)] == [(2, 2, 0), (3, 1, 0)]
    assert arrived(pool, "again", Group(0, 2), "abcd", 1) == tuple(chain_of("abcd")[3:]), "only what is missing"


def test_a_path_that_hangs_in_the_air_is_refused() -> None:
    pool = pool_of((1,))
    with pytest.raises(EngineError, match="does not hold it, and the plan does not bring it"):
        pool.copies.install("o", Group(0, 1), chain_of("a")[0], chain_of("ab")[1:])
    pool.copies.install("o", Group(0, 1), None, chain_of("a"))
    with pytest.raises(EngineError, match="operation o: is under way"):
        pool.copies.install("o", Group(0, 1), None, chain_of("a"))


def test_room_is_made_as_for_a_prompt_and_the_path_above_stays() -> None:
    pool = pool_of((1,), blocks_per_rank=4)
    stored(pool, "above", Group(0, 1), "ab")
    stored(pool, "other", Group(0, 1), "xy")
    pool.copies.install("o", Group(0, 1), chain_of("ab")[1], chain_of("abcd")[2:])
    assert pool.take_evicted(Group(0, 1)) == tuple(reversed(chain_of("xy")))
    with pytest.raises(OutOfBlocks, match="operation p: rank 0 needs 1 blocks and can free 0"):
        pool.copies.install("p", Group(0, 1), None, chain_of("m"))
    assert pool.copies.finish("o", 2).blocks == tuple(chain_of("abcd")[2:])


def test_a_switch_on_the_way_installs_nothing_and_keeps_the_slots_until_nobody_writes() -> None:
    pool = pool_of((2,))
    pool.copies.install("o", Group(0, 2), None, chain_of("abcd"))
    pool.adopt((1, 1))
    assert [pool.counts(rank)[2] for rank in range(2)] == [2, 2]
    assert pool.copies.is_void("o")
    assert pool.copies.finish("o", 4).blocks == ()
    assert [pool.counts(rank) for rank in range(2)] == [(4, 0, 0), (4, 0, 0)]
    pool.check()


def test_of_two_that_bring_the_same_block_the_later_gives_its_slot_back() -> None:
    pool = pool_of((1,))
    pool.copies.install("o", Group(0, 1), None, chain_of("ab"))
    stored(pool, "computed", Group(0, 1), "a")
    a, b = chain_of("ab")
    assert pool.copies.finish("o", 2) == (a, 1, (b,))
    assert pool.counts(0) == (2, 2, 0)


def test_a_lease_finds_stranded_blocks_and_outlives_a_switch() -> None:
    pool = pool_of((4,))
    stored(pool, "a", Group(0, 4), "abcd")
    pool.adopt((1, 1, 1, 1))
    refs = pool.copies.lend("l", chain_of("abcdz"))
    assert [ref and ref.rank for ref in refs] == [0, 1, 2, 3, None]
    assert pool.copies.leases == 1
    pool.adopt((2, 2))
    assert [pool.counts(rank)[2] for rank in range(4)] == [1, 1, 1, 1]
    pool.copies.end_lease("l")
    pool.copies.end_lease("never was")
    assert [pool.counts(rank)[1] for rank in range(4)] == [1, 1, 1, 1]


def test_a_lent_block_is_not_evicted_nor_is_what_lies_above_it() -> None:
    pool = pool_of((1,))
    stored(pool, "a", Group(0, 1), "abc")
    pool.copies.lend("l", chain_of("ab")[1:])
    a, b, c = chain_of("abc")
    gone = pool.copies.evict(Group(0, 1), [a, b, c, chain_of("x")[0]])
    assert gone.freed == (c,)
    assert dict(gone.kept) == {a: "pinned", b: "pinned", chain_of("x")[0]: "not-held"}


def test_eviction_on_demand_goes_leaf_first_and_spares_what_has_descendants() -> None:
    pool = pool_of((2,))
    stored(pool, "c", Group(0, 2), "abc")
    stored(pool, "x", Group(0, 2), "abx")
    a, b, c = chain_of("abc")
    gone = pool.copies.evict(Group(0, 2), [a, b, c])
    assert gone.freed == (c,)
    assert gone.kept == ((b, "has-descendants"), (a, "has-descendants"))
    assert pool.copies.evict(Group(0, 2), chain_of("abx")).freed == tuple(reversed(chain_of("abx")))
    assert [pool.counts(rank) for rank in range(2)] == [(4, 0, 0), (4, 0, 0)]
    assert pool.take_evicted(Group(0, 2)) == (), "what was asked for is not pressure"


def test_a_begun_prompt_takes_over_what_was_copied_for_it() -> None:
    pool = pool_of((1,), blocks_per_rank=6)
    pool.reserve(request(1), Group(0, 1), chain_of("abc"), 3 * BLOCK_TOKENS)
    arrived(pool, "o", Group(0, 1), "ab", 2)
    resumed = pool.reserve(request(1), Group(0, 1), chain_of("abc"), 3 * BLOCK_TOKENS)
    assert (resumed.reused_blocks, resumed.held_blocks) == (2, 2)
