"""Sagas under way: asks agents for what the step needs, and decides the next one as soon as the log allows it.

The log wakes it, for a drained worker stands idle until its switch; the controller's tick wakes it too, for limits pass without
an event. An order that the agent has taken is not repeated in the same term; one that got no answer is, at the next look. A
refused one ends the saga at once: the agent has gone back by itself.
"""

import asyncio
from functools import partial
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from services.controller import saga as saga_model
from services.controller.capacity import CapacityOf
from services.controller.decider import State
from services.controller.saga import SWITCHING_S_MAX, Step
from shared.contracts.commands import Adopt, Drain, Refused, decode_reply, encode_message
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    DrainCompleted,
    PlacementReconciled,
    RankAdoptedEpoch,
    ReconfigurationPlanned,
)
from shared.contracts.ids import NodeId
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Origin
from shared.runtime.clock import Clock
from shared.runtime.leadership import Leadership, NotLeading
from shared.runtime.ports import Bus, NoReply, Unavailable

DETAIL_MAX = 200
"""Characters of an agent's refusal that an abort quotes."""

STEPS = (ReconfigurationPlanned, DrainCompleted, RankAdoptedEpoch, PlacementReconciled)
"""After these there may be something to do at once."""


class Order(NamedTuple):
    """One step of one saga in one term: what an agent is asked for once."""

    node: NodeId
    epoch: int
    step: Step
    term: int


class SagaDriver:
    """`state` is the projection's. `wake` it at each tick; `run` until cancelled."""

    def __init__(
        self,
        state: State,
        leadership: Leadership,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        capacity_of: CapacityOf,
    ) -> None:
        self._state = state
        self._leadership = leadership
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._capacity_of = capacity_of
        self._woken = asyncio.Event()
        self._asked: set[Order] = set()
        self._refusals: dict[Order, str] = {}
        self._logger = structlog.get_logger(component="driving")

    def wake(self) -> None:
        """Look at every open saga."""
        self._woken.set()

    def folded(self, stored: Stored) -> None:
        """Wake up for what may let a saga go on."""
        if isinstance(stored.data, STEPS):
            self.wake()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._woken.wait()
                self._woken.clear()
                await self._look(tasks)

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        for node in sorted(self._state.sagas.open):
            try:
                await self._leadership.decide(partial(self._advance, node), self._origin(node))
            except NotLeading as error:
                self._logger.info("not decided", node=node, reason=str(error))
                return
            self._order(node, tasks)
        standing = {(node, saga.plan.epoch, saga.step) for node, saga in self._state.sagas.open.items()}
        self._asked = {each for each in self._asked if each[:3] in standing}
        self._refusals = {each: detail for each, detail in self._refusals.items() if each[:3] in standing}

    def _advance(self, node: NodeId) -> list[EventData]:
        saga, term = self._state.sagas.open.get(node), self._leadership.term
        if saga is None or term is None:
            return []
        refusal = self._refusals.get(Order(node, saga.plan.epoch, saga.step, term))
        now_ns = self._clock.now_ns()
        return saga_model.advance(saga, self._state.parameters, self._capacity_of, now_ns, refusal)

    def _order(self, node: NodeId, tasks: asyncio.TaskGroup) -> None:
        """Ask the agent for what the step needs, once."""
        saga, term = self._state.sagas.open.get(node), self._leadership.term
        if saga is None or term is None:
            return
        order = Order(node, saga.plan.epoch, saga.step, term)
        command = saga_model.orders(saga, self._state.parameters, term)
        if command is not None and order not in self._asked:
            self._asked.add(order)
            tasks.create_task(self._ask(order, command), name=f"{order.step}-{node}")

    async def _ask(self, order: Order, command: Drain | Adopt) -> None:
        try:
            raw = await self._bus.request(self._subjects.agent(order.node), encode_message(command), SWITCHING_S_MAX)
            reply = decode_reply(raw)
        except (NoReply, Unavailable, ValidationError) as error:
            self._logger.warning("no answer", **order._asdict(), error=str(error))
            self._asked.discard(order)
            return
        if not isinstance(reply, Refused):
            return
        self._logger.warning("refused", **order._asdict(), reason=reply.reason, detail=reply.detail)
        if reply.reason != "stale-term":
            # A stale term is no word about the node: another process leads, and decides.
            self._refusals[order] = f"{reply.reason}: {reply.detail}"[:DETAIL_MAX].rstrip(": ")
            self.wake()

    def _origin(self, node: NodeId) -> Origin:
        saga = self._state.sagas.open.get(node)
        return Origin(correlation=f"{node}/{saga.plan.epoch}" if saga else None)
