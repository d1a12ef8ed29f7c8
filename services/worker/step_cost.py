"""What a step costs and whose time it was. Pure.

A step costs `d + g(C-1)` once and each request what it adds (model, 2.1). The measured time of a step is shared among its
requests in proportion to that prediction, the constant in equal parts. So the shares of a step add up to its time, measured
over predicted is the same for each of them and is that of the step, and a request alone in one step is priced by E_C(R, P).
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared.model.cost import Coefficients


class WorkerCost(NamedTuple):
    """What steps of one worker cost."""

    coefficients: Coefficients
    degree: int

    @property
    def constant_us(self) -> int:
        """Of a step, whatever is in it."""
        return self.coefficients.constant_us(self.degree)

    def adds_us(self, uncached_tokens: int, cached_tokens: int) -> int:
        """What a request adds to it."""
        return self.coefficients.adds_us(self.degree, uncached_tokens, cached_tokens)


class Cost(NamedTuple):
    """One request's part of a step's time, in microseconds."""

    predicted_us: int
    measured_us: int


def step_us(coefficients: Coefficients, degree: int, items: Sequence[tuple[int, int]]) -> int:
    """Predicted time of a step, from (uncached, cached) tokens of each request."""
    return coefficients.constant_us(degree) + sum(coefficients.adds_us(degree, *each) for each in items)


def shared_out(
    coefficients: Coefficients, degree: int, items: Sequence[tuple[int, int]], measured_us: int
) -> list[Cost]:
    """Each request's part, in order. What rounding leaves goes to the later ones."""
    constant_us, count = coefficients.constant_us(degree), len(items)
    predicted = [
        coefficients.adds_us(degree, *each) + constant_us * (index + 1) // count - constant_us * index // count
        for index, each in enumerate(items)
    ]
    total_us = sum(predicted)
    # A set may predict that a step takes no time at all; then everybody's part is the same.
    weights = predicted if total_us else [1] * count
    total = total_us or count
    costs: list[Cost] = []
    before = 0
    for own_us, weight in zip(predicted, weights, strict=True):
        after = before + weight
        costs.append(Cost(own_us, measured_us * after // total - measured_us * before // total))
        before = after
    return costs
