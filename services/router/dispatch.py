"""The router's open requests: admission, the first decision, and what the log says that concerns one of them."""

import asyncio

import structlog

from services.router import decider, offers
from services.router.calls import Call, NotReceived, Order, Slot, Unserved
from services.router.claims import BufferFull, Claims
from services.router.decider import Arrival, State
from services.router.driver import Driver
from services.router.frames import Broken, Frames
from services.router.handshake import ABORT_REASON
from services.router.metrics import RouterMetrics
from services.router.rebalancing import Rebalancer
from services.router.settings import RouterSettings
from services.router.waiting import WaitingRoom
from services.router.wiring import Placed, Wiring, rejection
from shared.contracts.commands import PROMPT_BLOCKS_MAX, RouterAlive, encode_message
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    ENDS,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    PrefillAborted,
    RequestAssigned,
    RequestHeld,
    RequestRedirected,
    RequestRejected,
    RouterLost,
)
from shared.contracts.ids import RequestId, RouterId
from shared.runtime.outbox import EVENTS_MAX, Outbox, OutboxFull
from shared.runtime.ports import Unavailable
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime

ALIVE_EVERY_S = 1.0

FREEING = (*decider.CAPACITY, *ENDS, RequestRedirected, ParametersChanged)
"""Events after which a tenant may have more of its share left, or a worker nothing to do."""

OUTBOX_SHARE_MAX = EVENTS_MAX // 2
"""Nothing is received while more events wait: the rest of the outbox is for the ends of what is open."""


class DeclaredLost(Exception):
    """The controller has ended this router's requests in every fold: what it did from now on would be nobody's."""


class Dispatcher:
    """Owns every open `Call` of the process. `start` it when the projection has caught up and the outbox runs."""

    def __init__(
        self,
        runtime: Runtime,
        settings: RouterSettings,
        projection: Projection[State],
        outbox: Outbox,
        metrics: RouterMetrics,
    ) -> None:
        self.router = RouterId(runtime.source)
        self.draining = self._closed = False
        self._settings = settings
        self._metrics = metrics
        self._frames = Frames(runtime.bulk, runtime.subjects, self.router)
        self._claims = Claims(runtime.bulk, runtime.subjects, self.router, settings.token_buffer_bytes_max)
        self._calls: dict[RequestId, Call] = {}
        self._admitted = 0
        self._ended = asyncio.Event()
        self._capacity = asyncio.Event()
        self._lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._heart: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger(component="dispatch")
        self._wiring = Wiring(
            settings=settings,
            projection=projection,
            outbox=outbox,
            bus=runtime.bus,
            claims=self._claims,
            subjects=runtime.subjects,
            clock=runtime.clock,
            router=self.router,
            source=runtime.source,
            metrics=metrics,
            capacity_changed=self._capacity_changed,
        )
        self._rebalancer = Rebalancer(self._wiring, self._calls)
        self._waiting = WaitingRoom(self._wiring)
        metrics.watch("held_requests", "Requests that wait for their tenant's turn", lambda: len(self._waiting))
        metrics.watch("open_requests", "Requests between admission and end", lambda: self._admitted)
        metrics.watch("mispriced_nodes", "Nodes with other coefficients", lambda: offers.mispriced_nodes(self.state))
        metrics.watch("held_prompt_bytes", "Prompts held for agents to claim", lambda: self._claims.held_bytes)

    @property
    def open_requests(self) -> int:
        return self._admitted

    @property
    def state(self) -> State:
        return self._wiring.state

    def not_ready(self) -> str | None:
        """Why clients should be sent elsewhere."""
        if self.draining:
            return "draining"
        if not self._wiring.outbox.ready:
            return "the event log does not keep up"
        return None if offers.schedulable_workers(self.state) else "no schedulable worker"

    async def start(self) -> None:
        """Be known and alive. Errors: Unavailable."""
        await self._frames.start()
        await self._claims.start()
        self._wiring.projection.listen(self._hear)
        self._wiring.outbox.record([self._wiring.registration()])
        self._heart = asyncio.create_task(self._beat(), name="heartbeat")

    async def failed(self) -> Exception:
        """Returns when this router was declared lost: the process must end."""
        return await asyncio.shield(self._lost)

    async def drain(self) -> None:
        """Take nothing new, let open requests end for up to `drain_s`, fail the rest."""
        self.draining = True
        try:
            async with asyncio.timeout(self._settings.drain_s):
                while self._admitted:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            self._logger.warning("streams cut off", open_requests=self._admitted, drain_s=self._settings.drain_s)
        self._closed = True
        for call in self._calls.values():
            call.shut_down = True
            call.leave()
        if drivers := [call.driver for call in self._calls.values() if call.driver is not None]:
            await asyncio.wait(drivers)
        await self._wiring.settled()
        if self._heart is not None:
            self._heart.cancel()

    def enter(self) -> Slot:
        """A place for one more request; give it to `submit`, or release it. Errors: NotReceived."""
        wiring, opened = self._wiring, self._admitted
        if self.draining:
            raise NotReceived("shutdown", "the router is shutting down", 1)
        if opened >= self._settings.open_requests_max:
            raise NotReceived("overloaded", f"{opened} requests are open, which is the limit", wiring.retry_after_s())
        if not wiring.outbox.ready or wiring.outbox.events > OUTBOX_SHARE_MAX:
            raise NotReceived("overloaded", "the event log does not keep up", decider.RETRY_AFTER_S)
        self._admitted += 1
        return Slot(self._leave)

    async def submit(self, order: Order, slot: Slot) -> Call:
        """Receive and place a request. From then on it is driven to its end, which releases the slot.

        Errors: NotReceived; Unserved if it was received and rejected.
        """
        facts = await self.decide(self._arrival(order))
        if self._closed:
            raise NotReceived("shutdown", "the router is shutting down", 1)
        call = Call(order, self._frames.open(order.request), slot)
        try:
            self._claims.hold(order.request, 1, order.tokens)
            events = self._wiring.record(call, facts)
        except (BufferFull, OutboxFull) as full:
            self._drop(order.request)
            raise NotReceived("overloaded", str(full), self._wiring.retry_after_s(full)) from full
        match events[-1].data:
            case RequestAssigned() as assigned:
                self._drive(call, Placed(assigned, events[-1]))
                return call
            case RequestHeld():
                self._drive(call, self._waiting.enter(call))
                self._waiting.look()
                return call
            case RequestRejected() as rejected:
                self._drop(order.request)
                self._metrics.ended.labels("rejected").inc()
                raise rejection(rejected)
            case other:
                raise AssertionError(f"a received request is assigned or rejected, not {other.TYPE}")

    def _drive(self, call: Call, first: "Placed | asyncio.Future[Placed]") -> None:
        self._calls[call.request] = call
        driver = Driver(self._wiring, call, first)
        call.driver = asyncio.create_task(driver.run(), name=f"request {call.request}")
        call.driver.add_done_callback(lambda task: self._forget(call, driver, task))

    def _arrival(self, order: Order) -> Arrival:
        return Arrival(
            request=order.request,
            tenant=order.tenant,
            model=order.model,
            prompt_tokens=order.prompt_tokens,
            max_tokens=order.max_tokens,
            slo_us=order.slo_us,
            stream=order.stream,
            chain=order.chain,
            client_digest=order.client_digest,
            hard_slo=order.hard_slo,
            priority=order.priority,
        )

    async def decide(self, arrival: Arrival) -> list[EventData]:
        """The decision that is to be recorded; asked for again, for a bounded time, while there is no worker. Errors:
        NotReceived for a prompt that no message could hand over."""
        if len(arrival.chain) > PROMPT_BLOCKS_MAX:
            raise NotReceived("too-long", f"the prompt has {len(arrival.chain)} blocks; {PROMPT_BLOCKS_MAX} at most")
        try:
            async with asyncio.timeout(self._settings.no_worker_wait_s):
                while True:
                    facts = self._receive(arrival)
                    match facts[-1]:
                        case RequestRejected(reason="no-worker"):
                            await self._capacity_changed()
                        case _:
                            return facts
        except TimeoutError:
            return self._receive(arrival)

    def _receive(self, arrival: Arrival) -> list[EventData]:
        began_ns = self._wiring.clock.monotonic_ns()
        facts = decider.receive(self.state, arrival, self._wiring.moment())
        self._metrics.decision_s.observe((self._wiring.clock.monotonic_ns() - began_ns) / 1e9)
        return facts

    def _forget(self, call: Call, driver: Driver, task: "asyncio.Task[None]") -> None:
        if task.cancelled() and not call.is_closed:
            driver.call_off()
        if not call.is_closed:
            self._logger.error("request without an end", request=call.request, error=repr(task.exception()))
            call.close(Unserved("internal", "an internal error; the log has the details"))
        call.slot.release()
        self._calls.pop(call.request, None)
        self._waiting.leave(call.request)
        self._drop(call.request)

    def _leave(self) -> None:
        self._admitted -= 1
        self._ended.set()

    def _drop(self, request: RequestId) -> None:
        self._frames.close(request)
        self._claims.drop(request)

    # --- what the log says

    def _hear(self, stored: Stored) -> None:
        match stored.data:
            case PrefillAborted() as data:
                if call := self._calls.get(data.request):
                    call.inbox.put(Broken(data.attempt, ABORT_REASON.get(data.reason, "aborted")))
            case NodeLost() | NodeDeclaredLost() | NodeRegistered():
                self._break_voided()
            case RouterLost() as data if data.source == self._wiring.source and not self._lost.done():
                self._lost.set_result(DeclaredLost(f"the controller declared {data.source} lost"))
                self._give_up()
            case _:
                pass
        self._rebalancer.hear(stored)
        if isinstance(stored.data, FREEING):
            self._waiting.look()
        if isinstance(stored.data, decider.CAPACITY):
            self._capacity.set()
            self._capacity = asyncio.Event()

    def _break_voided(self) -> None:
        """The fold has voided the assignments on a node that ended: take those requests elsewhere."""
        for request, call in self._calls.items():
            opened = self.state.loads.open.get(request)
            if opened is not None and opened.worker is not None and opened.assignment is None:
                call.inbox.put(Broken(opened.attempt, "node-lost"))

    def _give_up(self) -> None:
        """What was open has ended in every fold: tell the clients, before the process ends, that they may ask again."""
        self.draining = self._closed = True
        for call in self._calls.values():
            if not call.is_closed:
                call.close(Unserved("shutdown", "this router was declared lost; ask again", 1))

    async def _capacity_changed(self) -> None:
        await self._capacity.wait()

    async def _beat(self) -> None:
        while True:
            alive = RouterAlive(router=self.router, source=self._wiring.source, open_requests=self._admitted)
            try:
                await self._wiring.bus.publish(self._wiring.subjects.alive(self.router), encode_message(alive))
            except Unavailable as error:
                self._logger.warning("heartbeat not sent", error=str(error))
            self._wiring.settle()
            self._rebalancer.look()
            self._waiting.expire()
            self._waiting.look()
            await self._wiring.clock.sleep(ALIVE_EVERY_S)
