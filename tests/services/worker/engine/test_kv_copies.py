"""Blocks that come, are lent and go: random histories of everything a pool can do, and the rules one by one."""

from typing import NoReturn

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, rule

from services.worker.engine.holder import Holder, Slot
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.protocol import EngineError, OutOfBlocks
from shared.contracts.ids import BlockId
from shared.model.lattice import Group
from tests.services.worker.engine.test_kv_pool import (
    BLOCK_TOKENS,
    PoolMachine,
    chain_of,
    pool_of,
    request,
    run,
    stored,
)

TEXTS = st.text(alphabet="ab", min_size=1, max_size=6)


class MovingMachine(PoolMachine):
    """A pool whose prompts come and go while blocks are copied in, lent out, evicted by order, and the geometry changes."""

    installing = Bundle("installing")
    leases = Bundle("leases")

    @rule(target=installing, worker=st.integers(0, 3), text=TEXTS, below=st.integers(0, 5))
    def install(self, worker: int, text: str, below: int) -> object:
        self.operated()
        group, chain = self.worker(worker), chain_of(text)
        below = min(below, len(chain) - 1)
        parent, name = chain[below - 1] if below else None, f"o{self.count}"
        held = self.model.cached(group, chain)
        above = self.model.path(group, chain[held - 1]) if held else []
        fits = self.model.fits(group, above, held, len(chain))
        try:
            installation = self.pool.copies.install(name, group, parent, chain[below:])
        except OutOfBlocks:
            assert held >= below
            assert not fits
            self.model.refuse(above)
            return multiple()
        except EngineError:
            assert held < below
            return multiple()
        assert fits
        assert held >= below
        self.count += 1
        assert (installation.first_depth, list(installation.blocks)) == (held, chain[held:])
        self.model.install(name, group, chain[:held], chain[held:], installation.slots)
        return name

    @rule(name=consumes(installing), share=st.floats(0, 1))
    def arrive(self, name: str, share: float) -> None:
        """A part of it, from none to all, as a copy does that fails somewhere."""
        self.operated()
        coming = self.model.coming[name]
        arrived = round(share * len(coming.blocks))
        assert self.pool.copies.is_void(name) is coming.void
        installed = self.pool.copies.finish(name, arrived)
        assert list(installed.blocks) == self.model.finish(name, arrived)

    @rule(target=leases, text=TEXTS, stray=st.booleans())
    def lend(self, text: str, stray: bool) -> str:
        self.operated()
        name, chain = f"l{self.count}", chain_of(text)
        self.count += 1
        asked = [*chain, BlockId(b"unknown of length")[:16]] if stray else chain
        refs = self.pool.copies.lend(name, asked)
        assert refs == self.pool.copies.lend(name, []), "a repeated lease is answered as the first"
        self.model.lend(name, refs, asked)
        return name

    @rule(name=consumes(leases))
    def end_lease(self, name: str) -> None:
        self.operated()
        self.pool.copies.end_lease(name)
        self.pool.copies.end_lease(name)
        self.model.end_lease(name)

    @rule(worker=st.integers(0, 3), text=TEXTS, above=st.integers(0, 6))
    def evict(self, worker: int, text: str, above: int) -> None:
        self.operated()
        group, chain = self.worker(worker), chain_of(text)
        gone = self.pool.copies.evict(group, chain[above:])
        assert {*gone.freed, *(block for block, _ in gone.kept)} == set(chain[above:])
        assert list(gone.freed) == self.model.evict(group, chain[above:]), "leaf first, and nothing that is pinned"

    def teardown(self) -> None:
        for name in self.model.coming:
            self.pool.copies.finish(name, 0)
        for name in self.model.lent:
            self.pool.copies.end_lease(name)
        super().teardown()


def test_ten_thousand_operations_with_copies_are_what_the_rules_make_of_them(pytestconfig: pytest.Config) -> None:
    run(MovingMachine, pytestconfig, examples=220)


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


class _Uncounted(list[Slot]):
    """Slots that may be asked for by number, and not gone through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a node has millions of slots, and a step without room asks a hundred times a second")


def test_whether_copies_and_leases_are_in_the_way_is_known_without_going_through_the_memory() -> None:
    pool = pool_of((1,))
    pool.copies.install("copy", Group(0, 1), None, chain_of("ab"))
    stored(pool, "lent", Group(0, 1), "x")
    pool.copies.lend("lease", chain_of("x"))
    pool._slots._slots = [_Uncounted(slots) for slots in pool._slots._slots]
    for blocks, passing in ((4, True), (5, False)):
        with pytest.raises(OutOfBlocks) as refused:
            pool.reserve(request(blocks), Group(0, 1), [], blocks * BLOCK_TOKENS)
        assert refused.value.passing is passing
    pool.reserve(request("x"), Group(0, 1), chain_of("x"), BLOCK_TOKENS)
    with pytest.raises(OutOfBlocks) as refused:
        pool.reserve(request("all"), Group(0, 1), [], 4 * BLOCK_TOKENS)
    assert not refused.value.passing, "a prompt needs the lent block, too"


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


def test_lending_a_long_prompt_looks_at_each_block_a_few_times_and_not_at_its_path_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, looks, holds = 1_000, 0, Holder.holds
    chain = [BlockId(depth.to_bytes(16, "big")) for depth in range(blocks)]
    pool = pool_of((2,), blocks_per_rank=blocks)
    pool.reserve(request(1), Group(0, 2), chain, blocks * BLOCK_TOKENS)
    pool.commit(request(1), blocks * BLOCK_TOKENS)
    pool.release(request(1))

    def counted(holder: Holder, slot: Slot) -> bool:
        nonlocal looks
        looks += 1
        return holds(holder, slot)

    monkeypatch.setattr(Holder, "holds", counted)
    assert None not in pool.copies.lend("l", chain)
    assert looks <= 3 * blocks
    assert [pool.counts(rank)[2] for rank in range(2)] == [blocks / 2] * 2
    pool.check()


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
