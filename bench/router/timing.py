"""How long things take, side by side: every round times each of them once, so that they share what the machine does."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Times(NamedTuple):
    """Microseconds of the clock."""

    least: float
    p10: float
    p50: float

    def __str__(self) -> str:
        return f"{self.least:10.2f} {self.p10:10.2f} {self.p50:10.2f}"


HEADING = f"{'µs':40} {'least':>10} {'p10':>10} {'p50':>10}"


def of(taken_ns: list[int]) -> Times:
    ordered = sorted(taken_ns)
    return Times(*(ordered[len(ordered) * part // 100] / 1e3 for part in (0, 10, 50)))


def side_by_side(things: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Time them, and print a line each."""
    taken: dict[str, list[int]] = {name: [] for name in things}
    for _ in range(rounds):
        for name, thing in things.items():
            began = time.perf_counter_ns()
            thing()
            taken[name].append(time.perf_counter_ns() - began)
    for name, each in taken.items():
        print(f"{name:40} {of(each)}")
