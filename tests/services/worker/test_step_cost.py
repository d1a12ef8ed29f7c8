"""Whose time a step was: shares add up, and measured over predicted is the step's for each request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.step_cost import shared_out, step_us
from shared.model.cost import Coefficients

COSTS = Coefficients(version="t", d=0.010, a=0.001, b=0.0001, c=0.002, alpha=0.0, g=0.005)


def test_the_constant_is_paid_once_and_split_evenly() -> None:
    """At degree 2: 10 + 5 ms for the step; 100 tokens after 50: 100 + 5 + 100 ms; 10 tokens: 10 + 10 ms."""
    items = [(100, 50), (10, 0)]
    assert step_us(COSTS, 2, items) == 15_000 + 205_000 + 20_000
    first, second = shared_out(COSTS, 2, items, measured_us=480_000)
    assert (first.predicted_us, second.predicted_us) == (212_500, 27_500)
    assert (first.measured_us, second.measured_us) == (425_000, 55_000), "twice the prediction for both"


def test_alone_in_a_step_a_request_is_priced_by_the_cost_model() -> None:
    (only,) = shared_out(COSTS, 4, [(300, 20)], measured_us=7)
    assert only == (COSTS.prefill_us(4, 300, 20), 7)


def test_a_prediction_of_nothing_shares_evenly() -> None:
    free = Coefficients(version="t", d=0, a=0, b=0, c=0, alpha=0)
    assert [each.measured_us for each in shared_out(free, 1, [(5, 0), (9, 0), (1, 0)], 9)] == [3, 3, 3]


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=1, max_size=64),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 10**8),
)
def test_shares_add_up_and_keep_the_ratio_of_the_step(
    items: list[tuple[int, int]], degree: int, measured_us: int
) -> None:
    costs = shared_out(COSTS, degree, items, measured_us)
    predicted_us = step_us(COSTS, degree, items)
    assert sum(each.predicted_us for each in costs) == predicted_us
    assert sum(each.measured_us for each in costs) == measured_us
    for each in costs:
        assert each.measured_us == pytest.approx(each.predicted_us * measured_us / predicted_us, abs=1)
