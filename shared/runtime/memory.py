"""The outside world in memory: the same contracts as NATS, deterministic, for unit tests and simulation."""

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import structlog

from shared.runtime.clock import Clock
from shared.runtime.ports import HANDLERS_MAX, Deliver, Entry, Handler, NoReply, WrongLastSequence, check_append

SETTLE_TURNS = 50
"""How many turns of the event loop `ManualClock.advance` gives to those it woke; chains of awaits are shorter."""


class ManualClock:
    """Time stands still until `advance`."""

    def __init__(self, now_ns: int = 1_800_000_000 * 10**9) -> None:
        self._start_ns = self._now_ns = now_ns
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns - self._start_ns

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ns + round(seconds * 1e9), next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass: every sleeper wakes at its own instant, in order, and has run before the next one wakes."""
        end_ns = self._now_ns + round(seconds * 1e9)
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end_ns:
            due_ns, _, woken = heapq.heappop(self._sleepers)
            self._now_ns = max(self._now_ns, due_ns)
            if not woken.done():
                woken.set_result(None)
            await _settle()
        self._now_ns = end_ns
        await _settle()


async def _settle() -> None:
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)


class _Message(NamedTuple):
    subject: str
    seq: int
    payload: bytes


class MemoryLog:
    """An `EventLog`. Whoever follows it has every message delivered before `append` returns."""

    def __init__(self, identity: str = "memory") -> None:
        self._identity = identity
        self._messages: list[_Message] = []
        self._last_seq = 0
        self._tails: list[_MemoryTail] = []

    @property
    def identity(self) -> str:
        return self._identity

    async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        check_append(entries, expected)
        for subject, seq in expected.items():
            last = self._last(subject)
            if (last.seq if last else 0) != seq:
                raise WrongLastSequence(f"{subject}: the last sequence is not {seq}")
        for entry in entries:
            self._last_seq += 1
            self._messages.append(_Message(entry.subject, self._last_seq, entry.payload))
        for message in self._messages[-len(entries) :]:
            for tail in tuple(self._tails):
                tail.take(message)
        return self._last_seq

    async def last_on(self, subject: str) -> tuple[int, bytes] | None:
        found = self._last(subject)
        return (found.seq, found.payload) if found else None

    async def bounds(self) -> tuple[int, int]:
        first = self._messages[0].seq if self._messages else self._last_seq + 1
        return first, self._last_seq

    async def tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> "_MemoryTail":
        tail = _MemoryTail(filters, after_seq, deliver, self._tails.remove)
        self._tails.append(tail)
        for message in tuple(self._messages):
            tail.take(message)
        return tail

    def drop_before(self, seq: int) -> None:
        """Forget the messages before `seq`, as a full stream does."""
        self._messages = [message for message in self._messages if message.seq >= seq]

    def lose(self, error: Exception) -> None:
        """End every tail with `error`, as a recreated stream does."""
        for tail in tuple(self._tails):
            tail.fail(error)

    def _last(self, subject: str) -> _Message | None:
        return next((message for message in reversed(self._messages) if matches(subject, message.subject)), None)


class _MemoryTail:
    def __init__(
        self,
        filters: Sequence[str],
        after_seq: int,
        deliver: Deliver,
        detach: Callable[["_MemoryTail"], None],
    ) -> None:
        self._filters = tuple(filters)
        self._after_seq = after_seq
        self._deliver = deliver
        self._detach = detach
        self._following = True
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def take(self, message: _Message) -> None:
        if not self._following or message.seq <= self._after_seq:
            return
        if not any(matches(each, message.subject) for each in self._filters):
            return
        try:
            self._deliver(message.subject, message.seq, message.payload)
        except Exception as error:  # noqa: BLE001 - whatever broke the fold is handed to failed()
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._end()
        if not self._failure.done():
            self._failure.set_result(error)

    async def stop(self) -> None:
        self._end()

    async def failed(self) -> Exception:
        return await asyncio.shield(self._failure)

    def _end(self) -> None:
        if self._following:
            self._following = False
            self._detach(self)


class MemoryBus:
    """A `Bus` whose subscribers run in the publisher's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._subscriptions: list[tuple[str, Handler, asyncio.Semaphore]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._logger = structlog.get_logger(component="bus")

    async def publish(self, subject: str, payload: bytes) -> None:
        self._dispatch(subject, payload, None)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._dispatch(subject, payload, reply):
            raise NoReply(f"nobody listens on {subject}")
        limit = asyncio.ensure_future(self._clock.sleep(timeout_s))
        first: list[asyncio.Future[Any]] = [reply, limit]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            limit.cancel()
        if not reply.done():
            raise NoReply(f"no answer on {subject} within {timeout_s:g} s")
        return reply.result()

    async def subscribe(self, subject: str, handler: Handler) -> None:
        self._subscriptions.append((subject, handler, asyncio.Semaphore(HANDLERS_MAX)))

    async def close(self) -> None:
        """End every subscription and what it runs."""
        self._subscriptions.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _dispatch(self, subject: str, payload: bytes, reply: "asyncio.Future[bytes] | None") -> int:
        """How many listen."""
        listeners = [(handler, slots) for pattern, handler, slots in self._subscriptions if matches(pattern, subject)]
        for handler, slots in listeners:
            task = asyncio.ensure_future(self._handle(handler, slots, subject, payload, reply))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return len(listeners)

    async def _handle(
        self,
        handler: Handler,
        slots: asyncio.Semaphore,
        subject: str,
        payload: bytes,
        reply: "asyncio.Future[bytes] | None",
    ) -> None:
        async with slots:
            try:
                answer = await handler(subject, payload)
            except Exception:
                self._logger.exception("handler failed", subject=subject)
                return
        if answer is not None and reply is not None and not reply.done():
            reply.set_result(answer)


class MemoryCell:
    """A `Cell`: share one between the `CellLease`s of one role."""

    def __init__(self) -> None:
        self._content: tuple[int, bytes] | None = None

    async def read(self) -> tuple[int, bytes] | None:
        return self._content

    async def write(self, value: bytes, revision: int) -> int:
        current = self._content[0] if self._content else 0
        if current != revision:
            raise WrongLastSequence(f"revision {revision} was replaced by {current}")
        self._content = revision + 1, value
        return revision + 1


def matches(pattern: str, subject: str) -> bool:
    """Whether `subject` fits `pattern`, in which `*` is any token and a last `>` any one or more."""
    tokens = subject.split(".")
    parts = pattern.split(".")
    if parts[-1] == ">":
        parts.pop()
        if len(tokens) <= len(parts):
            return False
        tokens = tokens[: len(parts)]
    return len(tokens) == len(parts) and all(part in ("*", token) for part, token in zip(parts, tokens, strict=True))
