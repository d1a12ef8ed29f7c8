"""Drain and adopt: how one incarnation gets from a geometry to the next.

    drain    refuse at the retiring workers · return what is queued there · let their steps end, return unfinished prompts ·
             let the other workers' steps end too and hold them · `drain-completed` · hold for the switch
    adopt    park at a step boundary · the engine switches · return what the old ids have queued · `rank-adopted-epoch`

The switch moves every rank of the node, so a long step of a worker that does not retire would make it late: such a step
delays the end of the drain, whose limit is generous, instead of the switch, whose limit is not. If no switch comes, the
workers go on.
"""

import asyncio

import structlog

from services.worker.decider import Geometry, serve
from services.worker.engine.protocol import Busy, EngineDied, EngineError, StaleEpoch
from services.worker.geometry import adopted, drained, refuse_adopt, refuse_drain
from services.worker.incarnation import Incarnation
from services.worker.job import Stage
from services.worker.origins import of_epoch
from services.worker.waiting import within
from shared.contracts.commands import Accepted, Adopt, Drain, Refused
from shared.contracts.ids import WorkerId

PARK_LIMIT_S = 1.0
"""The controller allows a switch 2 s, and an engine takes its share of them to find out that a rank is not ready."""

HOLD_S = 3.0
"""How long a drained node waits for its switch: the limit of the switch, and a second for the order to come."""

ADOPT_LIMIT_S = 30.0
"""An engine that takes longer has hung ranks."""


class Switching:
    """One per incarnation."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._ports = incarnation.ports
        self._state = incarnation.state
        self._gate = incarnation.gate
        self._turn = asyncio.Lock()
        self._drain: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger(component="switching", node=self._ports.node)

    def drain(self, command: Drain) -> Accepted | Refused:
        """Take the order; `drain-completed` follows. Repeating it is harmless."""
        if (refusal := refuse_drain(self._state, command)) is not None:
            return refusal
        self._state.term = command.term
        desk = self._state.desk
        if all(desk.is_draining(worker) for worker in command.workers):
            return Accepted()
        desk.drain(command.workers)
        returned = self._incarnation.give_back(command.workers)
        self._stop_drain()
        self._drain = self._incarnation.spawn(self._finish_drain(command.epoch, command.workers, returned), "drain")
        return Accepted()

    async def _finish_drain(self, coming_epoch: int, workers: tuple[WorkerId, ...], returned_requests: int) -> None:
        began_ns = self._ports.clock.monotonic_ns()
        running = self._state.desk.running()
        await self._gate.idle(workers)
        # A prompt that had only a chunk in its step was given back after it.
        returned_requests += sum(
            job.stage is Stage.ENDED and job.stop == "draining" for each in workers for job in running.get(each, ())
        )
        async with self._gate.closed():
            await self._gate.parked()
            drain_us = (self._ports.clock.monotonic_ns() - began_ns) // 1_000
            facts = drained(self._state, workers, returned_requests, drain_us)
            self._ports.outbox.record(facts, of_epoch(self._ports.node, coming_epoch))
            await self._ports.clock.sleep(HOLD_S)

    def call_off(self) -> None:
        """The reconfiguration was aborted: the old workers take work again."""
        self._stop_drain()
        self._state.desk.reopen()

    def _stop_drain(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None

    async def adopt(self, command: Adopt) -> Accepted | Refused:
        """Answers when every rank has adopted and the log says so."""
        async with self._turn:
            if self._incarnation.finishing:
                return Refused(reason="draining", detail="the node is shutting down")
            refusal = refuse_adopt(self._state, command, self._incarnation.description.prefill_ranks)
            if refusal is not None:
                return refusal
            self._state.term = command.term
            wanted = Geometry(command.epoch, command.composition)
            if wanted == self._state.served:
                return Accepted()
            async with self._gate.closed():
                if not await self._park():
                    running = list(self._state.desk.running())
                    return Refused(reason="busy", detail=f"steps of {running} took longer than {PARK_LIMIT_S:g} s")
                return await self._switch(wanted)

    async def _park(self) -> bool:
        try:
            await within(self._ports.clock, PARK_LIMIT_S, self._gate.parked())
        except TimeoutError:
            return False
        return True

    async def _switch(self, wanted: Geometry) -> Accepted | Refused:
        engine = self._incarnation.engine
        try:
            ranks = await within(self._ports.clock, ADOPT_LIMIT_S, engine.adopt(wanted.epoch, wanted.composition))
        except Busy as error:
            return Refused(reason="busy", detail=str(error))
        except StaleEpoch as error:
            return Refused(reason="stale-epoch", detail=str(error))
        except (EngineDied, TimeoutError) as error:
            self._incarnation.end(f"adopt: {error}", "engine-died")
            return Refused(reason="engine", detail=str(error))
        except EngineError as error:
            return Refused(reason="engine", detail=str(error))
        if not self._incarnation.serving:
            return Refused(reason="engine", detail="this life ended during the switch")
        self._stop_drain()
        self._incarnation.give_back(tuple(self._state.desk.workers))
        held = {
            worker: sum(len(blocks) for _, blocks in engine.resident(group).runs)
            for worker, group in wanted.workers(self._ports.node).items()
        }
        serve(self._state, wanted, held)
        self._incarnation.start_loops()
        envelopes = self._ports.outbox.record(adopted(self._state, ranks), of_epoch(self._ports.node, wanted.epoch))
        self._logger.info("adopted", epoch=wanted.epoch, composition=wanted.composition)
        await self._ports.outbox.stored(envelopes[-1])
        return Accepted()
