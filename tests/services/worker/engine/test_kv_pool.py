"""The KV index against its rules said once more and naively, at random, and one by one.

The random operations are the same in every run; `--hypothesis-seed N` has others.
"""

from hashlib import blake2b

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from services.worker.engine.kv_pool import KvPool, Reservation
from services.worker.engine.protocol import EngineError, OutOfBlocks, Stored
from shared.contracts.ids import BlockId, RequestId
from shared.model.lattice import Group, groups_of
from tests.services.worker.engine.pool_model import PoolModel

RANKS, BLOCKS, BLOCK_TOKENS = 4, 4, 4
TEXTS = ("aaaaaa", "aaabbb", "abbbbb", "bbbbbb")
PROMPTS = st.sampled_from([(text[:end], tail) for text in TEXTS for end in range(1, 7) for tail in (0, 1)])
"""Whole blocks, and how many tokens come behind them. One draw for all of it: drawing is what takes the time."""

WORKERS = st.integers(0, 3)
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
    """Reserves, commits, releases and switches at random, and holds the index against the rules said naively (`PoolModel`)
    after every operation: which slots, pins and generations, what is held, what had to go and in which order."""

    operations = 0
    """Of all examples: what a pool was asked to do, and did or refused."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(ranks=RANKS, blocks_per_rank=BLOCKS, block_tokens=BLOCK_TOKENS)
        self.model = PoolModel(RANKS, BLOCKS)
        self.running: set[RequestId] = set()
        self.count = 0

    running_requests = Bundle("running_requests")
    done_requests = Bundle("done_requests")

    @initialize(composition=st.sampled_from(COMPOSITIONS))
    def start(self, composition: tuple[int, ...]) -> None:
        self.adopt(composition)

    def worker(self, number: int) -> Group:
        return self.groups[number % len(self.groups)]

    def operated(self) -> None:
        type(self).operations += 1

    @rule(target=running_requests, worker=WORKERS, prompt=PROMPTS)
    def reserve(self, worker: int, prompt: tuple[str, int]) -> object:
        name = self.reserved(self.worker(worker), *prompt)
        return multiple() if name is None else name

    def reserved(self, group: Group, text: str, tail_tokens: int) -> RequestId | None:
        """None if there is no room."""
        self.operated()
        chain, prompt_tokens = chain_of(text), len(text) * BLOCK_TOKENS + tail_tokens
        name, held = request(self.count), self.model.cached(group, chain)
        kept = [self.model.held[group][block] for block in chain[:held]]
        fits = self.model.fits(group, kept, held, -(-prompt_tokens // BLOCK_TOKENS))
        try:
            reservation = self.pool.reserve(name, group, chain, prompt_tokens)
        except OutOfBlocks:
            assert not fits
            self.model.refuse(kept)
            return None
        assert fits
        self.count += 1
        self.running.add(name)
        assert reservation.held_blocks == held
        assert reservation.reused_blocks * BLOCK_TOKENS < prompt_tokens
        self.model.reserve(name, group, chain, reservation.slots)
        return name

    @rule(worker=WORKERS, prompts=st.tuples(PROMPTS, PROMPTS))
    def serve(self, worker: int, prompts: tuple[tuple[str, int], ...]) -> None:
        """From end to end, with nothing in between."""
        for prompt in prompts:
            if (name := self.reserved(self.worker(worker), *prompt)) is not None:
                self.is_what_the_rules_make_it()
                self.finish(name)
                self.is_what_the_rules_make_it()
                self.release(name)
                self.is_what_the_rules_make_it()

    @rule(name=running_requests, blocks=st.integers(1, 5))
    def compute_some(self, name: RequestId, blocks: int) -> None:
        """A chunk: not the end of the prompt, and no way back."""
        reservation = self.pool.reservation(name)
        if reservation is None:
            return  # a switch has released it
        end_tokens = max(blocks, reservation.held_blocks) * BLOCK_TOKENS
        if end_tokens < reservation.prompt_tokens:
            self.compute(reservation, end_tokens)
            self.operated()
            resumed = self.pool.reserve(name, reservation.group, reservation.chain, reservation.prompt_tokens)
            self.model.take_over(name)
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
        self.operated()
        whole_blocks = end_tokens // BLOCK_TOKENS
        before = self.model.cached(reservation.group, reservation.chain)
        report = self.pool.commit(reservation.request, end_tokens)
        assert (report.first_depth, report.blocks) == (before, max(0, whole_blocks - before))
        self.model.commit(reservation.request, whole_blocks, finished=end_tokens == reservation.prompt_tokens)

    @rule(name=consumes(running_requests))
    def abort(self, name: RequestId) -> None:
        self.operated()
        self.running.discard(name)
        self.pool.release(name)
        self.model.release(name)

    @rule(name=consumes(done_requests))
    def release(self, name: RequestId) -> None:
        self.operated()
        self.pool.release(name)
        self.model.release(name)

    @rule(composition=st.sampled_from(COMPOSITIONS))
    def adopt(self, composition: tuple[int, ...]) -> None:
        self.operated()
        self.groups = groups_of(composition)
        self.pool.adopt(composition)
        self.model.adopt(composition)
        assert not any(self.pool.reservation(name) for name in self.running), "what is unfinished is released"
        self.running.clear()

    @invariant()
    def is_what_the_rules_make_it(self) -> None:
        self.pool.check()
        assert [self.pool.counts(rank) for rank in range(RANKS)] == list(map(self.model.counts, range(RANKS)))
        for name, begun in self.model.requests.items():
            reservation = self.pool.reservation(RequestId(name))
            assert reservation is not None
            assert list(reservation.slots) == [cell.ref for cell in begun.cells]
        for group, held in self.model.held.items():
            found = [block for _, run in self.pool.resident(group).runs for block in run]
            assert len(found) == len(held)
            assert set(found) == held.keys()
            told, gone = self.pool.take_evicted(group), dict(self.model.take_evicted(group))
            assert len(told) == len(gone)
            assert set(told) == gone.keys(), "what had to make room has gone, and nothing else"
            assert not any(gone[block] in told[:place] for place, block in enumerate(told)), "leaf first"

    def teardown(self) -> None:
        """Nobody needs anything: all of the memory can be had, and is free again."""
        for name in range(self.count):
            self.pool.release(request(name))
        assert all(self.pool.counts(rank)[2] == 0 for rank in range(RANKS))
        self.pool.adopt((RANKS,))
        everything = "z" * (RANKS * BLOCKS)
        self.pool.reserve(request("all"), Group(0, RANKS), chain_of(everything), len(everything) * BLOCK_TOKENS)
        self.pool.release(request("all"))
        self.pool.check()
        assert [self.pool.counts(rank) for rank in range(RANKS)] == [(BLOCKS, 0, 0)] * RANKS, "a slot has leaked"


OPERATIONS = 10_000
"""Of a machine against its model, in one test."""


def run(machine: type[PoolMachine], config: pytest.Config, examples: int) -> None:
    """At least `OPERATIONS` of them. A story that fails is told as it was found: to look for a shorter one takes minutes."""
    number = int(config.getoption("--hypothesis-seed") or 0)
    machine.operations = 0
    try:
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=examples, stateful_step_count=50, phases=[Phase.generate], database=None, deadline=None
            ),
        )
    except Exception as error:
        error.add_note(f"the same again: --hypothesis-seed {number}")
        raise
    assert machine.operations >= OPERATIONS


def test_ten_thousand_operations_are_what_the_rules_make_of_them(pytestconfig: pytest.Config) -> None:
    run(PoolMachine, pytestconfig, examples=160)


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


def test_which_of_two_pinned_copies_is_held_does_not_depend_on_what_their_slots_had_before() -> None:
    """Found by the machine: a copy that nobody had let go of yet was as old as what its slot had before."""
    pool = pool_of((1, 1), blocks_per_rank=1)
    stored(pool, "before", Group(1, 1), "x")
    for rank in range(2):
        pool.reserve(request(rank), Group(rank, 1), chain_of("a"), BLOCK_TOKENS)
        pool.commit(request(rank), BLOCK_TOKENS)
    pool.adopt((2,))
    again = pool.reserve(request("again"), Group(0, 2), chain_of("a"), BLOCK_TOKENS)
    assert again.slots[0].rank == 0, "they are equal, so the first is as good"


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


def test_a_switch_lets_go_of_unfinished_prompts_in_the_order_in_which_they_were_begun() -> None:
    """Found by the machine: it was another order in every process, and with it what went first under pressure, and which of
    two copies of a block stayed held."""
    pool, worker, begun = pool_of((1,), blocks_per_rank=12), Group(0, 1), "abcdef"
    for text in begun:
        pool.reserve(request(text), worker, chain_of(text), 2 * BLOCK_TOKENS)
        pool.commit(request(text), BLOCK_TOKENS)
    pool.adopt((1,))
    pool.reserve(request("all"), worker, chain_of("z" * 12), 12 * BLOCK_TOKENS)
    assert pool.take_evicted(worker) == tuple(chain_of(text)[0] for text in begun)


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
