"""Loads that change: the rates, lengths and hits that are promised, and well-formed rows."""

from itertools import groupby
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.workloads.drifting import Drift, drifting
from simulation.workloads.mixtures import PHASES, Stretch, day, phased
from simulation.workloads.rows import BLOCK_TOKENS, Row
from simulation.workloads.statistics import LONG_TOKENS, statistics
from tests.simulation.workloads.checking import check_rows


def long_share(rows: list[Row]) -> float:
    return sum(row.prompt_tokens > LONG_TOKENS for row in rows) / len(rows)


def within(rows: list[Row], begin_s: float, end_s: float) -> list[Row]:
    return [row for row in rows if begin_s * 1000 <= row.arrival_ms < end_s * 1000]


def test_phases_have_their_rates_and_long_shares() -> None:
    rows = list(phased(Random(1)))
    begin_s = 0.0
    for stretch in PHASES:
        own = within(rows, begin_s, begin_s := begin_s + stretch.seconds)
        expected = stretch.seconds * stretch.requests_per_s
        assert len(own) == pytest.approx(expected, rel=0.1)
        # Three standard deviations of a binomial.
        spread = 3 * (stretch.long_share * (1 - stretch.long_share) / expected) ** 0.5
        assert long_share(own) == pytest.approx(stretch.long_share, abs=spread)
    assert begin_s * 1000 > rows[-1].arrival_ms


def test_a_day_swings_in_rate_length_and_hits() -> None:
    """A day pressed into two hours, twelve parts of it."""
    seconds, rows = 7_200.0, list(day(Random(1), 7_200))
    night, noon = within(rows, 0, seconds / 12), within(rows, seconds * 5.5 / 12, seconds * 6.5 / 12)
    # The mean of the first twelfth is 3.13/s, and that of the middle one 8.97/s.
    assert len(noon) / len(night) == pytest.approx(8.97 / 3.13, rel=0.1)
    assert len(rows) / seconds == pytest.approx(6, rel=0.03)
    assert long_share(night) == pytest.approx(0.079, abs=0.02)
    assert long_share(noon) == pytest.approx(0.04, abs=0.01)
    found = statistics(rows)
    step = len(found.arrivals) // 12
    hits = [
        sum(found.hit_tokens[i : i + step]) / sum(found.arrived_tokens[i : i + step])
        for i in range(step, 12 * step, step)
    ]
    # After the first part, in which sessions begin. Compressed, the parts are noisier than hours.
    assert all(0.3 < hit < 0.6 for hit in hits)
    assert sum(hits[5:9]) / 4 - sum(hits[1:5]) / 4 > 0.05
    assert found.ideal_hit_rate == pytest.approx(0.44, abs=0.04)


def test_prefixes_drift() -> None:
    drift = Drift()
    rows = list(drifting(Random(1)))
    found = statistics(rows)
    assert found.requests_per_s == pytest.approx(24, rel=0.03)
    assert found.ideal_hit_rate == pytest.approx(0.83, abs=0.04)
    seen: set[int] = set()
    for _, group in groupby(rows, key=lambda row: row.arrival_ms // (drift.epoch_s * 1000)):
        own = list(group)
        first = {row.hash_ids[0] for row in own}
        assert not first & seen, "an epoch begins with fresh prompts"
        assert 20 < len(first) <= drift.prompts
        seen |= first
    assert len(seen) == pytest.approx(drift.epochs * drift.prompts, rel=0.05)


def test_hot_prompts_are_of_twenty_blocks_and_a_fifth_goes_on() -> None:
    # One prompt: a request that goes on shares more than that prompt with the one before it.
    chance = Random(2)
    alone = [list(drifting(chance, Drift(epochs=1, epoch_s=4, prompts=1))) for _ in range(300)]
    lengths, on, requests = [], 0, 0
    for rows in alone:
        common = min(len(row.hash_ids) for row in rows)
        while len({row.hash_ids[:common] for row in rows}) > 1:
            common -= 1
        lengths.append(common)
        seen: set[int] = set()
        for row in rows:
            on += any(block in seen for block in row.hash_ids[common:])
            seen.update(row.hash_ids[common:])
        requests += len(rows)
    assert sum(lengths) / len(lengths) == pytest.approx(20, rel=0.1)
    assert on / requests == pytest.approx(0.2, abs=0.03)


@settings(max_examples=25)
@given(st.integers(0, 99))
def test_rows_are_well_formed_and_repeat_with_their_seed(seed: int) -> None:
    small = {
        "phased": lambda: phased(Random(seed), [Stretch(10, 8, 0.2), Stretch(10, 3, 0.5)]),
        "day": lambda: day(Random(seed), 20),
        "drifting": lambda: drifting(
            Random(seed), Drift(epochs=3, epoch_s=5, requests_per_s=9, prompts=2, going_on=0.6)
        ),
    }
    for name, make in small.items():
        rows = list(make())
        check_rows(rows)
        assert rows == list(make()), name
        assert all(row.block_tokens == BLOCK_TOKENS for row in rows)
