"""When to start a crashed process again. Pure.

A process that keeps crashing is started after 0.5, 1, 2, … seconds, at most 30 apart, and is given up after eight crashes
in a row (about a minute and a half). One that ran for a minute has proven itself: its next crash counts as the first.
"""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
DELAY_S_MAX = 30.0
CRASHES_MAX = 8
PROVEN_S = 60.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """The crashes of one process in a row."""

    in_a_row: int = 0

    def after_crash(self, ran_s: float) -> "Restarts":
        """The state once a process that ran for `ran_s` has crashed."""
        return Restarts(1 if ran_s >= PROVEN_S else self.in_a_row + 1)

    @property
    def delay_s(self) -> float | None:
        """How long to wait before the next start; None to give up. Meaningful after a crash."""
        if self.in_a_row >= CRASHES_MAX:
            return None
        return min(FIRST_DELAY_S * 2.0 ** (self.in_a_row - 1), DELAY_S_MAX)
