"""Figures of a trace, against a count by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.workloads.rows import Row
from simulation.workloads.statistics import LONG_TOKENS, LengthBin, statistics

LONG = 40 * 1024


def test_a_small_trace_counted_by_hand() -> None:
    rows = [
        Row(1000, 1024, 10, (0, 1)),
        Row(1500, 1024, 30, (0, 1)),
        Row(2000, 700, 20, (0, 2)),
        Row(11_000, LONG, 40, (0, *range(100, 100 + LONG // 512 - 1))),
    ]
    found = statistics(rows)
    tokens = 1024 + 1024 + 700 + LONG
    assert (found.requests, found.seconds, found.requests_per_s) == (4, 10, 0.4)
    assert found.prompt_tokens.mean == tokens / 4
    assert found.prompt_tokens.max == LONG
    assert found.output_tokens.p50 == 25
    assert found.long_requests_share == 0.25
    assert found.long_tokens_share == LONG / tokens
    # Row 2 is all there but for the one token that is always computed; rows 3 and 4 find block 0.
    assert found.ideal_hit_rate == (1023 + 512 + 512) / tokens
    assert found.shared_requests_share == 0.25
    assert found.blocks == 3 + LONG // 512 - 1
    assert found.length_bins[0] == LengthBin(512, 1, 700)
    assert found.length_bins[-1] == LengthBin(32768, 1, LONG)
    assert sum(length_bin.requests for length_bin in found.length_bins) == 4
    assert found.arrivals == (3, 1)
    assert found.arrived_tokens == (2748, LONG)
    assert found.hit_tokens == (1023 + 512, 512)


def test_long_means_longer_than_the_limit() -> None:
    ids = tuple(range(LONG_TOKENS // 512))
    assert statistics([Row(0, LONG_TOKENS, 1, ids)]).long_requests_share == 0
    assert statistics([Row(0, LONG_TOKENS + 1, 1, (*ids, -1))]).long_requests_share == 1


def test_a_grid_is_seen_and_free_arrivals_have_none() -> None:
    # As Mooncake's: three seconds, less a millisecond now and then.
    gridded = [Row(3000 * (i // 7) - (i // 7) % 2, 1, 1, (i,)) for i in range(700)]
    assert statistics(gridded).arrival_grid_ms in (2999, 3000, 3001)
    free = [Row(i * i * 13.7, 1, 1, (i,)) for i in range(700)]
    assert statistics(free).arrival_grid_ms == 0
    # A few equal gaps are chance.
    assert statistics(gridded[:70]).arrival_grid_ms == 0


def test_burstiness_of_even_and_of_clumped_arrivals() -> None:
    even = [Row(1000 * i, 1, 1, (i,)) for i in range(1000)]
    assert statistics(even).burstiness == 0
    clumped = [Row(20_000 * (i // 20), 1, 1, (i,)) for i in range(1000)]
    assert statistics(clumped).burstiness == pytest.approx(10, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_ideal_hit_rate_is_a_share(prompts: list[tuple[int, int]]) -> None:
    rows = [
        Row(i, length, 1, tuple(1000 * kind + j for j in range(-(-length // 512))))
        for i, (length, kind) in enumerate(prompts)
    ]
    found = statistics(rows)
    assert 0 <= found.ideal_hit_rate < 1
    assert sum(found.arrivals) == len(rows)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace has no rows"):
        statistics([])
