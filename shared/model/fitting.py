"""Coefficients out of measured prefills: non-negative least squares on the relative error (model: `cost.py`).

    minimise  Σ ((E_C(R, P) - seconds) / seconds)²    over d, a, b, c, α, g ≥ 0

Relative, because a set must be as right about 50 ms as about 5 s. Both forms are fitted everywhere: the paper's (g = 0) and
the one with g(C-1). Pure, and of no chance: equal samples give equal coefficients.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.model.cost import US_PER_S, Coefficients, attended_pairs

Floats = npt.NDArray[np.float64]
Form = Literal["paper", "with g"]
FORMS: tuple[Form, ...] = ("paper", "with g")

NAMES = ("d", "a", "b", "c", "alpha", "g")
FOLDS_MAX = 5
SAMPLES_MAX = 100_000


class Sample(NamedTuple):
    """How long one prefill took: R uncached tokens after P cached ones on C ranks. `seconds` > 0."""

    degree: int
    uncached_tokens: int
    cached_tokens: int
    seconds: float


class Errors(NamedTuple):
    """|predicted - measured| / measured, over some samples."""

    samples: int
    mape: float
    worst: float


class Fit(NamedTuple):
    """One form, fitted. `held_out` is the error on samples that the fit has not seen, None with fewer than two shapes."""

    form: Form
    coefficients: Coefficients
    errors: Errors
    by_degree: dict[int, Errors]
    held_out: Errors | None


def fit(samples: Sequence[Sample], form: Form, version: str = "fitted") -> Fit:
    """Errors: ValueError without samples, with more than `SAMPLES_MAX`, or with one that took no time."""
    if not 0 < len(samples) <= SAMPLES_MAX:
        raise ValueError(f"samples: {len(samples)}; 1 to {SAMPLES_MAX} are needed")
    if bad := [sample for sample in samples if not 0 < sample.seconds < float("inf")]:
        raise ValueError(f"seconds: {bad[0].seconds} at {bad[0][:3]}; each must be above 0")
    coefficients = _solved(samples, form, version)
    found = relative_errors(samples, coefficients)
    degrees = np.array([sample.degree for sample in samples])
    return Fit(
        form,
        coefficients,
        _summary(found),
        {int(degree): _summary(found[degrees == degree]) for degree in np.unique(degrees)},
        _held_out(samples, form),
    )


def relative_errors(samples: Sequence[Sample], coefficients: Coefficients) -> Floats:
    """(predicted - measured) / measured of each sample, shape (samples,)."""
    predicted: Floats = np.array([coefficients.prefill_us(*sample[:3]) for sample in samples], dtype=np.float64)
    measured: Floats = np.array([sample.seconds for sample in samples], dtype=np.float64)
    return predicted / US_PER_S / measured - 1


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """The x ≥ 0 that minimises |matrix·x - target|, shapes (m, n), (m,) → (n,); exact, for a handful of columns.

    The minimum is the unconstrained one over the columns that it uses, and some minimum uses independent columns: so the
    best admissible solution over all sets of columns is it. Six columns have 63 sets; no iteration, no tolerance.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for used in _subsets(columns):
        x, _, rank, _ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
        if rank == len(used) and (x >= 0).all():
            residual = target - matrix[:, used] @ x
            if (squares := float(residual @ residual)) < least:
                least, best = squares, np.zeros(columns)
                best[list(used)] = x
    return best


def _subsets(columns: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, columns + 1):
        yield from combinations(range(columns), size)


def _solved(samples: Sequence[Sample], form: Form, version: str) -> Coefficients:
    rows = [_terms(sample) for sample in samples]
    names = NAMES if form == "with g" else NAMES[:-1]
    seconds = np.array([sample.seconds for sample in samples])
    matrix = np.array(rows, dtype=np.float64)[:, : len(names)] / seconds[:, None]
    # Columns range over ten orders of magnitude; equal lengths keep the solution exact. A column of zeros (no sample had a
    # cached token, or all had one rank) says nothing, and its coefficient is 0.
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    x = non_negative(matrix / lengths, np.ones(len(samples))) / lengths
    return Coefficients(version=version, **{name: float(value) for name, value in zip(names, x, strict=True)})


def _terms(sample: Sample) -> tuple[float, ...]:
    """What each coefficient is multiplied by, in the order of `NAMES`."""
    degree, R, P, _ = sample
    return (1.0, R, P, R / degree, attended_pairs(R, P) / degree, degree - 1)


def _held_out(samples: Sequence[Sample], form: Form) -> Errors | None:
    """Cross-validation. All degrees of a shape (R, P) are held out together: a neighbour at another degree would give the
    answer away. Every k-th shape in order of size, so that each part has short and long ones."""
    shapes = sorted({(R, P) for _, R, P, _ in samples}, key=lambda shape: (sum(shape), shape))
    folds = min(FOLDS_MAX, len(shapes))
    if folds < 2:
        return None
    part = {shape: number % folds for number, shape in enumerate(shapes)}
    found = []
    for fold in range(folds):
        seen = [sample for sample in samples if part[sample[1:3]] != fold]
        unseen = [sample for sample in samples if part[sample[1:3]] == fold]
        found.append(relative_errors(unseen, _solved(seen, form, "held-out")))
    return _summary(np.concatenate(found))


def _summary(errors: Floats) -> Errors:
    absolute = np.abs(errors)
    return Errors(len(errors), float(absolute.mean()), float(absolute.max()))
