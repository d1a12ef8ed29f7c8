"""The ports of `shared.runtime.ports` as one process of a failing world has them, in front of the in-memory ones.

Each keeps its port's contract: an append that was not answered may have been stored, or be stored later; a consumer gets every
message in order and once, however late; a message on the bus comes once, or not at all, or again.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from shared.runtime.memory import MemoryCell, MemoryLog
from shared.runtime.ports import Deliver, Entry, Tail, Unavailable, WrongLastSequence, check_append
from simulation.faults.network import ANSWER_LIMIT_S, Link

T = TypeVar("T")

LATE_S_MAX = 2 * ANSWER_LIMIT_S
"""How long a write may be on its way when its sender has long given up."""


async def ask(link: Link, work: Callable[[], Coroutine[Any, Any, T]], *, writes: bool) -> T:
    """The server's answer to one request. Errors: Unavailable; whatever `work` raises, there.

    A write reaches the server whatever becomes of its sender in the meantime.
    """
    if not link.through:
        await link.sleep(ANSWER_LIMIT_S)
        raise Unavailable(f"{link.name} is cut off")
    late = writes and link.happens("late")
    silent = writes and link.happens("unacknowledged")
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    hop_s = link.chance.uniform(0, LATE_S_MAX) if late else link.latency_s()
    asyncio.get_running_loop().call_later(hop_s, lambda: _settle(work, answer))
    done, _ = await asyncio.wait([answer], timeout=ANSWER_LIMIT_S)
    if done and not silent:
        await link.sleep(link.latency_s())
        if link.through:
            return answer.result()
    await link.sleep(ANSWER_LIMIT_S if done else 0)
    raise Unavailable(f"{link.name}: no answer within {ANSWER_LIMIT_S:g} s")


def _settle(work: Callable[[], Coroutine[Any, Any, T]], answer: "asyncio.Future[T]") -> None:
    """What is in memory answers without waiting."""
    step = work()
    try:
        step.send(None)
    except StopIteration as done:
        if not answer.done():
            answer.set_result(done.value)
    except (WrongLastSequence, Unavailable) as refusal:
        if not answer.done():
            answer.set_exception(refusal)
            answer.exception()
    else:
        raise AssertionError("the in-memory world does not wait")


class DistantLog:
    """An `EventLog`."""

    def __init__(self, log: MemoryLog, link: Link) -> None:
        self.tails: list[DistantTail] = []
        self._log = log
        self._link = link

    @property
    def identity(self) -> str:
        return self._log.identity

    async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        check_append(entries, expected)
        kept, relied_on = tuple(entries), dict(expected)
        return await ask(self._link, lambda: self._log.append(kept, relied_on), writes=True)

    async def last_on(self, subject: str) -> tuple[int, bytes] | None:
        return await ask(self._link, lambda: self._log.last_on(subject), writes=False)

    async def bounds(self) -> tuple[int, int]:
        return await ask(self._link, self._log.bounds, writes=False)

    async def tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> "DistantTail":
        return await ask(self._link, lambda: self._tail(filters, after_seq, deliver), writes=False)

    async def _tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> "DistantTail":
        tail = DistantTail(self._link, deliver)
        self.tails.append(tail)
        tail.source = await self._log.tail(filters, after_seq, tail.take)
        return tail


class DistantTail:
    """A `Tail`: what the log has reaches the process in order, each message after its own while."""

    source: Tail

    def __init__(self, link: Link, deliver: Deliver) -> None:
        self._link = link
        self._deliver = deliver
        self._coming: deque[tuple[float, str, int, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._stopped = False
        link.at_reconnections(self._wait)

    @property
    def drained(self) -> bool:
        """Whether the process has everything that the log has."""
        return not self._coming or self._stopped

    def take(self, subject: str, seq: int, raw: bytes) -> None:
        """The log has a message."""
        if self._stopped or self._link.dead:
            return
        due_s = asyncio.get_running_loop().time() + self._link.latency_s()
        if self._coming:
            due_s = max(due_s, self._coming[-1][0])
        self._coming.append((due_s, subject, seq, raw))
        self._wait()

    def _wait(self) -> None:
        if self._timer is None and self._coming and self._link.through:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._coming[0][0], self._arrive, context=self._link.context)

    def _arrive(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._link.through and not self._stopped and self._coming and self._coming[0][0] <= now_s:
            _, subject, seq, raw = self._coming.popleft()
            try:
                self._deliver(subject, seq, raw)
            except Exception as error:  # noqa: BLE001 - whatever broke the fold is handed to failed()
                self._stopped = True
                self._coming.clear()
                self._failure.set_result(error)
        self._wait()

    async def stop(self) -> None:
        self._stopped = True
        self._coming.clear()
        await self.source.stop()

    async def failed(self) -> Exception:
        first: list[Awaitable[Exception]] = [asyncio.shield(self._failure), self.source.failed()]
        waits = [asyncio.ensure_future(each) for each in first]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next(each.result() for each in waits if each.done())
        finally:
            for each in waits:
                each.cancel()


class DistantCell:
    """A `Cell`."""

    def __init__(self, cell: MemoryCell, link: Link) -> None:
        self._cell = cell
        self._link = link

    async def read(self) -> tuple[int, bytes] | None:
        return await ask(self._link, self._cell.read, writes=False)

    async def write(self, value: bytes, revision: int) -> int:
        return await ask(self._link, lambda: self._cell.write(value, revision), writes=True)
