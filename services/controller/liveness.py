"""Who has been silent for too long: routers and nodes send a heartbeat each second.

Silence counts only while this process can hear: after every moment in which it may have been deaf (it began to lead, its
servers were away, its own loop stood still) everybody gets a new period of grace.
"""

from collections.abc import Collection
from typing import Generic, TypeVar

SILENCE_NS = 3_000_000_000
"""Three heartbeats."""

GRACE_NS = 5_000_000_000
"""For whoever has just registered, and for all after a deafness: a reconnecting client may need two seconds."""

K = TypeVar("K")


class Liveness(Generic[K]):
    """Heartbeats of one kind of process. Times are monotonic nanoseconds."""

    def __init__(self, now_ns: int) -> None:
        self._deaf_ns = now_ns
        self._first_ns: dict[K, int] = {}
        self._last_ns: dict[K, int] = {}

    def was_deaf(self, now_ns: int) -> None:
        """Silence up to now means nothing."""
        self._deaf_ns = now_ns

    def heard(self, key: K, now_ns: int) -> None:
        """A heartbeat. One of a process that is not `expected` is ignored."""
        if key in self._first_ns:
            self._last_ns[key] = now_ns

    def silent(self, expected: Collection[K], now_ns: int) -> dict[K, int]:
        """Nanoseconds of silence of each of `expected` that has been silent too long. The others are forgotten."""
        self._last_ns = {key: last_ns for key, last_ns in self._last_ns.items() if key in expected}
        self._first_ns = {key: self._first_ns.get(key, now_ns) for key in expected}
        if now_ns - self._deaf_ns < GRACE_NS:
            return {}
        silences = {
            key: now_ns - self._last_ns.get(key, first_ns)
            for key, first_ns in self._first_ns.items()
            if now_ns - first_ns >= GRACE_NS
        }
        return {key: silence_ns for key, silence_ns in silences.items() if silence_ns >= SILENCE_NS}
