"""The smallest scenario that still fails: faults, then requests, then asks are left out for as long as it does."""

from collections.abc import Callable

from simulation.faults.running import Parts
from simulation.faults.scenario import Scenario

RUNS_MAX = 400
"""A run takes a tenth of a second or two; what is left after so many is small enough to read."""


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Parts:
    """Parts of a scenario that fails. What is left out in halves first is left out one by one at the end."""
    parts = Parts(*(tuple(range(len(each))) for each in (scenario.faults, scenario.requests, scenario.asks)))
    runs = 0

    def still_fails(smaller: Parts) -> bool:
        nonlocal runs
        runs += 1
        return runs <= RUNS_MAX and fails(smaller.of(scenario))

    before = None
    while before != parts:
        before = parts
        for field in Parts._fields:
            parts = _fewer(parts, field, still_fails)
    return parts


def _fewer(parts: Parts, field: str, fails: Callable[[Parts], bool]) -> Parts:
    """Leave out runs of one kind of part, ever shorter ones."""
    length = len(getattr(parts, field))
    while length:
        begin = 0
        while begin < len(kept := getattr(parts, field)):
            smaller = parts._replace(**{field: kept[:begin] + kept[begin + length :]})
            if fails(smaller):
                parts = smaller
            else:
                begin += length
        length //= 2
    return parts
