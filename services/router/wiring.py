"""What everything that drives requests in this process shares."""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from services.router import decider
from services.router.admission import Books, idle_in_s
from services.router.calls import Call, Rejected
from services.router.claims import Claims
from services.router.decider import Moment, State
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings
from shared.contracts.envelope import Envelope, EventData
from shared.contracts.events import (
    LimitMet,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestRejected,
    RouterRegistered,
)
from shared.contracts.ids import RouterId, Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Origin
from shared.runtime.clock import Clock
from shared.runtime.outbox import STALLED_S, Outbox, OutboxFull
from shared.runtime.ports import Bus
from shared.runtime.projection import Projection

SETTLE_EVERY_S = 0.05


class Placed(NamedTuple):
    """A recorded assignment."""

    assigned: RequestAssigned
    event: Envelope


class _Owed(NamedTuple):
    """An end that the outbox had no room for."""

    call: Call
    end: RequestCompleted | RequestFailed | RequestCancelled
    cause: Placed | None


@dataclass(frozen=True, slots=True)
class Wiring:
    """One per process. `capacity_changed` returns when a worker may have become eligible."""

    settings: RouterSettings
    projection: Projection[State]
    outbox: Outbox
    bus: Bus
    claims: Claims
    subjects: Subjects
    clock: Clock
    router: RouterId
    source: Source
    metrics: RouterMetrics
    capacity_changed: Callable[[], Awaitable[None]]
    _owed: deque[_Owed] = field(default_factory=deque)

    @property
    def state(self) -> State:
        return self.projection.state

    def moment(self) -> Moment:
        """Now, for a decision on `state`."""
        return Moment(self.clock.now_ns(), self.projection.seen_seq)

    def registration(self) -> RouterRegistered:
        """What this process is, and what its decisions begin with."""
        return RouterRegistered(
            router=self.router,
            first_seq=self.projection.first_seq,
            kept_events=self.projection.kept_events,
            seen_seq=self.projection.seen_seq,
            coefficients=self.settings.cost_model().model_dump(),
        )

    def retry_after_s(self, full: Exception | None = None) -> int:
        """When a client that finds no place should ask again: when a worker is predicted to have room. Nothing is predicted of
        workers that are not there, nor of a log that is `full`."""
        state = self.state
        books = Books(state.usage, state.parameters, state.pool, state.loads)
        predicted_s = None if isinstance(full, OutboxFull) else idle_in_s(books, self.clock.now_ns())
        return predicted_s or decider.RETRY_AFTER_S

    def record(self, call: Call, facts: list[EventData], cause: Placed | None = None) -> list[Envelope]:
        """Record what was decided about `call`, whose last assignment was `cause`. Errors: OutboxFull."""
        causation = cause.event.id if cause else None
        return self.outbox.record(facts, Origin(call.request, causation, call.order.traceparent))

    def end(self, call: Call, end: RequestCompleted | RequestFailed | RequestCancelled, cause: Placed | None) -> None:
        """Record how it ended; nothing, if an end is recorded already. What the outbox has no room for now is recorded by
        `settle`: until then the request's reservation holds. At most as many wait as were open when the log stood still."""
        try:
            self.record(call, decider.end(self.state, end), cause)
        except OutboxFull:
            self._owed.append(_Owed(call, end, cause))

    def settle(self) -> None:
        """Record what waits, as far as there is room."""
        for _ in range(len(self._owed)):
            self.end(*self._owed.popleft())

    async def settled(self) -> None:
        """Record what waits before the process ends, for as long as its outbox will wait for the log then. What is left ends
        with `router-lost`."""
        until_ns = self.clock.monotonic_ns() + round(STALLED_S * 1e9)
        self.settle()
        while self._owed and self.clock.monotonic_ns() < until_ns:
            await self.clock.sleep(SETTLE_EVERY_S)
            self.settle()
        if self._owed:
            structlog.get_logger(component="dispatch").error("ends not recorded", requests=len(self._owed))


def rejection(rejected: RequestRejected) -> Rejected:
    """What a client is told of it."""
    wait_s = rejected.retry_after_s
    match rejected.reason:
        case "too-long":
            return Rejected("too-long", "the prompt fits on no worker")
        case "no-worker":
            return Rejected("no-worker", "no worker can take the request now", wait_s)
        case reason:
            assert rejected.limit is not None, "whoever meets a limit is told which"
            return Rejected(reason, _told(rejected.limit), wait_s)


def _told(met: LimitMet) -> str:
    """A limit in words; who else uses the pool, and how much of it, is nobody's business."""
    allowed, added = f"{met.allowed:,}", f"{met.added:,}"
    match met.name:
        case "requests":
            return f"{allowed} open requests are allowed at one time"
        case "tokens-per-minute":
            return f"{allowed} prompt tokens a minute are allowed, and this prompt has {added}"
        case "queued-tokens":
            return f"{allowed} prompt tokens may wait at one time, and this prompt has {added}"
        case "share-us":
            return "the share of the workers is used up"
        case "ttft-us":
            return (
                f"the first token is predicted after {(met.used + met.added) / 1e3:,.0f} ms, "
                f"beyond the hard objective of {met.allowed / 1e3:,.0f} ms"
            )
        case "held-us":
            return f"the request has waited {met.used / 1e6:.0f} s for a share of the workers"
