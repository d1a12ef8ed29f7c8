"""The KV index against a memory that only does what the index says, and its rules one by one."""

from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.worker.engine.kv_pool import KvPool, Reservation
from services.worker.engine.protocol import EngineError, OutOfBlocks, Stored
from shared.contracts.ids import BlockId, RequestId
from shared.model.lattice import Group, groups_of

BLOCK_TOKENS = 4
COMPOSITIONS = [(4,), (2, 2), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1)]


def chain_of(text: str) -> list[BlockId]:
    """One block per letter; equal prefixes have equal ids."""
    return [BlockId(blake2b(text[: end + 1].encode(), digest_size=16).digest()) for end in range(len(text))]


def request(name: object) -> RequestId:
    return RequestId(f"r{name}")


def stored(pool: KvPool, name: str, group: Group, text: str, tail_tokens: int = 0) -> None:
    """Compute a prompt and let go of it."""
    pool.reserve(request(name), group, chain_of(text), len(text) * BLOCK_TOKENS + tail_tokens)
    pool.commit(request(name), len(text) * BLOCK_TOKENS + tail_tokens)
    pool.release(request(name))


class PoolMachine(RuleBasedStateMachine):
    """Reserves, commits, releases and switches at random. `memory` stands for the tensors: what a commit wrote where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(ranks=4, blocks_per_rank=4, block_tokens=BLOCK_TOKENS)
        self.memory: dict[tuple[int, int], tuple[int, BlockId]] = {}
        self.running: set[RequestId] = set()
        self.count = 0

    running_requests = Bundle("running_requests")
    done_requests = Bundle("done_requests")

    @initialize(composition=st.sampled_from(COMPOSITIONS))
    def start(self, composition: tuple[int, ...]) -> None:
        self.groups = groups_of(composition)
        self.pool.adopt(composition)

    @rule(
        target=running_requests,
        worker=st.integers(0, 3),
        text=st.text(alphabet="ab", max_size=6),
        tail_tokens=st.integers(0, BLOCK_TOKENS - 1),
    )
    def reserve(self, worker: int, text: str, tail_tokens: int) -> object:
        group = self.groups[worker % len(self.groups)]
        chain, prompt_tokens = chain_of(text), len(text) * BLOCK_TOKENS + tail_tokens
        if prompt_tokens == 0:
            return multiple()
        name = request(self.count)
        before = self.pool.cached_blocks(group, chain)
        try:
            reservation = self.pool.reserve(name, group, chain, prompt_tokens)
        except OutOfBlocks:
            assert self.pool.cached_blocks(group, chain) == before
            return multiple()
        self.count += 1
        self.running.add(name)
        assert reservation.held_blocks == before
        assert reservation.reused_blocks * BLOCK_TOKENS < prompt_tokens
        for depth, ref in enumerate(reservation.slots):
            if depth < before:
                assert self.memory[ref.rank, ref.index] == (ref.generation, chain[depth])
            else:
                assert ref.rank == group.first_rank + depth % group.degree
                assert self.memory.get((ref.rank, ref.index), (0, b""))[0] < ref.generation
        return name

    @rule(name=running_requests, blocks=st.integers(1, 5))
    def compute_some(self, name: RequestId, blocks: int) -> None:
        """A chunk: not the end of the prompt, and no way back."""
        reservation = self.pool.reservation(name)
        if reservation is None:
            return  # a switch has released it
        end_tokens = max(blocks, reservation.held_blocks) * BLOCK_TOKENS
        if end_tokens < reservation.prompt_tokens:
            self.compute(reservation, end_tokens)
            resumed = self.pool.reserve(name, reservation.group, reservation.chain, reservation.prompt_tokens)
            assert resumed.reused_blocks * BLOCK_TOKENS < resumed.prompt_tokens
            assert resumed.held_blocks * BLOCK_TOKENS >= end_tokens

    @rule(target=done_requests, name=consumes(running_requests))
    def finish(self, name: RequestId) -> object:
        reservation = self.pool.reservation(name)
        self.running.discard(name)
        if reservation is None:
            return multiple()
        assert self.pool.finished(name) is None
        self.compute(reservation, reservation.prompt_tokens)
        assert self.pool.finished(name) == self.pool.reservation(name)
        return name

    def compute(self, reservation: Reservation, end_tokens: int) -> None:
        whole_blocks = end_tokens // BLOCK_TOKENS
        before = self.pool.cached_blocks(reservation.group, reservation.chain)
        written = list(zip(reservation.slots, reservation.chain, strict=False))[reservation.held_blocks : whole_blocks]
        for ref, block in written:
            self.memory[ref.rank, ref.index] = (ref.generation, block)
        report = self.pool.commit(reservation.request, end_tokens)
        assert (report.first_depth, report.blocks) == (before, max(0, whole_blocks - before))
        committed = self.pool.reservation(reservation.request)
        assert committed is not None
        for ref, block in list(zip(committed.slots, committed.chain, strict=False))[:whole_blocks]:
            assert self.memory[ref.rank, ref.index] == (ref.generation, block)
        assert self.pool.cached_blocks(reservation.group, reservation.chain) == max(before, whole_blocks)

    @rule(name=consumes(running_requests))
    def abort(self, name: RequestId) -> None:
        self.running.discard(name)
        self.pool.release(name)

    @rule(name=consumes(done_requests))
    def release(self, name: RequestId) -> None:
        self.pool.release(name)

    @rule(composition=st.sampled_from(COMPOSITIONS))
    def adopt(self, composition: tuple[int, ...]) -> None:
        self.groups = groups_of(composition)
        self.pool.adopt(composition)
        assert not any(self.pool.reservation(name) for name in self.running), "what is unfinished is released"
        self.running.clear()

    @invariant()
    def holds_together(self) -> None:
        self.pool.check()
        for rank in range(4):
            assert sum(self.pool.counts(rank)) == 4

    def teardown(self) -> None:
        for name in range(self.count):
            self.pool.release(request(name))
        assert all(self.pool.counts(rank)[2] == 0 for rank in range(4))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def pool_of(composition: tuple[int, ...], blocks_per_rank: int = 4) -> KvPool:
    pool = KvPool(sum(composition), blocks_per_rank, BLOCK_TOKENS)
    pool.adopt(composition)
    return pool


def test_blocks_are_placed_cyclically_and_the_tail_is_private() -> None:
    pool = pool_of((4,))
    reservation = pool.reserve(request(1), Group(0, 4), chain_of("abcde"), 5 * BLOCK_TOKENS + 1)
    assert [ref.rank for ref in reservation.slots] == [0, 1, 2, 3, 0, 1]
    assert pool.commit(request(1), 5 * BLOCK_TOKENS + 1).blocks == 5
    pool.release(request(1))
    assert [pool.counts(rank) for rank in range(4)] == [(2, 2, 0), (3, 1, 0), (3, 1, 0), (3, 1, 0)]


def test_the_last_token_of_a_fully_held_prompt_is_computed_but_not_stored_again() -> None:
    pool = pool_of((1,))
    stored(pool, "first", Group(0, 1), "abc")
    again = pool.reserve(request(2), Group(0, 1), chain_of("abc"), 3 * BLOCK_TOKENS)
    assert (again.reused_blocks, again.held_blocks, len(again.slots)) == (2, 3, 3)
    assert pool.commit(request(2), 3 * BLOCK_TOKENS).blocks == 0


def test_pressure_evicts_the_least_recently_used_leaf_first() -> None:
    pool = pool_of((1,), blocks_per_rank=5)
    stored(pool, "old", Group(0, 1), "ab")
    stored(pool, "new", Group(0, 1), "xyz")
    stored(pool, "old again", Group(0, 1), "ab")
    stored(pool, "other", Group(0, 1), "m")
    assert pool.take_evicted(Group(0, 1)) == (chain_of("xyz")[2],)
    assert pool.take_evicted(Group(0, 1)) == ()
    assert pool.cached_blocks(Group(0, 1), chain_of("ab")) == 2


def test_a_rank_without_room_takes_the_descendants_on_other_ranks_along() -> None:
    pool = pool_of((2,), blocks_per_rank=2)
    stored(pool, "long", Group(0, 2), "abcd")
    stored(pool, "short", Group(0, 2), "x")
    assert pool.take_evicted(Group(0, 2)) == (chain_of("abcd")[3], chain_of("abcd")[2])
    pool.check()


def test_a_prompt_too_large_for_what_can_be_freed_changes_nothing() -> None:
    pool = pool_of((1,), blocks_per_rank=3)
    pool.reserve(request(1), Group(0, 1), chain_of("ab"), 2 * BLOCK_TOKENS)
    pool.commit(request(1), 2 * BLOCK_TOKENS)
    with pytest.raises(OutOfBlocks, match="needs 2 blocks and can free 1"):
        pool.reserve(request(2), Group(0, 1), chain_of("xy"), 2 * BLOCK_TOKENS)
    assert pool.take_evicted(Group(0, 1)) == ()
    assert pool.cached_blocks(Group(0, 1), chain_of("ab")) == 2


def test_a_split_strands_and_a_merge_brings_back() -> None:
    pool = pool_of((4,))
    stored(pool, "a", Group(0, 4), "abcdefgh")
    pool.adopt((2, 2))
    assert pool.cached_blocks(Group(0, 2), chain_of("abcdefgh")) == 2
    assert pool.cached_blocks(Group(2, 2), chain_of("abcdefgh")) == 0
    pool.adopt((1, 1, 1, 1))
    assert [pool.cached_blocks(Group(rank, 1), chain_of("abcdefgh")) for rank in range(4)] == [1, 0, 0, 0]
    pool.adopt((4,))
    assert pool.cached_blocks(Group(0, 4), chain_of("abcdefgh")) == 8


def test_stranded_blocks_go_before_held_ones() -> None:
    pool = pool_of((1, 1), blocks_per_rank=3)
    stored(pool, "held", Group(1, 1), "x")
    pool.adopt((2,))
    stored(pool, "cyclic", Group(0, 2), "abcd")
    pool.adopt((1, 1))
    stored(pool, "new", Group(1, 1), "y")
    assert pool.take_evicted(Group(1, 1)) == (), "b or d went, which the worker did not hold"
    assert pool.cached_blocks(Group(1, 1), chain_of("x")) == 1
    pool.check()


def test_a_merge_holds_one_of_two_copies_and_resident_lists_it_once() -> None:
    pool = pool_of((1, 1))
    stored(pool, "left", Group(0, 1), "abc")
    stored(pool, "right", Group(1, 1), "abx")
    pool.adopt((2,))
    a, b, c = chain_of("abc")
    x = chain_of("abx")[2]
    (trunk, *branches) = pool.resident(Group(0, 2)).runs
    assert trunk == (None, (a, b))
    assert sorted(branches) == sorted([(b, (c,)), (b, (x,))])


def test_pins_outlive_a_switch_and_an_eviction_of_their_parents() -> None:
    pool = pool_of((2,), blocks_per_rank=2)
    pool.reserve(request(1), Group(0, 2), chain_of("abcd"), 4 * BLOCK_TOKENS)
    pool.commit(request(1), 4 * BLOCK_TOKENS)
    pool.adopt((1, 1))
    with pytest.raises(OutOfBlocks):
        pool.reserve(request(2), Group(1, 1), chain_of("x"), BLOCK_TOKENS)
    pool.release(request(1))
    pool.reserve(request(2), Group(1, 1), chain_of("x"), BLOCK_TOKENS)
    pool.check()


def test_the_second_of_two_equal_blocks_gives_its_slot_back() -> None:
    pool = pool_of((2,))
    for text in ("abc", "abx"):
        pool.reserve(request(text), Group(0, 2), chain_of(text), 3 * BLOCK_TOKENS)
    assert pool.commit(request("abc"), 3 * BLOCK_TOKENS) == Stored(0, 3)
    assert pool.commit(request("abx"), 3 * BLOCK_TOKENS) == Stored(2, 1)
    assert [pool.counts(rank) for rank in range(2)] == [(1, 0, 3), (3, 0, 1)]
    first, second = (pool.reservation(request(name)) for name in ("abc", "abx"))
    assert first is not None
    assert second is not None
    assert first.slots[:2] == second.slots[:2]
    pool.release(request("abc"))
    pool.check()
    assert [pool.counts(rank)[1] for rank in range(2)] == [1, 0], "the parents of x are pinned still"


def test_an_unfinished_prompt_keeps_its_room_and_takes_what_others_have_stored() -> None:
    pool = pool_of((2,), blocks_per_rank=3)
    begun = pool.reserve(request("abcd"), Group(0, 2), chain_of("abcd"), 4 * BLOCK_TOKENS + 1)
    assert pool.commit(request("abcd"), BLOCK_TOKENS) == Stored(0, 1)
    assert pool.cached_blocks(Group(0, 2), chain_of("abcd")) == 1
    with pytest.raises(OutOfBlocks):
        stored(pool, "other", Group(0, 2), "xy")
    stored(pool, "prefix", Group(0, 2), "ab")
    resumed = pool.reserve(request("abcd"), Group(0, 2), chain_of("abcd"), 4 * BLOCK_TOKENS + 1)
    assert (begun.reused_blocks, resumed.reused_blocks, resumed.held_blocks) == (0, 2, 2)
    assert pool.commit(request("abcd"), 4 * BLOCK_TOKENS + 1) == Stored(2, 2)
    pool.release(request("abcd"))
    assert [pool.counts(rank) for rank in range(2)] == [(1, 2, 0), (1, 2, 0)]


def test_refusals_name_what_is_wrong() -> None:
    pool = pool_of((2, 2))
    with pytest.raises(EngineError, match=r"not one of the workers \[\(0, 2\), \(2, 2\)\]"):
        pool.cached_blocks(Group(0, 4), [])
    with pytest.raises(ValueError, match="covers 2 of 4 ranks"):
        pool.adopt((2,))
    pool.reserve(request(1), Group(0, 2), chain_of("a"), BLOCK_TOKENS)
    with pytest.raises(EngineError, match="was begun with another prompt"):
        pool.reserve(request(1), Group(2, 2), chain_of("a"), BLOCK_TOKENS)
    with pytest.raises(EngineError, match="was begun with another prompt"):
        pool.reserve(request(1), Group(0, 2), chain_of("ab"), 2 * BLOCK_TOKENS)
    pool.commit(request(1), BLOCK_TOKENS)
    with pytest.raises(EngineError, match="already reserved"):
        pool.reserve(request(1), Group(0, 2), chain_of("a"), BLOCK_TOKENS)
    with pytest.raises(ValueError, match="blocks_per_rank: 0"):
        KvPool(1, 0, BLOCK_TOKENS)
