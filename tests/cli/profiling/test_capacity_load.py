"""The load of a ramp: shapes by hand, requests by their sums."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.profiling.load import REQUESTS_MAX, Shape, requests_for, service_us, shapes
from shared.model.cost import Coefficients
from simulation.workloads.rows import Row
from tests.cli.profiling.made_up import KNOWN


def test_hits_are_what_an_endless_cache_would_have_in_whole_blocks() -> None:
    rows = [
        Row(0, 1_000, 1, (1, 2)),  # nothing before it
        Row(1, 1_000, 1, (1, 3)),  # one block of 512
        Row(2, 9_000, 1, tuple(range(1, 19))),  # too long, but its blocks are there now
        Row(3, 1_024, 1, (1, 2)),  # everything but a token: 1,023, cut to blocks of 64
    ]
    assert shapes(rows, 2_000, 64) == [Shape(1_000, 0), Shape(1_000, 512), Shape(1_024, 960)]


def test_a_trace_of_nothing_but_long_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="none of its first 4,000 prompts has at most 999 tokens"):
        shapes([Row(0, 1_000, 1, (1, 2))], 999, 64)


@given(st.integers(0, 2**32), st.sampled_from((1, 8)), st.floats(0.1, 100))
def test_requests_ask_for_as_much_service_as_was_wanted(seed: int, degree: int, seconds: float) -> None:
    known = [Shape(100, 0), Shape(9_000, 64)]
    found = requests_for(known, KNOWN, degree, seconds, Random(seed))
    asked = [service_us(KNOWN, degree, each.shape) / 1e6 for each in found]
    assert sum(asked[:-1]) < seconds <= sum(asked) + 1e-9
    assert [each.arrival for each in found] == sorted(each.arrival for each in found)
    assert found == requests_for(known, KNOWN, degree, seconds, Random(seed))


def test_a_load_without_end_is_refused() -> None:
    nothing = Coefficients(version="0", d=0, a=0, b=0, c=0, alpha=0)
    with pytest.raises(ValueError, match=f"more than {REQUESTS_MAX} requests at degree 2"):
        requests_for([Shape(10, 0)], nothing, 2, 1.0, Random(1))
