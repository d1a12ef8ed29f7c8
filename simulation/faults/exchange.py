"""Unlogged messages between processes: a `Bus` for each connection, and the exchange that they meet on.

A handler runs in the process that subscribed, on a `MemoryBus` of its own; between two processes lie their links.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from shared.runtime.clock import Clock
from shared.runtime.memory import MemoryBus, matches
from shared.runtime.ports import Handler, NoReply
from simulation.faults.network import Link

REPEATED_AFTER_S_MAX = 2.0
"""How long after the first the repetition of a message may come; most come soon."""

DISORDER_S_MAX = 0.2
"""How far a message may be overtaken."""

APART_S = 1e-6
"""Between two messages of one connection to another: timers of one instant have no order."""

HANDLER_LIMIT_S = 60.0
"""Longer than anybody waits for a reply."""


class Listener(NamedTuple):
    """One subscription of one connection."""

    pattern: str
    bus: "DistantBus"


class Exchange:
    """Who listens, in the order of subscription."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def join(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def listening(self, subject: str) -> list["DistantBus"]:
        """The server drops whoever was killed; one that is cut off stays subscribed."""
        self._listeners = [each for each in self._listeners if not each.bus.link.dead]
        return [each.bus for each in self._listeners if matches(each.pattern, subject)]


class DistantBus:
    """A `Bus`."""

    def __init__(self, exchange: Exchange, link: Link, clock: Clock) -> None:
        self.link = link
        self._exchange = exchange
        self._local = MemoryBus(clock)
        self._last_due_s: dict[Link, float] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def publish(self, subject: str, payload: bytes) -> None:
        await self.link.lives()
        self.link.when_whole(lambda: self._send(subject, lambda bus: bus.hear(subject, payload)))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await self.link.whole()
                answer: asyncio.Future[bytes] = loop.create_future()
                if not self._exchange.listening(subject):
                    await self.link.sleep(self.link.latency_s())
                    raise NoReply(f"nobody listens on {subject}")
                self._send(subject, lambda bus: bus.be_asked(subject, payload, self, answer))
                return await answer
        except TimeoutError:
            await self.link.lives()
            raise NoReply(f"no answer on {subject} within {timeout_s:g} s") from None

    async def subscribe(self, subject: str, handler: Handler) -> None:
        await self._local.subscribe(subject, handler)
        self._exchange.join(Listener(subject, self))

    # --- on the way

    def _send(self, subject: str, arrive: Callable[["DistantBus"], None]) -> None:
        for bus in self._exchange.listening(subject):
            self._carry(bus.link, partial(arrive, bus))

    def _carry(self, to: Link, arrive: Callable[[], None]) -> None:
        """One message to one process: lost, late, twice, or as usual in the order of sending."""
        loop, link = asyncio.get_running_loop(), self.link
        if link.happens("loss") or to.happens("loss"):
            return
        due_s = loop.time() + link.latency_s() + to.latency_s()
        if link.happens("disorder"):
            due_s += link.chance.uniform(0, DISORDER_S_MAX)
        else:
            due_s = self._last_due_s[to] = max(due_s, self._last_due_s.get(to, 0.0) + APART_S)
        loop.call_at(due_s, arrive, context=to.context)
        if link.happens("repetition"):
            after_s = REPEATED_AFTER_S_MAX * link.chance.random() ** 3
            loop.call_at(due_s + after_s, arrive, context=to.context)

    def hear(self, subject: str, payload: bytes) -> None:
        """A message has come."""
        if self.link.through:
            self._run(self._local.publish(subject, payload))

    def be_asked(self, subject: str, payload: bytes, by: "DistantBus", answer: "asyncio.Future[bytes]") -> None:
        """A message that wants a reply has come."""
        if self.link.through:
            self._run(self._reply(subject, payload, by, answer))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reply(self, subject: str, payload: bytes, by: "DistantBus", answer: "asyncio.Future[bytes]") -> None:
        try:
            reply = await self._local.request(subject, payload, HANDLER_LIMIT_S)
        except NoReply:
            return  # the asker has given up long ago

        def arrive() -> None:
            if by.link.through and not answer.done():
                answer.set_result(reply)

        if self.link.through:
            self._carry(by.link, arrive)
