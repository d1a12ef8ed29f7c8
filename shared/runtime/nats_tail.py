"""An ordered consumer that outlives its server: every message once, in stream order, or a clear end.

The server pushes to an inbox and numbers what it pushes. A number out of turn, a missed heartbeat or a reconnection makes
the tail look at the stream again: the same log, not behind what was delivered, not trimmed past it? Then a new consumer
goes on behind the last message delivered. nats-py's own ordered consumer is not used: it does not notice that the stream was
recreated, and gives up if the server is away when it resets.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header, StreamInfo

from shared.runtime.clock import Clock
from shared.runtime.nats_link import NatsLink, cancellable
from shared.runtime.ports import Deliver, LogLost, Unavailable

HEARTBEAT_S = 1.0
SILENCE_S = 2.5
"""Two heartbeats missed."""

RETRY_S = 0.2
ANSWER_LIMIT_S = 3.0
ABANDONED_S = 30.0
"""After this long without a reader the server forgets a consumer."""

BUFFER_BYTES_MAX = 64 * 2**20
"""Above the 32 MiB that the server's flow control lets be on its way."""

BREATHER_MESSAGES = 200
"""Catching up leaves the event loop to others after this many messages."""


class NatsTail:
    """A running consumer; `NatsLog.tail` makes it."""

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        info: Callable[[], Awaitable[StreamInfo]],
        filters: Sequence[str],
        after_seq: int,
        deliver: Deliver,
        clock: Clock,
    ) -> None:
        self._link = link
        self._stream = stream
        self._info = info
        self._filters = list(filters)
        self._deliver = deliver
        self._clock = clock
        self._delivered_seq = after_seq
        self._scanned_seq: int | None = None
        """Up to here nothing is missing, by the server's heartbeats; None before the first look at the stream."""
        self._turn = 0
        self._subscription: Subscription | None = None
        self._consumer: str | None = None
        self._heard_ns = 0
        self._look_again = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._unwatch: Callable[[], None] | None = None
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._logger = structlog.get_logger(component="tail", stream=stream)

    async def start(self) -> None:
        """Errors: Unavailable; LogLost."""
        self._unwatch = self._link.watch(self._end_turn, self._look_again.set)
        await self._follow()
        self._keeper = asyncio.create_task(self._keep_following(), name="tail")

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        await self._leave()

    async def failed(self) -> Exception:
        return await asyncio.shield(self._failure)

    async def _keep_following(self) -> None:
        closed = asyncio.ensure_future(self._link.closed())
        try:
            while not self._failure.done():
                await self._trouble(closed)
                if closed.done():
                    return self._fail(closed.result())
                try:
                    await self._leave()
                    await self._follow()
                except Unavailable:
                    await self._clock.sleep(RETRY_S)
                    self._look_again.set()
                except LogLost as lost:
                    self._fail(lost)
        finally:
            closed.cancel()

    async def _trouble(self, closed: "asyncio.Future[Exception]") -> None:
        """Returns when the consumer has to be replaced."""
        asked = asyncio.ensure_future(self._look_again.wait())
        first: list[asyncio.Future[Any]] = [asked, closed]
        try:
            while not asked.done() and not closed.done():
                silent_s = (self._clock.monotonic_ns() - self._heard_ns) / 1e9
                if silent_s >= SILENCE_S:
                    break
                await asyncio.wait(first, timeout=SILENCE_S - silent_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        self._look_again.clear()

    async def _follow(self) -> None:
        """Consume behind the last message delivered. Errors: Unavailable; LogLost."""
        self._check(await self._info())
        self._turn += 1
        inbox = self._link.client.new_inbox()
        reader = _Reader(self, self._turn)
        async with self._link.calling(f"consumer on {self._stream}", ANSWER_LIMIT_S):
            self._subscription = await self._link.client.subscribe(
                inbox, cb=reader.take, pending_msgs_limit=0, pending_bytes_limit=BUFFER_BYTES_MAX
            )
            created = await self._link.client.jetstream(timeout=ANSWER_LIMIT_S).add_consumer(
                self._stream,
                ConsumerConfig(
                    deliver_subject=inbox,
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=self._delivered_seq + 1,
                    ack_policy=AckPolicy.NONE,
                    max_deliver=1,
                    filter_subjects=self._filters,
                    idle_heartbeat=HEARTBEAT_S,
                    flow_control=True,
                    mem_storage=True,
                    num_replicas=1,
                    inactive_threshold=ABANDONED_S,
                ),
            )
        self._consumer = created.name
        self._heard_ns = self._clock.monotonic_ns()

    def _check(self, info: StreamInfo) -> None:
        """LogLost if what comes next cannot be had any more."""
        first, last = info.state.first_seq, info.state.last_seq
        if last < self._delivered_seq:
            raise LogLost(f"stream {self._stream} went back to {last}; {self._delivered_seq} had been delivered")
        if self._scanned_seq is None:
            self._scanned_seq = max(self._delivered_seq, first - 1)
        elif first > self._scanned_seq + 1:
            raise LogLost(f"stream {self._stream} now begins at {first}; only {self._scanned_seq} had been reached")

    def _end_turn(self) -> None:
        """Deliver nothing more from this consumer.

        After a reconnection the server goes on pushing where it was, with the next number, over messages that are gone.
        """
        self._turn += 1

    async def _leave(self) -> None:
        """Stop reading. Nothing is delivered after this, whatever is still on its way."""
        self._end_turn()
        subscription, self._subscription = self._subscription, None
        consumer, self._consumer = self._consumer, None
        try:
            if subscription is not None and not self._link.client.is_closed:
                with cancellable():
                    await subscription.unsubscribe()
            if consumer is not None:
                async with self._link.calling(f"consumer {consumer}", ANSWER_LIMIT_S):
                    await self._link.client.jetstream(timeout=ANSWER_LIMIT_S).delete_consumer(self._stream, consumer)
        except (Unavailable, nats.errors.Error) as error:
            # It is gone already, or goes after ABANDONED_S.
            self._logger.debug("consumer not deleted", error=str(error))

    def _fail(self, error: Exception) -> None:
        self._end_turn()
        if not self._failure.done():
            self._failure.set_result(error)


class _Reader:
    """Reads one consumer's inbox, for as long as it is the tail's turn."""

    def __init__(self, tail: NatsTail, turn: int) -> None:
        self._tail = tail
        self._turn = turn
        self._pushed = 0

    async def take(self, message: Msg) -> None:
        tail = self._tail
        if tail._turn != self._turn:
            return
        tail._heard_ns = tail._clock.monotonic_ns()
        if message.headers is not None and Header.STATUS in message.headers:
            await self._control(message)
            return
        stream_seq, pushed = _numbers(message.reply)
        if pushed != self._pushed + 1:
            self._lost()
            return
        self._pushed = pushed
        try:
            tail._deliver(message.subject, stream_seq, message.data)
        except Exception as error:  # noqa: BLE001 - whatever broke the fold is handed to failed()
            tail._fail(error)
            return
        tail._delivered_seq = tail._scanned_seq = stream_seq
        if pushed % BREATHER_MESSAGES == 0:
            await asyncio.sleep(0)

    async def _control(self, message: Msg) -> None:
        """A heartbeat, or the server asking how far we are."""
        headers = message.headers or {}
        for reply in (message.reply, headers.get(Header.CONSUMER_STALLED)):
            if reply:
                await self._tail._link.client.publish(reply)
        if (pushed := headers.get(Header.LAST_CONSUMER)) is None:
            return
        if int(pushed) != self._pushed:
            self._lost()
        elif (scanned := headers.get("Nats-Last-Stream")) is not None:
            self._tail._scanned_seq = max(self._tail._scanned_seq or 0, int(scanned))

    def _lost(self) -> None:
        """A push went missing: the rest of this consumer is of no use."""
        self._tail._end_turn()
        self._tail._look_again.set()


def _numbers(reply: str) -> tuple[int, int]:
    """Stream sequence and push number: `$JS.ACK[.domain.account].stream.consumer.tries.stream_seq.push.time.pending[.x]`."""
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7
    return int(tokens[first]), int(tokens[first + 1])
