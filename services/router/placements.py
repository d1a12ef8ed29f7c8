"""Placements without a request behind them: another gateway asks where, sends its request there itself, and says how it went.

A placement is a request in every fold: `request-received` (marked `placed_only`), `request-assigned`, one end. It reserves
what any request of its size would until it is

    completed → request-completed        cancelled → request-cancelled
    not reported in time, or this router ends → request-failed (`unreported`, `shutdown`)

so that reservations return to zero however the gateway fares. `started` only gives it more time. The agents are told
nothing, and a placement is never moved: where the request runs is the gateway's affair.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

import structlog

from services.router import decider
from services.router.calls import NotReceived, Slot
from services.router.decider import Arrival
from services.router.dispatch import Dispatcher
from services.router.metrics import RouterMetrics
from services.router.openai import BadRequest, as_sent
from services.router.settings import RouterSettings
from services.router.wiring import Placed, rejection
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestRejected,
)
from shared.contracts.ids import RequestId
from shared.runtime.appending import Origin
from shared.runtime.clock import Clock
from shared.runtime.outbox import Outbox, OutboxFull

SWEEP_EVERY_S = 1.0
"""How far a placement that nobody reports outlives its time."""


@dataclass(slots=True)
class OpenPlacement:
    """One that has no end yet; `until_ns` is monotonic."""

    placed: Placed
    traceparent: str | None
    slot: Slot
    until_ns: int


class Placements:
    """Owns the open placements of the process. They count as open requests."""

    def __init__(
        self, dispatcher: Dispatcher, outbox: Outbox, settings: RouterSettings, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._open: dict[RequestId, OpenPlacement] = {}
        self._stopped = False
        self._sweeper: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger(component="placements")

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="placements")

    def stop(self) -> None:
        """End what is open: nobody could report to this process any longer."""
        self._stopped = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for request in list(self._open):
            self._fail(request, "shutdown")

    async def place(self, arrival: Arrival, traceparent: str | None, slot: Slot) -> Placed:
        """Decide, reserve and record; returns when the log has it. The slot is released at the placement's end, or at once if
        it comes to none.

        Errors: NotReceived; Unserved if it was received and rejected.
        """
        try:
            placed = self._record(await self._dispatcher.decide(arrival), arrival, traceparent)
        except BaseException:
            slot.release()
            raise
        until_ns = self._after(self._settings.placement_start_s)
        self._open[arrival.request] = OpenPlacement(placed, traceparent, slot, until_ns)
        await self._outbox.stored(placed.event)
        return placed

    def find(self, request: RequestId) -> Placed:
        """Errors: BadRequest (404) if it has ended, or was another router's."""
        if (found := self._open.get(request)) is None:
            raise BadRequest(
                f"no placement {as_sent(request)} is open at this router", "id", "placement_not_found", status=404
            )
        return found.placed

    def started(self, request: RequestId) -> None:
        """Its work has begun: it may take its time. Errors: BadRequest (404)."""
        self.find(request)
        self._open[request].until_ns = self._after(self._settings.placement_end_s)

    def end(self, fact: RequestCompleted | RequestCancelled | RequestFailed) -> None:
        """Record the one end and free what was reserved. Errors: BadRequest (404), NotReceived."""
        self.find(fact.request)
        found = self._open[fact.request]
        origin = Origin(fact.request, found.placed.event.id, found.traceparent)
        try:
            self._outbox.record(decider.end(self._dispatcher.state, fact), origin)
        except OutboxFull as full:
            raise NotReceived("overloaded", str(full), decider.RETRY_AFTER_S) from full
        del self._open[fact.request]
        found.slot.release()
        self._metrics.ended.labels(fact.TYPE.removeprefix("request-")).inc()

    def _record(self, facts: list[EventData], arrival: Arrival, traceparent: str | None) -> Placed:
        """Errors: NotReceived, Unserved."""
        if self._stopped:
            raise NotReceived("shutdown", "the router is shutting down", 1)
        try:
            events = self._outbox.record(facts, Origin(arrival.request, None, traceparent))
        except OutboxFull as full:
            raise NotReceived("overloaded", str(full), decider.RETRY_AFTER_S) from full
        match events[-1].data:
            case RequestAssigned() as assigned:
                return Placed(assigned, events[-1])
            case RequestRejected() as rejected:
                self._metrics.ended.labels("rejected").inc()
                raise rejection(rejected)
            case other:
                raise AssertionError(f"a received request is assigned or rejected, not {other.TYPE}")

    def _after(self, seconds: float) -> int:
        return self._clock.monotonic_ns() + round(seconds * 1e9)

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_EVERY_S)
            now_ns = self._clock.monotonic_ns()
            for request in [each for each, found in self._open.items() if found.until_ns <= now_ns]:
                self._fail(request, "unreported")

    def _fail(self, request: RequestId, reason: Literal["unreported", "shutdown"]) -> None:
        try:
            self.end(RequestFailed(request=request, reason=reason))
        except NotReceived as full:
            self._logger.warning("end not recorded yet", request=request, error=str(full))
            return
        self._logger.info("placement ended", request=request, reason=reason)
