"""A log that loses acknowledgements, and other ways for the outside world to misbehave, all chosen by a seed."""

import asyncio
import random
from collections.abc import Mapping, Sequence

from shared.runtime.clock import SystemClock
from shared.runtime.memory import MemoryLog
from shared.runtime.ports import Deliver, Entry, Tail, Unavailable, WrongLastSequence


class HastyClock(SystemClock):
    """Waits only for the other tasks."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class FaultyLog:
    """An `EventLog` in front of a `MemoryLog`: an append may fail before it happened, after it, or happen later than told,
    from the moment it is `armed`."""

    def __init__(self, log: MemoryLog, chance: random.Random) -> None:
        self.log = log
        self.armed = False
        self.lost_acknowledgements = 0
        self._chance = chance
        self._late: set[asyncio.Task[None]] = set()

    @property
    def identity(self) -> str:
        return self.log.identity

    async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        await self._turns()
        match self._chance.randrange(8) if self.armed else None:
            case 0:
                raise Unavailable("fault: before the append")
            case 1:
                await self.log.append(entries, expected)
                self.lost_acknowledgements += 1
                await self._turns()
                raise Unavailable("fault: after the append")
            case 2:
                late = asyncio.create_task(self._later(entries, dict(expected)))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
                raise Unavailable("fault: the append is still on its way")
            case _:
                return await self.log.append(entries, expected)

    async def last_on(self, subject: str) -> tuple[int, bytes] | None:
        await self._turns()
        if self.armed and self._chance.randrange(8) == 0:
            raise Unavailable("fault: reading")
        return await self.log.last_on(subject)

    async def bounds(self) -> tuple[int, int]:
        return await self.log.bounds()

    async def tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> Tail:
        return await self.log.tail(filters, after_seq, deliver)

    async def settle(self) -> None:
        """Returns when every late append has arrived."""
        await asyncio.gather(*self._late)

    async def _later(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> None:
        await self._turns()
        try:
            await self.log.append(entries, expected)
        except WrongLastSequence:
            return
        self.lost_acknowledgements += 1

    async def _turns(self) -> None:
        for _ in range(self._chance.randrange(6)):
            await asyncio.sleep(0)
