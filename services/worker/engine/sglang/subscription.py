"""Follows one unit's KV events, and one server's load, over ZMQ: publisher and subscriber as SGLang 0.5.23 has them.

The subscriber begins with a replay of everything that the server's buffer has, so an adapter that joins a warm server knows
its pages as far as the last `buffer_steps` batches tell of them, and asks for a replay whenever a number is missing. Without
a replay port a gap empties the unit (`unit_cache`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import structlog
import zmq
import zmq.asyncio

from services.worker.engine.sglang.kv_messages import END_OF_REPLAY, SEQUENCE_BYTES, BadMessage, Message, parse
from services.worker.engine.sglang.unit_cache import UnitCache

REPLAY_LIMIT_S = 10.0
"""Between two messages of a replay: the publisher looks for requests ten times a second."""

RECEIVE_MAX = 100_000
"""Messages that may wait here; SGLang keeps as many for a subscriber that is slow."""


class EventStream:
    """`changed` after each message; `restarted` when the publisher, who never repeats a number, counts anew."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        replay_endpoint: str | None,
        cache: UnitCache,
        changed: Callable[[], None],
        restarted: Callable[[], None],
    ) -> None:
        self._context, self.endpoint, self._replay_endpoint = context, endpoint, replay_endpoint
        self._cache, self._changed, self._restarted = cache, changed, restarted
        self._newest: int | None = None
        self.ready = asyncio.Event()
        self._logger = structlog.get_logger(component="kv-events", endpoint=endpoint)

    async def run(self) -> None:
        """Until it is cancelled. `ready` once the publisher is connected and what was published before is folded."""
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, RECEIVE_MAX)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                socket.connect(self.endpoint)
                await monitor.recv_multipart()
                socket.disable_monitor()
            await self._catch_up(0)
            self.ready.set()
            while True:
                await self._take(await socket.recv_multipart())

    async def _take(self, frames: list[bytes]) -> None:
        try:
            message = parse(frames)
        except BadMessage as error:
            # Sent again it would be no better, and the next one, whose number shows the gap, may be as bad.
            self._logger.warning("not understood: what the unit holds is not known", error=str(error))
            self._cache.forget()
            self._changed()
            return
        # Only what is heard twice tells of another life: what is heard once may have been in the replay before.
        if self._newest is not None and message.sequence <= self._newest:
            self._restarted()
        self._newest = message.sequence
        if (first := self._cache.missing(message)) is not None and self._cache.next_sequence is not None:
            await self._catch_up(first)
            if (left := self._cache.missing(message)) is not None:
                self._logger.warning("events are lost", first=left, last=message.sequence - 1)
        self._fold(message)

    async def _catch_up(self, first: int) -> None:
        if self._replay_endpoint is None:
            return
        try:
            async for message in self._replay(self._replay_endpoint, first):
                self._fold(message)
        except (TimeoutError, BadMessage) as error:
            self._logger.warning("no replay", first=first, error=f"{type(error).__name__}: {error}")

    async def _replay(self, endpoint: str, first: int) -> AsyncIterator[Message]:
        """Errors: TimeoutError, BadMessage."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            await socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")])
            while True:
                async with asyncio.timeout(REPLAY_LIMIT_S):
                    _, *frames = await socket.recv_multipart()
                message = parse(frames)
                if message.sequence == END_OF_REPLAY:
                    return
                yield message

    def _fold(self, message: Message) -> None:
        self._cache.fold(message)
        self._changed()


async def follow_load(context: zmq.asyncio.Context, endpoint: str, heard: Callable[[], None]) -> None:
    """`heard` whenever a scheduler publishes its load, until it is cancelled. What it says is not looked at: the agent knows
    its own queue, and prices come from the log."""
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(endpoint)
        while True:
            await socket.recv_multipart()
            heard()
