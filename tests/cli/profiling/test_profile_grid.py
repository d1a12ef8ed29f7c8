"""Grids by hand and by their rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.profiling.grid import Cell, Limits, default_lengths, rows

SMALL = Limits(degrees=(1, 2, 4), prompt_tokens_max=511, blocks_per_rank=16, block_tokens=16)


def test_lengths_double_up_to_what_the_widest_worker_takes() -> None:
    assert default_lengths(SMALL, (1, 4)) == (64, 128, 256)
    assert default_lengths(SMALL._replace(prompt_tokens_max=40), (1,)) == (40,)


def test_lengths_of_their_own_fit_the_degrees_that_are_asked_for() -> None:
    """Servers of SGLang may have more degrees than that."""
    narrow = SMALL._replace(blocks_per_rank=8)
    assert default_lengths(narrow, (1,)) == (64, 128)
    assert [len(row) for row in rows(narrow, (1,), default_lengths(narrow, (1,)), (0.0,))] == [1, 1]


def test_a_grid_by_hand() -> None:
    """256 tokens are the whole memory of one rank; 300 need two. Hits are whole blocks, and equal shapes are one."""
    assert rows(SMALL, (1, 2), (300, 20, 20), (0.0, 0.4, 0.5, 0.9)) == [
        [Cell(1, 20, 0), Cell(2, 20, 0), Cell(1, 4, 16), Cell(2, 4, 16)],
        [Cell(2, 300, 0), Cell(2, 188, 112), Cell(2, 156, 144), Cell(2, 44, 256)],
    ]


@given(
    st.lists(st.integers(1, 511), min_size=1, max_size=5),
    st.lists(st.floats(0, 0.999), min_size=1, max_size=4),
    st.sets(st.sampled_from((1, 2, 4)), min_size=1),
)
def test_every_cell_can_be_measured(lengths: list[int], hits: list[float], degrees: set[int]) -> None:
    degrees.add(4)
    found = rows(SMALL, sorted(degrees), lengths, hits)
    assert [row[0].uncached_tokens + row[0].cached_tokens for row in found] == sorted(set(lengths))
    for row in found:
        assert len(set(row)) == len(row)
        for cell in row:
            assert cell.uncached_tokens >= 1
            assert cell.cached_tokens % SMALL.block_tokens == 0
            assert cell.uncached_tokens + cell.cached_tokens <= SMALL.prompt_tokens(cell.degree)


@pytest.mark.parametrize(
    ("degrees", "lengths", "hits", "message"),
    [
        ((8,), (64,), (0.0,), r"--degrees \[8\]: this engine has \[1, 2, 4\]"),
        ((1,), (64,), (1.0,), r"--hit-ratios 1\.0: must be in \[0, 1\)"),
        ((1,), (64,), (float("nan"),), "--hit-ratios nan"),
        ((1,), (0, 64), (0.0,), r"--lengths \[0, 64\]: each must be in \[1, 256\]"),
        ((1,), (257,), (0.0,), r"--lengths \[257\]"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_option_and_limit(
    degrees: tuple[int, ...], lengths: tuple[int, ...], hits: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows(SMALL, degrees, lengths, hits)


def test_a_grid_has_an_end() -> None:
    fine = Limits(degrees=(1,), prompt_tokens_max=511, blocks_per_rank=1_000, block_tokens=4)
    with pytest.raises(ValueError, match="points; 10000 at most"):
        rows(fine, (1,), range(1, 512), [n / 128 for n in range(128)])
