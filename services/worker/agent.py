"""A node's agent: it follows the log, answers commands, and gives its node one engine life after another.

It starts work from commands alone, never from the log; from the log it learns what was committed, aborted, and who is lost.
"""

import asyncio
from collections.abc import Callable
from typing import assert_never

import structlog

from services.worker.copying import Copying
from services.worker.decider import State
from services.worker.engine.protocol import Engine, EngineError
from services.worker.incarnation import Incarnation
from services.worker.ports import NodePorts
from services.worker.switching import Switching
from shared.contracts.commands import (
    Accepted,
    Adopt,
    Assign,
    BadCommand,
    Cancel,
    Command,
    Drain,
    NodeLoad,
    Refused,
    Release,
    Released,
    Renew,
    Reply,
    Report,
    TakeOver,
    decode_command,
    encode_message,
)
from shared.contracts.copy_commands import (
    Copy,
    Evict,
    Pin,
    Unpin,
)
from shared.contracts.envelope import Stored
from shared.contracts.events import EpochAborted, EpochCommitted, NodeDeclaredLost, NodeRegistered, RouterLost
from shared.runtime.appending import Fenced
from shared.runtime.ports import Unavailable
from shared.runtime.projection import Projection

HEARTBEAT_S = 1.0
RESTART_WAITS_S = (0.0, 0.0, 1.0, 5.0, 15.0, 30.0)
"""Before the first life, after the first death, …: ever later while engines keep dying young."""

LONG_LIFE_S = 60.0
"""An engine that has lived this long starts the waits over."""


class NodeAgent:
    """`start`, then `failed` returns only if it cannot go on; `stop` for an orderly end."""

    def __init__(self, ports: NodePorts, projection: Projection[State], make_engine: Callable[[], Engine]) -> None:
        self._ports = ports
        self.projection = projection
        self._make_engine = make_engine
        self._life: tuple[Incarnation, Switching, Copying] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._why_not = "the engine is starting"
        self._replaced: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._logger = structlog.get_logger(component="agent", node=ports.node)

    async def start(self) -> None:
        """Fold the log, take commands, begin the first life. Errors: Unavailable; TimeoutError if the log is silent."""
        await self.projection.start()
        await self._ports.outbox.start()
        self.projection.listen(self._learn)
        await self._ports.bus.subscribe(self._ports.subjects.agent(self._ports.node), self._handle)
        self._ports.metrics.watch(self._ports.node, lambda: len(self._ports.state.desk), lambda: self.unstored_events)
        self._tasks = [asyncio.create_task(self._lives(), name="lives"), asyncio.create_task(self._beat(), name="beat")]

    async def failed(self) -> Exception:
        """Returns when the log can be followed or written no longer, or a belief was broken: the process must end."""
        waits = [
            asyncio.ensure_future(self.projection.failed()),
            asyncio.ensure_future(self._ports.outbox.failed()),
            asyncio.ensure_future(self._first_error()),
            asyncio.shield(self._replaced),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return done.pop().result()

    async def _first_error(self) -> Exception:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        return error if isinstance(error, Exception) else RuntimeError(f"the agent of {self._ports.node} ended")

    async def stop(self, limit_s: float) -> None:
        """Refuse new work, let what runs end for up to `limit_s`, say that the node is gone."""
        self._stopping = True
        lives, beat = self._tasks
        if self._life is not None and self._life[0].serving:
            await self._life[0].finish(limit_s)
            await asyncio.wait([lives])
        for task in (lives, beat):
            task.cancel()
        await asyncio.gather(lives, beat, return_exceptions=True)
        await self._ports.outbox.stop()
        await self.projection.stop()

    @property
    def unstored_events(self) -> int:
        """How many recorded events the log has not acknowledged."""
        return self._ports.outbox.events

    def ready(self) -> str | None:
        """Why this node cannot serve, or None."""
        if self._life is None or not self._life[0].serving:
            return f"node {self._ports.node}: {self._why_lifeless()}"
        if not self._ports.outbox.ready:
            return f"node {self._ports.node}: the log does not acknowledge events"
        return None

    def _why_lifeless(self) -> str:
        """How far the engine's start is; between two lives, why the last one ended."""
        if self._life is None:
            return self._why_not
        return self._life[0].engine.health().detail or "the engine is starting"

    # --- engine lives

    async def _lives(self) -> None:
        young_deaths = 0
        while not self._stopping:
            await self._ports.clock.sleep(RESTART_WAITS_S[min(young_deaths, len(RESTART_WAITS_S) - 1)])
            began_ns = self._ports.clock.monotonic_ns()
            self._why_not = await self._one_life()
            lived_s = (self._ports.clock.monotonic_ns() - began_ns) / 1e9
            young_deaths = 0 if lived_s > LONG_LIFE_S else young_deaths + 1

    async def _one_life(self) -> str:
        """Why it ended."""
        engine = self._make_engine()
        try:
            incarnation = Incarnation(self._ports, engine)
            self._life = incarnation, Switching(incarnation), Copying(incarnation)
            return (await incarnation.live()).reason
        except (EngineError, TimeoutError) as error:
            self._logger.error("the engine did not start", error=str(error))
            return f"the engine did not start: {error}"
        finally:
            self._life = None
            await engine.close()

    async def _beat(self) -> None:
        """A heartbeat each second while a life serves. One that cannot be sent is missed: the next one counts."""
        while True:
            if self._life is not None and self._life[0].serving:
                if self._ports.outbox.ready:
                    self._life[0].tell_evicted()
                try:
                    load = encode_message(self._load(self._life[0]))
                    await self._ports.bus.publish(self._ports.subjects.load(self._ports.node), load)
                except Unavailable as error:
                    self._logger.warning("heartbeat not sent", error=str(error))
            await self._ports.clock.sleep(HEARTBEAT_S)

    def _load(self, life: Incarnation) -> NodeLoad:
        state, engine = self._ports.state, life.description
        used_blocks = sum(state.held_blocks.values())
        steps = {worker: tuple(job.assign.request for job in jobs) for worker, jobs in state.desk.running().items()}
        return NodeLoad(
            node=state.node,
            incarnation=state.incarnation,
            epoch=state.served.epoch,
            queued={worker: len(state.desk.queue(worker)) for worker in state.desk.workers},
            running={worker: requests[0] for worker, requests in steps.items()},
            steps=steps,
            used_blocks=used_blocks,
            free_blocks=engine.prefill_ranks * engine.blocks_per_rank - used_blocks,
        )

    # --- what the log says

    def _learn(self, stored: Stored) -> None:
        self._notice_successor(stored)
        if self._life is None or not self._life[0].serving:
            return
        incarnation, switching, _ = self._life
        match stored.data:
            case RouterLost() as lost:
                incarnation.lose_router(lost.source)
            case NodeDeclaredLost() as lost if lost.node == self._ports.node:
                if lost.incarnation == self._ports.state.incarnation:
                    # Everybody has emptied this incarnation's caches and placed its requests again.
                    incarnation.end("declared lost by the controller", "engine-died")
            case EpochAborted() as aborted if aborted.node == self._ports.node:
                switching.call_off()
            case EpochCommitted() as committed if committed.node == self._ports.node:
                if committed.epoch == self._ports.state.served.epoch:
                    # The index of the new workers is their own to tell; what others derived is a guess.
                    incarnation.report(Report())
            case _:
                pass

    def _notice_successor(self, stored: Stored) -> None:
        """One process speaks for a node. If another has registered it, this one was taken for dead and has to be."""
        data = stored.data
        if not isinstance(data, NodeRegistered) or data.node != self._ports.node or self._replaced.done():
            return
        if stored.event.source != self._ports.source:
            message = f"{stored.event.source} has registered node {data.node}"
            self._replaced.set_result(Fenced(message, stored.stream_seq))

    # --- commands

    async def _handle(self, _subject: str, payload: bytes) -> bytes:
        try:
            reply = await self._answer(decode_command(payload))
        except BadCommand as error:
            reply = Refused(reason="bad-command", detail=str(error))
        if isinstance(reply, Refused):
            self._ports.metrics.refused.labels(reply.reason).inc()
            self._logger.info("refused", reason=reply.reason, detail=reply.detail)
        return encode_message(reply)

    async def _answer(self, command: Command) -> Reply:
        if self._life is None or not self._life[0].serving:
            return self._answer_lifeless(command)
        incarnation, switching, copying = self._life
        match command:
            case Assign():
                return incarnation.assign(command)
            case Release():
                return incarnation.release(command)
            case Cancel():
                return incarnation.cancel(command)
            case Drain():
                return switching.drain(command)
            case Adopt():
                return await switching.adopt(command)
            case Copy():
                return await copying.copy(command)
            case Evict():
                return await copying.evict(command)
            case Pin():
                return await copying.pin(command)
            case Unpin():
                return copying.unpin(command)
            case TakeOver():
                return await incarnation.guests.take_over(command)
            case Renew():
                return await incarnation.guests.renew(command)
            case Report():
                return incarnation.report(command)
            case _:
                assert_never(command)

    def _answer_lifeless(self, command: Command) -> Reply:
        """Between two lives nothing is queued and no worker exists."""
        match command:
            case Release():
                return Released(outcome="unknown")
            case Cancel() | Unpin():
                return Accepted()
            case Assign() | Drain() | Copy() | Evict() | Pin() | TakeOver() | Renew() | Report():
                return Refused(reason="unknown-worker", detail=self._why_lifeless())
            case Adopt():
                return Refused(reason="busy", detail=self._why_lifeless())
            case _:
                assert_never(command)
