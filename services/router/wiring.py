"""What everything that drives requests in this process shares."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from services.router.calls import Call
from services.router.claims import Claims
from services.router.decider import Moment, State
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings
from shared.contracts.envelope import Envelope, EventData
from shared.contracts.events import RequestAssigned, RouterRegistered
from shared.contracts.ids import RouterId, Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Origin
from shared.runtime.clock import Clock
from shared.runtime.outbox import Outbox
from shared.runtime.ports import Bus
from shared.runtime.projection import Projection


class Placed(NamedTuple):
    """A recorded assignment."""

    assigned: RequestAssigned
    event: Envelope


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

    def record(self, call: Call, facts: list[EventData], cause: Placed | None = None) -> list[Envelope]:
        """Record what was decided about `call`, whose last assignment was `cause`. Errors: OutboxFull."""
        causation = cause.event.id if cause else None
        return self.outbox.record(facts, Origin(call.request, causation, call.order.traceparent))
