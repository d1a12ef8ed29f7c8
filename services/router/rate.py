"""ρ: how much work all routers have assigned of late, per worker and second. A fold over `request-assigned` alone.

Counted are first attempts, by the second in which they were decided: a second attempt is the same work. Sums of sets, so
the order of events makes no difference. A router whose clock is ahead of the others' by more than `KEPT_S` hides them here.
"""

from dataclasses import dataclass, field

from shared.contracts.events import RequestAssigned
from shared.model.parameters import LOAD_WINDOW_S

KEPT_S = 60
"""Seconds that are kept behind the newest: more than any router lags, or its clock is behind."""

_SECOND_NS = 10**9


@dataclass(slots=True)
class Rate:
    """Predicted microseconds by second."""

    assigned_us: dict[int, int] = field(default_factory=dict)
    newest_s: int = 0

    def fold(self, data: RequestAssigned) -> None:
        if data.attempt != 1:
            return
        second = data.now_ns // _SECOND_NS
        if second > self.newest_s:
            self.newest_s = second
            for old in [each for each in self.assigned_us if each <= second - KEPT_S]:
                del self.assigned_us[old]
        if second > self.newest_s - KEPT_S:
            self.assigned_us[second] = self.assigned_us.get(second, 0) + data.service_us

    def load_ppm(self, now_ns: int, workers: int) -> int:
        """ρ in millionths; 0 without workers."""
        now_s = now_ns // _SECOND_NS
        assigned_us = sum(self.assigned_us.get(second, 0) for second in range(now_s - LOAD_WINDOW_S, now_s))
        return assigned_us // (LOAD_WINDOW_S * workers) if workers else 0
