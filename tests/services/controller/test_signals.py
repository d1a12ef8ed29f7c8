"""Thresholds and their persistence, by hand."""

import pytest
from controller_world import SECOND_US, led
from pydantic import ValidationError

from services.controller.signals import (
    Trend,
    after_commit,
    after_window,
    is_stable,
    is_sustained,
    marked,
    peak_demand_us,
)
from shared.contracts.events import ParametersChanged, WindowClosed
from shared.model.parameters import Parameters, changed
from tests.support.story import committed

PARAMETERS = Parameters()


def window(
    demand_s: float, capacity_s: float = 100, share: float = 0.03, requests: int = 300, k: int = 1
) -> WindowClosed:
    return WindowClosed(
        k=k,
        from_seq=0,
        to_seq=1,
        length_us=20 * SECOND_US,
        requests=requests,
        completed=requests,
        prompt_tokens=1_000,
        demand_us=round(demand_s * SECOND_US),
        long_tokens=32_768,
        long_request_share=share,
        long_token_share=10 * share,
        capacity_us=round(capacity_s * SECOND_US),
    )


def told(*windows: WindowClosed, parameters: Parameters = PARAMETERS) -> WindowClosed:
    """The last of `windows`, each marked after the ones before."""
    trend = Trend()
    for each in windows:
        last = marked(each, trend, parameters)
        trend = after_window(last)
    return last


@pytest.mark.parametrize(
    ("demand_s", "passed"),
    [(75.0, ()), (75.1, ("overload",)), (35.0, ()), (34.9, ("underload",)), (0.0, ("underload",))],
)
def test_demand_is_compared_with_shares_of_the_capacity(demand_s: float, passed: tuple[str, ...]) -> None:
    assert told(window(demand_s)).signals == passed


@pytest.mark.parametrize(
    ("share", "passed"), [(0.0501, ("more-long",)), (0.0499, ()), (0.0101, ()), (0.0099, ("fewer-long",))]
)
def test_the_long_share_is_compared_with_the_first_window(share: float, passed: tuple[str, ...]) -> None:
    assert told(window(50, share=0.03), window(50, share=0.04), window(50, share=share)).signals == passed


def test_the_share_of_tokens_is_watched_where_that_is_asked_for() -> None:
    by_tokens = changed(PARAMETERS, {"long_share_by": "tokens", "long_delta": 0.1})
    assert told(window(50, share=0.03), window(50, share=0.041), parameters=by_tokens).signals == ("more-long",)
    assert told(window(50, share=0.03), window(50, share=0.041)).signals == ()


def test_a_window_without_requests_or_capacity_passes_nothing_and_ends_what_lasted() -> None:
    assert told(window(90), window(90), window(0, requests=0)).persistence == {}
    assert told(window(90, capacity_s=0)).signals == ()
    assert told(window(0, requests=0)).long_reference is None
    assert told(window(0, requests=0), window(50, share=0.2)).long_reference == (0.2, 2.0)


def test_persistence_counts_windows_in_a_row() -> None:
    parameters = changed(PARAMETERS, {"persistence": 2})
    last = told(window(90), window(90), window(50), window(90))
    assert last.persistence == {"overload": 1}
    assert not is_sustained("overload", last, parameters)
    assert is_sustained("overload", told(window(50), window(90), window(90)), parameters)
    assert not is_sustained("underload", last, parameters)


def test_demand_is_stable_while_it_changes_by_less_than_15_percent() -> None:
    assert is_stable(told(window(20), window(85.1), window(100), window(90)), PARAMETERS)
    assert not is_stable(told(window(85), window(100), window(90)), PARAMETERS)
    assert not is_stable(told(window(90), window(90)), PARAMETERS), "two windows say nothing about three"


def test_the_peak_is_that_of_the_last_m_windows_and_for_the_length_of_this_one() -> None:
    longer = window(120).model_copy(update={"length_us": 40 * SECOND_US})
    assert peak_demand_us(told(window(99), window(70), window(60), longer), PARAMETERS) == 140 * SECOND_US


def test_a_commit_starts_every_count_anew_and_moves_the_reference() -> None:
    last = told(window(90, share=0.03), window(90, share=0.1))
    trend = after_commit(after_window(last), last)
    assert (trend.persistence, trend.reference, len(trend.demand)) == ({}, (0.1, 1.0), 2)
    assert after_commit(after_window(last), window(0, requests=0)).reference == (0.03, 0.3)


def test_the_fold_carries_the_trend_from_window_to_window() -> None:
    story = led()
    story.tell(marked(window(90), story.state.windows.trend, PARAMETERS))
    story.tell(marked(window(90, share=0.1, k=2), story.state.windows.trend, PARAMETERS))
    assert story.state.windows.last is not None
    assert story.state.windows.last.persistence == {"overload": 2, "more-long": 1}
    story.tell(committed())
    assert story.state.windows.trend == after_commit(Trend(demand=(4_500_000, 4_500_000)), story.state.windows.last)
    change = ParametersChanged(parameters_version=1, changes={"long_tokens": 9}, asked_by="ann")
    story.tell(change)
    assert story.state.windows.trend.reference is None, "another length is long now"


def test_thresholds_keep_their_order() -> None:
    with pytest.raises(ValidationError, match=r"down: 0\.8 must be below up \(0\.75\)"):
        changed(PARAMETERS, {"down": 0.8})
