"""Facts of one's own: a router's assignments, an agent's prefills.

`record` is one synchronous call: fold into one's own state, enqueue for publication. The next decision sees this one, whatever
the network does. One task publishes in `source_seq` order: few events one after the other, many in atomic batches. An effect
that must not precede its record (a command to an agent, an answer to a client) waits for `stored`.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import structlog

from shared.contracts.envelope import Envelope, EventData
from shared.runtime.appending import NO_ORIGIN, Origin, Sealer, append_once, last_sequence
from shared.runtime.clock import Clock
from shared.runtime.ports import Entry
from shared.runtime.projection import Projection

EVENTS_MAX = 10_000
BYTES_MAX = 128 * 2**20
BATCH_EVENTS_MAX = 100
BATCH_BYTES_MAX = 4_000_000
ONE_BY_ONE_MAX = 4
"""So few events go one after the other: NATS takes 4 ms for a batch of any size, 0.5 to 1.3 ms for one event (ADR 40)."""

STALLED_S = 2.0
"""An outbox whose oldest event has waited longer makes the service unready."""


class OutboxFull(Exception):
    """10,000 events or 128 MiB of them wait for the log: the service must refuse new work."""


class _Waiting(NamedTuple):
    entry: Entry
    since_ns: int
    stored: "asyncio.Future[int]"


class Outbox:
    """One per process. Its source is the only writer of its subjects; a second one ends this process with Fenced."""

    def __init__(self, projection: Projection[Any], sealer: Sealer, clock: Clock) -> None:
        self._projection = projection
        self._log = projection.log
        self._sealer = sealer
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._filled = asyncio.Event()
        self._last_on: dict[str, int] = {}
        self._publisher: asyncio.Task[None] | None = None
        self._by_id: dict[UUID, asyncio.Future[int]] = {}
        self._bytes = 0
        self._failure: asyncio.Future[Exception] | None = None
        self._logger = structlog.get_logger(component="outbox")
        projection.own_recorded = sealer.identity.source

    async def start(self) -> None:
        """Begin to publish. The projection must have caught up, so that older processes' events are known."""
        self._failure = asyncio.get_running_loop().create_future()
        self._publisher = asyncio.create_task(self._publish_forever(self._failure), name="outbox")

    async def stop(self) -> None:
        """Publish what waits, for up to 2 s."""
        assert self._publisher is not None, "stop() before start()"
        if self._waiting:
            last: list[asyncio.Future[Any]] = [self._waiting[-1].stored, self._publisher]
            await asyncio.wait(last, timeout=STALLED_S, return_when=asyncio.FIRST_COMPLETED)
        if self._waiting:
            self._logger.error("events not published", events=len(self._waiting))
        self._publisher.cancel()
        await asyncio.gather(self._publisher, return_exceptions=True)

    async def failed(self) -> Exception:
        """Returns when publication has ended for good (Fenced, LogLost): the process must end. Never after `stop`."""
        assert self._failure is not None, "failed() before start()"
        return await asyncio.shield(self._failure)

    @property
    def ready(self) -> bool:
        """False while the outbox is full or its oldest event has waited over 2 s."""
        if not self._waiting:
            return True
        waited_s = (self._clock.monotonic_ns() - self._waiting[0].since_ns) / 1e9
        return waited_s < STALLED_S and len(self._waiting) < EVENTS_MAX and self._bytes < BYTES_MAX

    @property
    def events(self) -> int:
        """How many recorded events the log has not acknowledged."""
        return len(self._waiting)

    def record(self, facts: Sequence[EventData], origin: Origin = NO_ORIGIN) -> list[Envelope]:
        """Fold `facts` now, publish them in order; none is fine. Errors: OutboxFull, BadEvent; nothing is folded or published
        then."""
        if not facts:
            return []
        if len(self._waiting) + len(facts) > EVENTS_MAX or self._bytes >= BYTES_MAX:
            raise OutboxFull(
                f"{len(self._waiting)} events, {self._bytes} bytes wait for the log; at most {EVENTS_MAX}, {BYTES_MAX} may"
            )
        loop = asyncio.get_running_loop()
        now_ns = self._clock.monotonic_ns()
        envelopes = []
        for envelope, entry in self._sealer.seal(facts, origin):
            waiting = _Waiting(entry, now_ns, loop.create_future())
            self._waiting.append(waiting)
            self._bytes += len(entry.payload)
            self._by_id[envelope.id] = waiting.stored
            self._projection.fold_own(envelope, entry.payload)
            envelopes.append(envelope)
        self._filled.set()
        return envelopes

    async def stored(self, envelope: Envelope) -> None:
        """Returns when the log has acknowledged a recorded event."""
        if (future := self._by_id.get(envelope.id)) is not None:
            await asyncio.shield(future)

    async def _publish_forever(self, failure: "asyncio.Future[Exception]") -> None:
        try:
            while True:
                await self._filled.wait()
                await self._publish(self._next_batch())
                if not self._waiting:
                    self._filled.clear()
        except Exception as error:  # noqa: BLE001 - handed to failed(), which ends the process
            failure.set_result(error)

    async def _publish(self, batch: Sequence[Entry]) -> None:
        expected = {subject: await self._last(subject) for subject in {entry.subject for entry in batch}}
        last = await append_once(self._log, batch, expected, self._clock)
        for seq, entry in enumerate(batch, last - len(batch) + 1):
            self._last_on[entry.subject] = seq
            self._by_id.pop(entry.id).set_result(seq)
            self._waiting.popleft()
            self._bytes -= len(entry.payload)

    def _next_batch(self) -> list[Entry]:
        """What is appended next. Two facts of one `record` may so be apart in the log: whoever dies between them has all that
        it left open ended, like anybody who dies behind the first."""
        if len(self._waiting) <= ONE_BY_ONE_MAX:
            return [self._waiting[0].entry]
        batch: list[Entry] = []
        size = 0
        for waiting in self._waiting:
            size += len(waiting.entry.payload)
            if batch and (len(batch) == BATCH_EVENTS_MAX or size > BATCH_BYTES_MAX):
                break
            batch.append(waiting.entry)
        return batch

    async def _last(self, subject: str) -> int:
        if subject not in self._last_on:
            self._last_on[subject] = await last_sequence(self._log, subject, self._clock)
        return self._last_on[subject]
