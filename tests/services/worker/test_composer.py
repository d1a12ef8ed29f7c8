"""What goes into a step: budget, chunks, shared prefixes. Chains are real, what a worker holds is a set of block ids."""

from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.composer import Share, StepLimits, compose
from services.worker.job import Job
from services.worker.step_cost import WorkerCost
from shared.contracts.ids import BlockId
from shared.model.cost import Coefficients
from shared.model.parameters import WorkerOrder
from tests.services.worker.scripted import BLOCK_TOKENS, World, prompt

WORLD = World()
LIMITS = StepLimits(step_tokens_max=100, chunk_tokens=50)


def job(name: str, length: int, seed: int | None = None) -> Job:
    return Job(WORLD.assignment(name, prompt(length, seed=crc32(name.encode()) if seed is None else seed)), 0)


def step(
    *queued: Job,
    held: frozenset[BlockId] = frozenset(),
    order: WorkerOrder = "shortest-first",
    limits: StepLimits = LIMITS,
    items_max: int = 64,
    constant_us: int = 10**9,
) -> list[Share]:
    """A token takes a microsecond; the constant makes packing worth while unless it is small."""
    cost = WorkerCost(Coefficients(version="x", d=constant_us / 1e6, a=1e-6, b=0, c=0, alpha=0), 1)
    return compose(queued, lambda each: holds(held, each), order, limits, items_max, BLOCK_TOKENS, cost)


def holds(held: frozenset[BlockId], each: Job) -> int:
    return next((depth for depth, block in enumerate(each.chain) if block not in held), len(each.chain))


def spans(shares: list[Share]) -> list[tuple[str, int, int | None]]:
    return [(share.job.assign.request, share.cached_tokens, share.until) for share in shares]


def test_short_prompts_are_packed_until_the_step_is_full() -> None:
    a, b, c, d = job("a", 40), job("b", 40), job("c", 40), job("d", 20)
    assert spans(step(a, b, c, d)) == [("a", 0, None), ("b", 0, None), ("d", 0, None)], (
        "c waits, d fills the step exactly"
    )


def test_no_more_requests_than_allowed_are_packed() -> None:
    assert [share.job.assign.request for share in step(job("a", 1), job("b", 1), job("c", 1), items_max=2)] == [
        "a",
        "b",
    ]


def test_a_long_prompt_gives_one_chunk_that_ends_at_a_block() -> None:
    """50 tokens are 3 blocks of 16 and a bit."""
    assert spans(step(job("a", 200), job("b", 40))) == [("a", 0, 48), ("b", 0, None)]


def test_the_next_chunk_begins_where_the_last_one_ended() -> None:
    a = job("a", 100)
    assert spans(step(a, held=frozenset(a.chain[:3]))) == [("a", 48, 96)]
    assert spans(step(a, held=frozenset(a.chain[:6]))) == [("a", 96, None)]


def test_a_chunk_that_does_not_fit_is_not_cut_smaller() -> None:
    assert spans(step(job("a", 30), job("b", 30), job("long", 200), job("c", 40))) == [
        ("a", 0, None), ("b", 0, None), ("c", 0, None)
    ]  # fmt: skip


def test_cached_tokens_cost_nothing_of_the_budget_and_one_token_is_always_computed() -> None:
    """96 tokens are exactly 6 blocks, so 5 of them are reused."""
    a, b = job("a", 96), job("b", 84)
    assert spans(step(a, b, held=frozenset(a.chain))) == [("a", 80, None), ("b", 0, 48)]


def test_of_requests_that_share_a_missing_prefix_one_goes() -> None:
    one, other, alone = job("one", 40, seed=7), job("other", 48, seed=7), job("alone", 20)
    assert [share.job for share in step(one, other, alone)] == [one, alone]
    assert [share.job for share in step(other, alone, held=frozenset(one.chain))] == [other, alone]


def test_a_shared_prefix_that_is_held_keeps_nobody_apart() -> None:
    one, other = job("one", 40, seed=7), job("other", 41, seed=7)
    assert len(one.chain) == len(other.chain) == 2
    assert [share.job for share in step(one, other, held=frozenset(one.chain))] == [one, other]


def test_who_joins_a_step_must_save_more_than_he_costs() -> None:
    a, b, c, d = job("a", 10), job("b", 20), job("c", 30), job("d", 35)

    def packed(constant_us: int, *queued: Job) -> str:
        return "".join(share.job.assign.request for share in step(*queued, constant_us=constant_us))

    # b keeps a waiting for 20 and saves the constant once: for itself.
    assert packed(19, a, b) == "a"
    assert packed(20, a, b) == "ab"
    # With two behind it saves three times as much. c keeps two waiting for 30, and saves it for itself and d.
    assert packed(7, a, b, c, d) == "ab"
    assert packed(30, a, b, c, d) == "abc", "d would keep three waiting for 35 and save 30 for itself alone"
    assert packed(0, a, b) == "a", "nothing is saved where a step costs nothing"


def test_fcfs_is_one_whole_prompt() -> None:
    assert spans(step(job("a", 500), job("b", 10), order="fcfs")) == [("a", 0, None)]


def test_nobody_gives_an_empty_step() -> None:
    assert step() == []


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4)), min_size=1, max_size=12),
    held=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 18)), max_size=4),
    blocks_per_chunk=st.integers(1, 6),
    more_tokens=st.integers(0, 120),
    items_max=st.integers(1, 6),
)
def test_any_queue_gives_a_step_within_its_limits(
    prompts: list[tuple[int, int]],
    held: list[tuple[int, int]],
    blocks_per_chunk: int,
    more_tokens: int,
    items_max: int,
) -> None:
    """Prompts of one seed share their prefix."""
    queued = [job(f"r{index}", length, seed) for index, (length, seed) in enumerate(prompts)]
    stems = [job("stem", max(1, blocks * BLOCK_TOKENS), seed) for seed, blocks in held]
    known = frozenset(block for stem in stems for block in stem.chain)
    chunk_tokens = blocks_per_chunk * BLOCK_TOKENS + more_tokens % BLOCK_TOKENS
    limits = StepLimits(chunk_tokens + more_tokens, chunk_tokens)
    shares = step(*queued, held=known, limits=limits, items_max=items_max)
    assert shares[0].job is queued[0], "the head is always served"
    assert len(shares) <= items_max
    assert sum(share.uncached_tokens for share in shares) <= limits.step_tokens_max
    first_missing = []
    for share in shares:
        depth, prompt_tokens = holds(known, share.job), share.job.assign.prompt_tokens
        assert share.uncached_tokens >= 1
        assert share.cached_tokens == min(depth, (prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        if share.until is None:
            assert share.uncached_tokens <= chunk_tokens
        else:
            assert share.until % BLOCK_TOKENS == 0
            assert share.cached_tokens < share.until < prompt_tokens
            assert chunk_tokens - BLOCK_TOKENS < share.uncached_tokens <= chunk_tokens
        first_missing += share.job.chain[depth : depth + 1]
    assert len(set(first_missing)) == len(first_missing), "no block is computed twice in a step"
