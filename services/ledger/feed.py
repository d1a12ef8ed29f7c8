"""The stream after a sequence, in bounded batches.

The log's tail calls back for each message and cannot be asked to wait. So when the queue is full the callback refuses, which
ends the tail, and once half of the queue is written a new tail goes on behind the last message queued: the stream itself is
the buffer. A queue that grew with the database's absence would be lost with the process anyway.
"""

import asyncio
from collections import deque

from services.ledger.records import Arrival, digest
from shared.runtime.ports import EventLog, Tail

BATCH_EVENTS_MAX = 1_000
BATCH_BYTES_MAX = 8 * 2**20
BATCH_WAIT_S = 0.2
"""How long a batch waits to fill: what the record may lag behind, for a transaction less."""

QUEUE_EVENTS_MAX = 20_000
QUEUE_BYTES_MAX = 64 * 2**20


class Gap(Exception):
    """The stream had dropped messages before they were read: `from_seq` to `to_seq`."""

    def __init__(self, from_seq: int, to_seq: int) -> None:
        super().__init__(f"messages {from_seq} to {to_seq} had been dropped by the stream before they were recorded")
        self.from_seq = from_seq
        self.to_seq = to_seq


class WentBack(Exception):
    """The stream holds another message than the recorded one at the checkpoint: it was put back to an older state."""


class _Full(Exception):
    """The queue is; the tail has to be taken up again later."""


class Feed:
    """Follows every subject of `filters` from `start` on."""

    def __init__(self, log: EventLog, filters: tuple[str, ...]) -> None:
        self._log = log
        self._filters = filters
        self._queue: deque[Arrival] = deque()
        self._queued_bytes = 0
        self._queued_seq = 0
        self._taken_seq = 0
        self._known_digest = b""
        self._tail: Tail | None = None
        self._failure: asyncio.Task[Exception] | None = None
        self._filled = asyncio.Event()
        self._enough = asyncio.Event()

    async def start(self, checkpoint_seq: int, checkpoint_digest: bytes) -> None:
        """Follow the log after the checkpoint. The message at it is read once more and compared, if it is still there and
        its digest is known. Errors: Unavailable, LogLost."""
        await self.stop()
        self._queued_seq = self._taken_seq = checkpoint_seq
        self._known_digest = checkpoint_digest
        await self._follow(max(checkpoint_seq - 1, 0) if checkpoint_digest else checkpoint_seq)

    async def stop(self) -> None:
        """Nothing is queued after this, and what was is forgotten."""
        await self._leave()
        self._queue.clear()
        self._queued_bytes = 0
        self._note_fill()

    async def batch(self, wait_s: float) -> list[Arrival]:
        """The next messages, without a gap between them and those before; empty if none came within `wait_s`.

        Errors: Gap; WentBack; LogLost; Unavailable.
        """
        await self._take_up_again()
        if not await self._reached(self._filled, wait_s):
            return []
        await self._reached(self._enough, BATCH_WAIT_S)
        arrivals: list[Arrival] = []
        size = 0
        while self._queue and len(arrivals) < BATCH_EVENTS_MAX:
            arrival = self._queue[0]
            size += len(arrival.raw)
            if arrival.stream_seq != self._taken_seq + 1 or (arrivals and size > BATCH_BYTES_MAX):
                break
            arrivals.append(self._queue.popleft())
            self._queued_bytes -= len(arrival.raw)
            self._taken_seq = arrival.stream_seq
        self._note_fill()
        if not arrivals:
            raise Gap(self._taken_seq + 1, self._queue[0].stream_seq - 1)
        return arrivals

    async def _reached(self, event: asyncio.Event, limit_s: float) -> bool:
        """Whether `event` is set within the limit. A tail that ended wakes the waiter; `_take_up_again` sees why."""
        if event.is_set() or self._failure is None:
            return event.is_set()
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait([waiting, self._failure], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return event.is_set()

    async def _take_up_again(self) -> None:
        """Follow again behind what is queued, if the tail ended for want of room and half of it is free."""
        if self._failure is None or not self._failure.done():
            return
        reason = self._failure.result()
        if not isinstance(reason, _Full):
            raise reason
        if len(self._queue) <= QUEUE_EVENTS_MAX // 2 and self._queued_bytes <= QUEUE_BYTES_MAX // 2:
            await self._leave()
            await self._follow(self._queued_seq)

    async def _follow(self, after_seq: int) -> None:
        self._tail = await self._log.tail(self._filters, after_seq, self._deliver)
        self._failure = asyncio.create_task(self._tail.failed(), name="feed")

    async def _leave(self) -> None:
        tail, failure = self._tail, self._failure
        self._tail = self._failure = None
        if tail is not None:
            await tail.stop()
        if failure is not None:
            failure.cancel()
            await asyncio.gather(failure, return_exceptions=True)

    def _deliver(self, subject: str, seq: int, raw: bytes) -> None:  # noqa: ARG002 - the shape of `Deliver`
        if seq <= self._queued_seq:
            if seq == self._taken_seq and self._known_digest and digest(raw) != self._known_digest:
                raise WentBack(f"message {seq} of the stream is not the one that was recorded")
            return
        if len(self._queue) >= QUEUE_EVENTS_MAX or self._queued_bytes >= QUEUE_BYTES_MAX:
            raise _Full
        # From here on the checkpoint's message is not the last taken one any more.
        self._known_digest = b""
        self._queue.append(Arrival(seq, raw))
        self._queued_bytes += len(raw)
        self._queued_seq = seq
        self._note_fill()

    def _note_fill(self) -> None:
        enough = len(self._queue) >= BATCH_EVENTS_MAX or self._queued_bytes >= BATCH_BYTES_MAX
        for event, holds in ((self._filled, bool(self._queue)), (self._enough, enough)):
            if holds:
                event.set()
            else:
                event.clear()
