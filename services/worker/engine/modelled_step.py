"""A step of a modelled engine while it runs: nothing but time, and who still wants it."""

import asyncio
from dataclasses import dataclass, field

from shared.contracts.ids import RequestId
from shared.runtime.clock import Clock


@dataclass(slots=True)
class RunningStep:
    """It goes on while one of its requests is wanted."""

    requests: frozenset[RequestId]
    cancelled: set[RequestId] = field(default_factory=set)
    _unwanted: asyncio.Event = field(default_factory=asyncio.Event)

    def cancel(self, request: RequestId) -> None:
        self.cancelled.add(request)
        if self.cancelled == self.requests:
            self._unwanted.set()

    @property
    def broken_off(self) -> bool:
        """Nobody wanted it any more, so it computed nothing. Being cancelled in its last moment counts as well."""
        return self._unwanted.is_set()

    async def run(self, clock: Clock, seconds: float, dead: asyncio.Event) -> None:
        """Returns after `seconds`, or as soon as nobody wants the step, or when the node has died."""
        await sleep_unless(clock, seconds, dead, self._unwanted)


async def sleep_unless(clock: Clock, seconds: float, *events: asyncio.Event) -> None:
    """Returns after `seconds`, or as soon as one of `events` is set."""
    waits = [asyncio.ensure_future(each) for each in (clock.sleep(seconds), *(event.wait() for event in events))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
