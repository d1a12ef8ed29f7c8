"""Virtual time: what happens next, and when. Of things at the same time the one that was planned first comes first."""

from collections.abc import Callable
from heapq import heappop, heappush

NS_PER_S = 1_000_000_000


class Agenda:
    """`now_ns` moves only in `step`."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._planned: list[tuple[int, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, at_ns: int, action: Callable[[], object]) -> None:
        """Plan `action`; what is late happens now."""
        self._count += 1
        heappush(self._planned, (max(at_ns, self.now_ns), self._count, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now_ns + round(seconds * NS_PER_S), action)

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Repeat `action` for as long as somebody takes steps; first after `seconds`."""

        def again() -> None:
            action()
            self.after(seconds, again)

        self.after(seconds, again)

    def step(self) -> None:
        """Let the next thing happen."""
        assert self._planned, "somebody waits for something that nobody has planned"
        self.now_ns, _, action = heappop(self._planned)
        action()
