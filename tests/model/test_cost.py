"""E_C(R, P), by hand and by its laws."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contracts.events import CalibrationUpdated, RouterRegistered
from shared.contracts.ids import RouterId
from shared.model.cost import (
    PREFILL_US_MAX,
    SET_BYTES_MAX,
    Coefficients,
    attended_pairs,
    evolve,
    load_coefficients,
    refit_of,
    refit_seq,
)
from tests.support.story import Story

HAND = Coefficients(version="hand", d=0.01, a=0.001, b=0.0001, c=0.002, alpha=0.00001, g=0.005)
TOKENS = st.integers(0, 200_000)
DEGREES = st.sampled_from((1, 2, 4, 8))


@pytest.mark.parametrize(
    ("uncached", "cached", "pairs"), [(1, 0, 1), (3, 0, 6), (3, 2, 12), (0, 9, 0), (10, 100, 1055)]
)
def test_attended_pairs_by_hand(uncached: int, cached: int, pairs: int) -> None:
    assert attended_pairs(uncached, cached) == pairs


@given(st.integers(0, 40), st.integers(0, 40))
def test_attended_pairs_count_each_query_with_what_lies_before_it(uncached: int, cached: int) -> None:
    assert attended_pairs(uncached, cached) == sum(cached + position + 1 for position in range(uncached))


@pytest.mark.parametrize(
    ("degree", "microseconds"),
    [
        # d + aR + bP = .01 + .1 + .005 = .115 s; cR + αW = .2 + .00001 · (100·50 + 5050) = .3005 s
        (1, 115_000 + 300_500),
        (2, 115_000 + 5_000 + 150_250),
        (4, 115_000 + 15_000 + 75_125),
        (8, 115_000 + 35_000 + 37_562.5),
    ],
)
def test_a_prefill_by_hand(degree: int, microseconds: float) -> None:
    assert HAND.prefill_us(degree, 100, 50) == pytest.approx(microseconds, abs=0.5)


@given(DEGREES, TOKENS, TOKENS, st.integers(1, 1000))
def test_more_tokens_never_cost_less(degree: int, uncached: int, cached: int, more: int) -> None:
    for each in (HAND, load_coefficients("qwen3_30b_a3b_h20")):
        cost = each.prefill_us(degree, uncached, cached)
        assert each.prefill_us(degree, uncached + more, cached) >= cost
        assert each.prefill_us(degree, uncached, cached + more) >= cost


@given(DEGREES, TOKENS, TOKENS, st.integers(1, 1000))
def test_reusing_a_token_never_costs_more_than_computing_it(
    degree: int, uncached: int, cached: int, reused: int
) -> None:
    """True of every set with b ≤ a + c/C: attention to a cached token is paid either way."""
    cost = HAND.prefill_us(degree, uncached + reused, cached)
    assert HAND.prefill_us(degree, uncached, cached + reused) <= cost


@given(TOKENS, TOKENS)
def test_without_a_term_in_c_a_larger_degree_never_costs_more(uncached: int, cached: int) -> None:
    paper = HAND.model_copy(update={"g": 0.0})
    costs = [paper.prefill_us(degree, uncached, cached) for degree in (1, 2, 4, 8)]
    assert costs == sorted(costs, reverse=True)


def test_with_it_a_short_prefill_is_slower_on_more_ranks() -> None:
    assert HAND.prefill_us(8, 10, 0) > HAND.prefill_us(1, 10, 0)
    assert HAND.prefill_us(8, 10_000, 0) < HAND.prefill_us(1, 10_000, 0)


def test_the_default_slo_is_half_a_second_and_three_prefills_on_four_ranks() -> None:
    assert HAND.slo_us(1000) == 500_000 + 3 * HAND.prefill_us(4, 1000, 0)


SETS = st.builds(
    Coefficients,
    version=st.just("drawn"),
    **{name: st.floats(0, 1) | st.floats(0, 1e-4) | st.floats(0, 3_600) for name in ("d", "a", "b", "c", "alpha", "g")},
)


@given(
    SETS, st.lists(st.tuples(DEGREES, st.integers(0, 4_000_000), st.integers(0, 4_000_000)), min_size=1, max_size=20)
)
def test_many_at_once_are_the_same_to_the_microsecond(cost: Coefficients, asked: list[tuple[int, int, int]]) -> None:
    degree, uncached, cached = np.array(asked, dtype=np.float64).T
    assert cost.prefills_us(degree, uncached, cached).tolist() == [cost.prefill_us(*each) for each in asked]


def test_no_prediction_is_beyond_what_sums_can_hold() -> None:
    absurd = Coefficients(version="absurd", d=3_600, a=3_600, b=3_600, c=3_600, alpha=3_600, g=3_600)
    assert absurd.prefill_us(8, 1_000_000, 1_000_000) == PREFILL_US_MAX


@given(DEGREES, TOKENS, TOKENS, st.floats(0.01, 100))
def test_a_scaled_set_scales_every_prefill(degree: int, uncached: int, cached: int, factor: float) -> None:
    scaled = HAND.scaled(factor)
    assert scaled.prefill_us(degree, uncached, cached) == pytest.approx(
        min(factor * HAND.prefill_us(degree, uncached, cached), PREFILL_US_MAX), rel=1e-9, abs=factor + 1
    )
    assert scaled.version == ("hand" if factor == 1 else f"hand*{factor:g}")


@pytest.mark.parametrize("name", ["d", "a", "b", "c", "alpha", "g"])
def test_a_negative_coefficient_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        Coefficients(**{**HAND.model_dump(), name: -1e-9})


def test_every_set_that_ships_loads_and_says_where_it_comes_from() -> None:
    for file in (resources.files("shared.model") / "coefficients").iterdir():
        name = file.name.removesuffix(".json")
        assert load_coefficients(name).version.startswith(name)
        assert json.loads(file.read_text())["provenance"]


def test_the_default_set_meets_the_papers_speedups() -> None:
    """2.71 at four ranks and 3.91 at eight, 64K tokens (paper, section 3; within 1.4 %, says its provenance)."""
    qwen = load_coefficients("qwen3_30b_a3b_h20")
    one = qwen.prefill_us(1, 65_536, 0)
    assert one / qwen.prefill_us(4, 65_536, 0) == pytest.approx(2.71, rel=0.015)
    assert one / qwen.prefill_us(8, 65_536, 0) == pytest.approx(3.91, rel=0.015)


def test_an_unknown_set_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'nosuch' is not one of .*qwen3_30b_a3b_h20"):
        load_coefficients("nosuch")


def test_a_set_of_your_own_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**HAND.model_dump(), "evidence": {"mape": 0.05}}))
    assert load_coefficients(str(file)) == HAND


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"version": "x", "d": 0, "a": 0, "b": -1, "c": 0, "alpha": 0}',
            "b: Input should be greater than or equal to 0",
        ),
        (
            '{"version": "x", "d": 0, "a": 0, "b": 0, "c": 1e9, "alpha": 0}',
            "c: Input should be less than or equal to 3600",
        ),
        ('{"version": "x", "d": NaN, "a": 0, "b": 0, "c": 0, "alpha": 0}', "d: Input should be"),
        ('{"version": "x", "d": 0, "a": 0, "b": 0, "c": 0}', "alpha: Field required"),
        ('{"version": "", "d": 0, "a": 0, "b": 0, "c": 0, "alpha": 0}', "version: String should have at least 1"),
        ("no JSON", "content: Invalid JSON"),
        (" " * (SET_BYTES_MAX + 1), f"has more than {SET_BYTES_MAX} bytes"),
    ],
)
def test_a_bad_file_is_refused_by_field_and_limit(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"^coefficients: .*bad\.json.* {message}"):
        load_coefficients(str(file))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"coefficients: nowhere/mine\.json cannot be read: No such file"):
        load_coefficients("nowhere/mine.json")


def test_a_calibration_is_folded_and_one_that_this_version_cannot_read_changes_nothing() -> None:
    story, coefficients = Story(), HAND
    fitted = HAND.model_copy(update={"version": "fitted", "a": 0.5})
    for each in (fitted.model_dump(), {"d": 1.0}, {**HAND.model_dump(), "a": -1.0}):
        story.tell(CalibrationUpdated(coefficients=each, samples=1, error_before=1, error_after=0))
    story.tell(RouterRegistered(router=RouterId("r1")))
    for stored in story.events:
        coefficients = evolve(coefficients, stored)
    assert coefficients == fitted


def test_what_was_fitted_while_another_set_priced_is_of_no_account() -> None:
    """Who is started with a set that was measured anew is not to price by a fit of the one before, which the log still has."""

    def after(version: str, told: str) -> str:
        story, begun = Story(), HAND.model_copy(update={"version": version})
        fitted = HAND.model_copy(update={"version": told}).model_dump()
        story.tell(CalibrationUpdated(coefficients=fitted, samples=1, error_before=1, error_after=0))
        return evolve(begun, story.events[0]).version

    assert after("new", "old+7") == "new"
    assert after("old", "old+7") == after("old+5", "old+7") == "old+7"
    long = "v" * 200
    assert after(long, refit_of(long, 7)) == refit_of(long, 7)


def test_a_plus_in_a_name_is_no_sequence_unless_64_bits_hold_it() -> None:
    assert [refit_seq(each) for each in ("a", "+5", "a+", "a+b", f"a+{10**18}")] == [None] * 5
    assert refit_seq(f"a+b+{10**18 - 1}") == 10**18 - 1
