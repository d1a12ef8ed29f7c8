"""The only place that reads a clock or makes an id. Deciders get both as arguments; the simulator passes its own."""

import asyncio
import random
import time
from typing import Protocol
from uuid import UUID


class Clock(Protocol):
    """Wall time for records, monotonic time for waits. Both advance together in simulation."""

    def now_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Never goes back; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """At least `seconds`."""


class SystemClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Ids:
    """UUIDv7 out of a given clock and a given source of chance, so that a seeded run repeats its ids."""

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        self._clock = clock
        self._chance = chance

    def next(self) -> UUID:
        """48 bits of milliseconds, version 7, 74 bits of chance (RFC 9562, 5.7)."""
        milliseconds = self._clock.now_ns() // 1_000_000
        value = (milliseconds & (1 << 48) - 1) << 80 | self._chance.getrandbits(80)
        value = value & ~(0xF << 76) | 0x7 << 76
        value = value & ~(0x3 << 62) | 0x2 << 62
        return UUID(int=value)
