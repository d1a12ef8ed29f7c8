"""Fits: a public set by its known errors, made-up ones by what they were made of, the solver by the laws of its minimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.cost import Coefficients
from shared.model.fitting import FORMS, Errors, Sample, fit, non_negative, relative_errors

# Prefill milliseconds of Qwen3.5-9B at degrees 1, 2, 4, 8 with nothing cached: github.com/alibaba/rtp-llm, pull request 1299.
RTP_LLM_MS = {
    8_192: (591.739, 377.785, 315.251, 430.633),
    16_384: (1_245.322, 750.412, 513.273, 535.901),
    32_768: (2_731.318, 1_568.306, 978.645, 805.429),
}
PUBLIC = [
    Sample(degree, tokens, 0, ms / 1000)
    for tokens, row in RTP_LLM_MS.items()
    for degree, ms in zip((1, 2, 4, 8), row, strict=True)
]
GRID = [(C, R, P) for C in (1, 2, 4, 8) for R in (64, 500, 4_000, 30_000) for P in (0, 1_000, 20_000)]


def samples_of(coefficients: Coefficients, noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [Sample(*at, coefficients.prefill_us(*at) / 1e6 * (1 + noise * rng.uniform(-1, 1))) for at in GRID]


def test_the_public_set_is_fitted_as_well_as_it_can_be() -> None:
    paper, ours = (fit(PUBLIC, form) for form in FORMS)
    assert (round(paper.errors.mape, 3), round(paper.errors.worst, 3)) == (0.089, 0.245)
    assert (round(ours.errors.mape, 3), round(ours.errors.worst, 3)) == (0.016, 0.036)
    assert ours.coefficients.d == pytest.approx(0.0191, rel=0.01)
    assert ours.coefficients.g == pytest.approx(0.0414, rel=0.01)
    assert ours.coefficients.prefill_us(8, 8_192, 0) > ours.coefficients.prefill_us(4, 8_192, 0), "as was measured"


def test_without_cached_tokens_b_is_unknown_and_nought() -> None:
    assert {fit(PUBLIC, form).coefficients.b for form in FORMS} == {0.0}


def test_errors_by_degree_are_parts_of_the_whole() -> None:
    found = fit(PUBLIC, "paper")
    assert list(found.by_degree) == [1, 2, 4, 8]
    assert sum(part.samples for part in found.by_degree.values()) == found.errors.samples == 12
    assert np.mean([part.mape for part in found.by_degree.values()]) == pytest.approx(found.errors.mape)
    assert max(part.worst for part in found.by_degree.values()) == found.errors.worst


def test_a_prediction_by_hand() -> None:
    half_again = Coefficients(version="x", d=1.5, a=0, b=0, c=0, alpha=0)
    assert relative_errors([Sample(1, 1, 0, 1.0), Sample(8, 9, 9, 3.0)], half_again) == pytest.approx([0.5, -0.5])


def test_held_out_shapes_are_not_seen() -> None:
    """Two shapes on two ranks each: either part is predicted from the other alone, by one constant."""
    samples = [Sample(1, 10, 0, 1.0), Sample(2, 10, 0, 1.0), Sample(1, 10, 50, 2.0), Sample(2, 10, 50, 2.0)]
    assert fit(samples, "paper").held_out == Errors(4, pytest.approx(0.75), pytest.approx(1.0))
    assert fit(samples[:2], "paper").held_out is None


COEFFICIENT = st.one_of(st.just(0.0), st.floats(0.1, 10))


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[COEFFICIENT] * 6))
def test_what_samples_were_made_of_is_found_again(scale: tuple[float, ...]) -> None:
    """The unit is what the demo's 30B model takes; whole microseconds are all the noise there is."""
    units = {"d": 0.03, "a": 4e-5, "b": 2e-6, "c": 5e-5, "alpha": 6e-9, "g": 0.01}
    made = {name: unit * by for (name, unit), by in zip(units.items(), scale, strict=True)}
    known = Coefficients(version="known", **{**made, "d": made["d"] + 0.001})
    found = fit(samples_of(known), "with g")
    assert found.errors.worst < 2e-3
    assert found.held_out is not None
    assert found.held_out.worst < 2e-2
    for name, unit in units.items():
        assert getattr(found.coefficients, name) == pytest.approx(getattr(known, name), rel=0.02, abs=0.02 * unit)


def test_noise_is_averaged_out() -> None:
    known = Coefficients(version="known", d=0.03, a=4e-5, b=2e-6, c=5e-5, alpha=6e-9, g=0.01)
    found = fit(samples_of(known, noise=0.1), "with g")
    assert 0.03 < found.errors.mape < 0.07, "the mean of |uniform(-0.1, 0.1)| is 0.05"
    assert found.coefficients.c == pytest.approx(known.c, rel=0.15)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_the_solver_meets_the_conditions_of_a_minimum(seed: int, m: int, n: int, twins: bool) -> None:
    """Karush-Kuhn-Tucker: no gain along any used column, none by beginning to use another. Also with equal columns."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(m, n)), rng.normal(size=m)
    if twins:
        matrix = np.hstack([matrix, matrix])
    x = non_negative(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert (x >= 0).all()
    assert (gradient >= -1e-8).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-8


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_the_solution_is_the_nearest_float_whatever_the_processor(seed: int, n: int) -> None:
    """One measurement for each column, told apart by whole factors: a library's sums are off by a last bit or two."""
    rng = np.random.default_rng(seed)
    factors, target = rng.integers(1, 1_000, n), rng.integers(1, 1_000, n)
    matrix = np.repeat(np.diag(factors).astype(float), 3, axis=0)
    assert (non_negative(matrix, np.repeat(target, 3).astype(float)) == target / factors).all()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "samples: 0; 1 to"),
        ([Sample(1, 1, 0, 0.0)], r"seconds: 0\.0 at \(1, 1, 0\)"),
        ([Sample(1, 1, 0, float("nan"))], "seconds: nan"),
    ],
)
def test_samples_that_say_nothing_are_refused(samples: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(samples, "paper")
