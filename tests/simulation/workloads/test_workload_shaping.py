"""Whatever is done to a trace, prompts that began alike still do, and arrivals stay in order."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.trace.prompts import TOKEN_END, TOKEN_FIRST, WORDS, prompt_text, prompt_tokens
from simulation.workloads.rows import BLOCK_TOKENS, Row
from simulation.workloads.shaping import at_speed, capped, jittered, shrunk, sliced


@st.composite
def traces(draw: st.DrawFn) -> list[Row]:
    """Rows as real traces have them: an id stands for a block and all before it."""
    chains: dict[tuple[int, ...], int] = {}
    rows = []
    for arrival_ms in sorted(draw(st.lists(st.integers(0, 20_000), min_size=1, max_size=12))):
        blocks = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        partial = draw(st.integers(1, BLOCK_TOKENS))
        # A block of another length is another block.
        path = [*((block, BLOCK_TOKENS) for block in blocks[:-1]), (blocks[-1], partial)]
        ids = tuple(chains.setdefault(tuple(path[: i + 1]), len(chains)) for i in range(len(path)))
        rows.append(Row(arrival_ms, BLOCK_TOKENS * (len(ids) - 1) + partial, draw(st.integers(0, 900)), ids))
    return rows


def shared_ids(a: Row, b: Row) -> int:
    pairs = list(zip(a.hash_ids, b.hash_ids, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def shared_tokens(a: Row, b: Row) -> int:
    x, y = prompt_tokens(a), prompt_tokens(b)
    length = min(len(x), len(y))
    different = np.flatnonzero(x[:length] != y[:length])
    return int(different[0]) if different.size else length


@given(traces(), st.sampled_from([1 / 64, 1 / 16, 0.1, 0.3, 1.0]))
def test_shrinking_keeps_what_prompts_share(rows: list[Row], factor: float) -> None:
    small = list(shrunk(rows, factor))
    for row, after in zip(rows, small, strict=True):
        assert (after.hash_ids, after.arrival_ms) == (row.hash_ids, row.arrival_ms)
        assert len(after.hash_ids) == -(-after.prompt_tokens // after.block_tokens)
        assert len(prompt_tokens(after)) == after.prompt_tokens
        # Each block is rounded for itself.
        assert abs(after.prompt_tokens - factor * row.prompt_tokens) <= 1 + len(row.hash_ids) / 2
    for a, b in pairwise(small):
        expected = min(shared_ids(a, b) * a.block_tokens, a.prompt_tokens, b.prompt_tokens)
        # Different blocks differ from their first token on, but for a chance of one in the vocabulary.
        assert expected <= shared_tokens(a, b) <= expected + 2


@given(traces(), st.integers(1, 3000), st.integers(1, 100))
def test_capping_keeps_the_beginning(rows: list[Row], prompt_max: int, output_max: int) -> None:
    for row, after in zip(rows, capped(rows, prompt_max, output_max), strict=True):
        assert after.prompt_tokens == min(row.prompt_tokens, prompt_max)
        assert after.output_tokens == min(row.output_tokens, output_max)
        assert len(after.hash_ids) == -(-after.prompt_tokens // after.block_tokens)
        assert np.array_equal(prompt_tokens(after), prompt_tokens(row)[: after.prompt_tokens])


@given(traces(), st.floats(0, 5000), st.integers(0, 9))
def test_jitter_moves_each_arrival_within_the_grid_and_keeps_order(rows: list[Row], grid_ms: float, seed: int) -> None:
    moved = list(jittered(rows, grid_ms, Random(seed)))
    assert moved == list(jittered(iter(rows), grid_ms, Random(seed)))
    assert all(a.arrival_ms <= b.arrival_ms for a, b in pairwise(moved))
    assert sorted(row.hash_ids for row in moved) == sorted(row.hash_ids for row in rows)
    chance = Random(seed)
    assert sorted(row.arrival_ms for row in moved) == sorted(row.arrival_ms + chance.random() * grid_ms for row in rows)


def test_jitter_holds_no_more_than_a_grid_step() -> None:
    taken = 0

    def endless() -> Iterator[Row]:
        nonlocal taken
        while True:
            taken += 1
            yield Row(taken * 1000, 1, 1, (0,))

    rows = jittered(endless(), 3000, Random(1))
    for _ in range(100):
        next(rows)
    assert taken <= 100 + 4


@given(traces(), st.floats(0.1, 50))
def test_speed_divides_arrivals(rows: list[Row], speed: float) -> None:
    assert [row.arrival_ms * speed for row in at_speed(rows, speed)] == pytest.approx([row.arrival_ms for row in rows])


@given(traces(), st.integers(0, 20_000), st.integers(0, 20_000), st.one_of(st.none(), st.integers(0, 5)))
def test_a_slice_starts_at_zero(rows: list[Row], start_ms: int, length_ms: int, limit: int | None) -> None:
    kept = [row for row in rows if start_ms <= row.arrival_ms < start_ms + length_ms][:limit]
    found = list(sliced(rows, start_ms, start_ms + length_ms, limit))
    assert found == [row._replace(arrival_ms=row.arrival_ms - start_ms) for row in kept]


@pytest.mark.parametrize(("factor", "message"), [(0, "outside"), (1.5, "outside"), (0.001, "the least is 0.0078")])
def test_a_factor_out_of_bounds_is_refused(factor: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"factor: .*{message}"):
        list(shrunk([Row(0, 600, 1, (1, 2))], factor))


def test_tokens_are_the_same_on_every_machine() -> None:
    """Two clients must agree: these values may never change."""
    row = Row(0, 5, 1, (7, 8), block_tokens=4)
    assert prompt_tokens(row).tolist() == [25413, 1534, 29595, 17213, 22118]
    assert prompt_text(row) == "even put most had not"


def test_tokens_are_ordinary_and_spread() -> None:
    tokens = prompt_tokens(Row(0, 200 * BLOCK_TOKENS, 1, tuple(range(200))))
    assert tokens.dtype == np.uint32
    assert TOKEN_FIRST <= tokens.min() <= tokens.max() < TOKEN_END
    assert np.unique(tokens).size > 0.9 * (TOKEN_END - TOKEN_FIRST)
    assert len(set(WORDS)) == len(WORDS)
