"""The controller at work: listens for heartbeats, decides four times a second while it leads, asks agents to adopt.

After each window the policy decides; a plan that comes of it is `driving.py`'s business, as an operator's is.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from services.controller import decider, epochs, forecasting, reconfiguring
from services.controller.capacity import Capacity, capacity
from services.controller.decider import Incarnation, State
from services.controller.driving import SagaDriver
from services.controller.epochs import Configured, Wanted
from services.controller.forecaster import Forecasts
from services.controller.forecasting import Asked
from services.controller.liveness import Liveness
from services.controller.metrics import Metrics
from shared.contracts.commands import (
    Accepted,
    NodeLoad,
    Refused,
    RouterAlive,
    decode_reply,
    encode_message,
)
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import WindowClosed
from shared.contracts.ids import NodeId, Source
from shared.contracts.subjects import Subjects
from shared.model.capacity import Capacities
from shared.model.cost import US_PER_S, Coefficients
from shared.runtime.appending import NO_ORIGIN, Origin
from shared.runtime.background import Background
from shared.runtime.clock import Clock
from shared.runtime.leadership import Decide, Leadership, NotLeading
from shared.runtime.ports import APPEND_ENTRIES_MAX, Bus, NoReply, Unavailable

TICK_S = 0.25

LATE_NS = 1_500_000_000
"""A tick that comes this late says that the process stood still and heard nothing."""

ADOPT_LIMIT_S = 15.0
"""An agent answers when every rank has adopted, which waits for running steps."""

ADOPT_RETRY_NS = 1_000_000_000


class Epochs(NamedTuple):
    """How first epochs are made: compositions, and κ_C as profiled or, for other degrees, as a share of the window."""

    configured: Configured
    capacity_share: float
    profiled: Capacities


class Refusal(NamedTuple):
    """Why one life of a node does not serve an epoch."""

    incarnation: int
    epoch: int
    reason: str


class Controller:
    """`state` is the projection's; only the log changes it."""

    def __init__(
        self,
        state: State,
        leadership: Leadership,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        first_epochs: Epochs,
        metrics: Metrics,
        forecasts: Forecasts,
    ) -> None:
        self.state = state
        self.leadership = leadership
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._first_epochs = first_epochs
        self._metrics = metrics
        self._forecasts = forecasts
        self._ticked_ns = clock.monotonic_ns()
        self._nodes: Liveness[Incarnation] = Liveness(self._ticked_ns)
        self._routers: Liveness[Source] = Liveness(self._ticked_ns)
        self._forecasting = False
        self._adopting: set[NodeId] = set()
        self._adopt_after_ns: dict[NodeId, int] = {}
        self._refusals: dict[NodeId, Refusal] = {}
        """The last one of each node, which has been told."""
        self._refused: dict[Incarnation, int] = {}
        self._driver = SagaDriver(state, leadership, bus, subjects, clock, self._capacity)
        self._work = Background("controller")
        self._logger = structlog.get_logger(component="controller")

    async def start(self) -> None:
        """Listen and decide. The projection must have caught up."""
        await self._bus.subscribe(self._subjects.loads, self._heard_node)
        await self._bus.subscribe(self._subjects.routers_alive, self._heard_router)
        self._work.start(self._run())

    async def stop(self) -> None:
        """Decide nothing more."""
        await self._work.stop()
        await self.leadership.stop()

    async def failed(self) -> Exception:
        """Returns when the controller can go on no longer: the process must end."""
        return await self._work.failed()

    def ready(self) -> str | None:
        """Why this process is of no use now, leader or standby."""
        return self.leadership.trouble(self.state.term)

    def folded(self, stored: Stored) -> None:
        """Show what is recorded, whoever leads, and go on with sagas."""
        self._metrics.show(stored.data)
        self._driver.folded(stored)

    async def _heard_node(self, _subject: str, payload: bytes) -> None:
        try:
            load = NodeLoad.model_validate_json(payload)
        except ValidationError:
            self._metrics.unreadable.inc()
            return
        self._nodes.heard(Incarnation(load.node, load.incarnation), self._clock.monotonic_ns())

    async def _heard_router(self, _subject: str, payload: bytes) -> None:
        try:
            alive = RouterAlive.model_validate_json(payload)
        except ValidationError:
            self._metrics.unreadable.inc()
            return
        self._routers.heard(Source(alive.source), self._clock.monotonic_ns())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._driver.run(), name="driver")
            while True:
                await self._tick(tasks)
                await self._clock.sleep(TICK_S)

    async def _tick(self, tasks: asyncio.TaskGroup) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._ticked_ns > LATE_NS or not self.leadership.in_touch:
            self._nodes.was_deaf(now_ns)
            self._routers.was_deaf(now_ns)
        self._ticked_ns = now_ns
        silent_nodes = self._nodes.silent(decider.living_nodes(self.state), now_ns)
        silent_routers = self._routers.silent(self.state.routers.keys(), now_ns)
        self._metrics.term.set(self.leadership.term or 0)
        if self.leadership.term is None:
            return
        decided = await self._decide(
            lambda: [
                *decider.close_window(self.state, self._clock.now_ns()),
                *decider.lose_nodes(self.state, {node: ns // 1_000 for node, ns in silent_nodes.items()}),
                *decider.lose_routers(self.state, silent_routers.keys()),
            ][:APPEND_ENTRIES_MAX]  # what is left is decided at the next tick
        )
        if any(isinstance(each, WindowClosed) for each in decided):
            await self._decide(lambda: decider.refit(self.state))
            await self._decide(lambda: reconfiguring.decide(self.state, self._capacity))
            # One at a time: where answers take longer than windows, questions would queue up, each too old when answered.
            if not self._forecasting and (asked := forecasting.ask(self.state, self._coefficients)) is not None:
                self._forecasting = True
                tasks.create_task(self._forecast(asked), name="forecast")
        self._driver.wake()
        for each in epochs.wanted(self.state, self._first_epochs.configured, self._refused):
            self._consider(each, now_ns, tasks)

    async def _forecast(self, asked: Asked) -> None:
        """Have it answered, record the answer, do what it calls for. No answer is no move: the next window asks again."""
        try:
            scores = await self._forecasts.scorer.scores(asked.question)
        finally:
            self._forecasting = False
        if scores is not None and await self._decide(lambda: forecasting.made(self.state, asked, scores)):
            await self._decide(lambda: reconfiguring.decide(self.state, self._capacity))

    async def _decide(self, decide: Decide, origin: Origin = NO_ORIGIN) -> Sequence[EventData]:
        """What was stored."""
        try:
            return await self.leadership.decide(decide, origin)
        except NotLeading as error:
            # Whoever leads now decides it from the same log.
            self._logger.info("not decided", reason=str(error))
            return ()

    def _consider(self, each: Wanted, now_ns: int, tasks: asyncio.TaskGroup) -> None:
        """Ask the node to adopt, unless that is under way, was tried just now, or cannot be."""
        if each.misfit:
            if self._refusals.get(each.node) != Refusal(each.incarnation, each.epoch, "misfit"):
                self._refuse(each, "misfit", each.misfit)
        elif each.node not in self._adopting and now_ns >= self._adopt_after_ns.get(each.node, 0):
            self._adopting.add(each.node)
            tasks.create_task(self._adopt(each), name=f"adopt-{each.node}")

    async def _adopt(self, each: Wanted) -> None:
        try:
            await self._ask_to_adopt(each)
        finally:
            self._adopting.discard(each.node)
            self._adopt_after_ns[each.node] = self._clock.monotonic_ns() + ADOPT_RETRY_NS

    async def _ask_to_adopt(self, each: Wanted) -> None:
        term = self.leadership.term
        if term is None:
            return
        try:
            command = encode_message(each.adopt(term))
            raw = await self._bus.request(self._subjects.agent(each.node), command, ADOPT_LIMIT_S)
            reply = decode_reply(raw)
        except (NoReply, Unavailable, ValidationError) as error:
            self._refuse(each, "no-reply", str(error))
            return
        if isinstance(reply, Accepted):
            origin = Origin(correlation=f"{each.node}/{each.epoch}")
            await self._decide(lambda: epochs.commit(self.state, each, self._capacity), origin)
        elif isinstance(reply, Refused):
            self._refuse(each, reply.reason, reply.detail)
            if reply.reason == "stale-epoch":
                self._refused = {i: epoch for i, epoch in self._refused.items() if i.node != each.node}
                self._refused[Incarnation(each.node, each.incarnation)] = each.epoch

    def _refuse(self, each: Wanted, reason: str, detail: str) -> None:
        """Count each refusal; log it when it is another one than last time."""
        self._metrics.refusals.labels(each.node, reason).inc()
        refusal = Refusal(each.incarnation, each.epoch, reason)
        if self._refusals.get(each.node) == refusal:
            return
        self._refusals[each.node] = refusal
        self._logger.warning(
            "epoch not adopted",
            node=each.node,
            incarnation=each.incarnation,
            epoch=each.epoch,
            reason=reason,
            detail=detail,
        )

    @property
    def _coefficients(self) -> Coefficients:
        """What routers price by, once one has said so."""
        return self.state.evidence.current or self._forecasts.coefficients

    def _capacity(self, degree: int) -> Capacity:
        window_us = self.state.parameters.window_s * US_PER_S
        return capacity(self._first_epochs.profiled, self._first_epochs.capacity_share, window_us, degree)
