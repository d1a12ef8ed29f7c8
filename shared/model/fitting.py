"""Coefficients out of measured prefills: non-negative least squares on the relative error (model: `cost.py`).

    minimise  Σ ((E_C(R, P) - seconds) / seconds)²    over d, a, b, c, α, g ≥ 0

Relative, because a set must be as right about 50 ms as about 5 s. Both forms are fitted everywhere: the paper's (g = 0) and
the one with g(C-1). Pure, and of no chance: equal samples give equal coefficients, on any processor.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
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

ONE = 2.0**53
"""What stands for 1 where sums are whole: a column of length 1 loses no more than a float has."""

DEPENDENT = 10**20
"""A column of which one part in so many, squared, is not made of others says nothing that they do not."""


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


def doubts(samples: Sequence[Sample]) -> list[str]:
    """What samples like these leave open, however small the errors on them are."""
    found = []
    shapes, degrees = {sample[:3] for sample in samples}, {sample.degree for sample in samples}
    if len(shapes) < len(NAMES):
        found.append(f"{len(shapes)} shapes cannot tell {len(NAMES)} coefficients apart: measure more lengths and hits")
    if len(degrees) == 1:
        found.append(f"degree {min(degrees)} alone says nothing of other degrees: what ranks share is not told apart")
    return found


def relative_errors(samples: Sequence[Sample], coefficients: Coefficients) -> Floats:
    """(predicted - measured) / measured of each sample, shape (samples,)."""
    predicted: Floats = np.array([coefficients.prefill_us(*sample[:3]) for sample in samples], dtype=np.float64)
    measured: Floats = np.array([sample.seconds for sample in samples], dtype=np.float64)
    return predicted / US_PER_S / measured - 1


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """The x ≥ 0 that minimises |matrix·x - target|, shapes (m, n), (m,) → (n,); exact, for a handful of columns.

    The minimum is the unconstrained one over the columns that it uses, and some minimum uses independent columns: so the
    best admissible solution over all sets of columns is it. Six columns have 63 sets; no iteration. In whole numbers, because
    a library's sums differ in their last bits from one processor to another, and a recorded fit has to come out again on any.
    """
    columns = matrix.shape[1]
    whole = np.array([[int(value * ONE) for value in row] for row in matrix.tolist()], dtype=object)
    gram, right = whole.T @ whole, whole.T @ np.array([int(value * ONE) for value in target.tolist()], dtype=object)
    best, most = np.zeros(columns), Fraction(0)
    for used in _subsets(columns):
        numerators, denominator = _solved_whole([[*gram[row, used], right[row]] for row in used])
        if not denominator or min(numerators) < 0:
            continue
        explained = Fraction(sum(n * right[row] for n, row in zip(numerators, used, strict=True)), denominator)
        if explained > most:
            most, best = explained, np.zeros(columns)
            best[list(used)] = [numerator / denominator for numerator in numerators]
    return best


def _solved_whole(rows: list[list[int]]) -> tuple[list[int], int]:
    """Normal equations, their right side in the last column, by elimination without fractions (Bareiss 1968: no division has a
    remainder). Numerators and the denominator of all; that is 0 where a column is made of others, as far as `DEPENDENT` tells.
    """
    before, lengths = 1, [row[at] for at, row in enumerate(rows)]
    for at, length in enumerate(lengths):
        lead = rows[at]
        pivot = lead[at]
        if pivot * DEPENDENT <= before * length:
            return [], 0
        rows = [
            row if row is lead else [(pivot * a - row[at] * b) // before for a, b in zip(row, lead, strict=True)]
            for row in rows
        ]
        before = pivot
    return [row[-1] for row in rows], before


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
