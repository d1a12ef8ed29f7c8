"""A trace's rows as arrivals of a replay, by hand."""

from cli.simulating.planning import repeated
from services.controller.forecast import Replayed
from simulation.workloads.rows import Row

ROWS = [
    Row(500.0, 1_000, 1, (1, 2)),
    Row(500.4, 1_300, 1, (1, 2, 3)),
    Row(1_500.0, 1_000, 1, (1, 2)),
    Row(1_501.0, 600, 1, (2, 1)),
]
"""Blocks of 512 tokens; the last one begins with a block that was never first."""


def test_what_came_before_is_cached_but_for_a_token() -> None:
    assert repeated(ROWS) == [
        Replayed(0, 1_000, 0),
        Replayed(400, 1_300 - 1_024, 1_024),
        Replayed(1_000_000, 1, 999),
        Replayed(1_001_000, 1, 599),
    ]


def test_a_hit_rate_of_ones_own_goes_before() -> None:
    assert [each.cached_tokens for each in repeated(ROWS, 0.25)] == [250, 325, 250, 150]
    assert all(not each.cached_tokens for each in repeated(ROWS, 0.0))
