"""The way of one process to everybody else, and what a scenario does to it.

Bytes take time. A process may be cut off: what it sends then is kept for the reconnection or lost, as the client's buffers
decide, and nothing reaches it. A process that was killed sends and hears nothing ever again: whoever waits in it waits for
ever, so no clean-up of a dying process is ever seen by others.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Literal

ANSWER_LIMIT_S = 3.0
"""As long as a client waits for the server's answer (`nats_log.py`)."""

KEPT_IN_BUFFER = 0.5
"""The chance that something sent into a cut is sent again at the reconnection."""


Chance = Literal["loss", "repetition", "disorder", "unacknowledged", "late"]


@dataclass(slots=True)
class Weather:
    """How the network behaves now: for everybody, and on top of it for a link of its own. Chances are per message."""

    loss: float = 0.0
    repetition: float = 0.0
    disorder: float = 0.0
    delay_s: float = 0.0
    unacknowledged: float = 0.0
    late: float = 0.0

    def begin(self, what: str, strength: float) -> None:
        """It gets worse. Of two faults of a kind the later one counts, until either ends."""
        setattr(self, "delay_s" if what == "delay" else what, strength)

    def end(self, what: str) -> None:
        self.begin(what, 0.0)


class Link:
    """One process's connections. `context` is that process's, in which everything that reaches it runs."""

    def __init__(self, name: str, chance: Random, everywhere: Weather, context: Context) -> None:
        self.name = name
        self.chance = chance
        self.own = Weather()
        self.context = context
        self.dead = False
        self._everywhere = everywhere
        self._cuts = 0
        self._whole = asyncio.Event()
        self._whole.set()
        self._kept: list[Callable[[], None]] = []
        self._reconnected: list[Callable[[], None]] = []

    # --- faults

    def cut(self) -> None:
        """Nothing gets through, until as many `mend`s."""
        self._cuts += 1
        self._whole.clear()

    def mend(self) -> None:
        """Take one cut back. After the last one, what was kept is sent."""
        self._cuts -= 1
        if self._cuts or self.dead:
            return
        self._whole.set()
        kept, self._kept = self._kept, []
        for send in [*kept, *self._reconnected]:
            send()

    def kill(self) -> None:
        """The process is gone."""
        self.dead = True
        self._kept.clear()
        self._reconnected.clear()

    # --- questions

    @property
    def through(self) -> bool:
        """Whether anything can be sent and heard now."""
        return not self.dead and not self._cuts

    def happens(self, fault: Chance) -> bool:
        """Whether this chance of the weather strikes now."""
        likelihood: float = max(getattr(self.own, fault), getattr(self._everywhere, fault))
        return likelihood > 0 and self.chance.random() < likelihood

    def latency_s(self) -> float:
        """One way."""
        extra_s = max(self.own.delay_s, self._everywhere.delay_s)
        usual_s = self.chance.uniform(0.0002, 0.002)
        return usual_s + (self.chance.uniform(0, extra_s) if extra_s else 0.0)

    # --- what a process waits for

    async def sleep(self, seconds: float) -> None:
        """Time of a process: it ends with the process."""
        await asyncio.sleep(seconds)
        await self.lives()

    async def lives(self) -> None:
        """Never returns in a process that was killed."""
        if self.dead:
            await asyncio.get_running_loop().create_future()

    async def whole(self) -> None:
        """Returns when the link is not cut."""
        await self._whole.wait()
        await self.lives()

    # --- buffers

    def when_whole(self, send: Callable[[], None]) -> None:
        """Send now, or what the buffer keeps at the reconnection."""
        if self.dead:
            return
        if not self._cuts:
            send()
        elif self.chance.random() < KEPT_IN_BUFFER:
            self._kept.append(send)

    def at_reconnections(self, act: Callable[[], None]) -> None:
        """Call `act` after every cut."""
        self._reconnected.append(act)
