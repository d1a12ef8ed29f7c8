"""One life of a node's engine: boot it, register the node, serve commands, and end in an orderly way whatever happens.

Rules:

1.  The agent outlives its engines. When ranks die or hang, or the pool has given this incarnation up, the log learns it at
    once, every router concerned is told, and whatever was accepted has its end; then the engine is closed.
2.  A recorded fact is published in order; a token frame does not wait for it, an answer to `adopt` does.
"""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, NamedTuple, assert_never

import structlog

from services.worker import cache_events
from services.worker.admission import refuse_assign
from services.worker.claims import Claims
from services.worker.decider import NO_GEOMETRY, Prefilled, State, abort_job, lose, register, serve
from services.worker.elsewhere import Elsewhere
from services.worker.engine.protocol import Engine, EngineDescription, EngineError
from services.worker.fetches import Fetches
from services.worker.frames import Frames
from services.worker.gate import Gate
from services.worker.geometry import retired
from services.worker.guests import Guests
from services.worker.job import Job, JobKey, Stage
from services.worker.origins import of_job
from services.worker.ports import NodePorts
from services.worker.steps import Effects, StepLoop
from services.worker.streams import Streams
from services.worker.transfers import Transfers
from services.worker.waiting import within
from shared.contracts.commands import Accepted, Assign, Cancel, Refused, Release, Released, Report
from shared.contracts.envelope import Envelope
from shared.contracts.events import AbortReason
from shared.contracts.ids import WorkerId

START_LIMIT_S = 7_200.0
"""A terabyte of weights from a slow disk. An engine that gets no further gives up long before, by limits of its own."""

FAREWELL_LIMIT_S = 2.0
ACKNOWLEDGE_LIMIT_S = 0.5
POLL_S = 0.05

UNASKED: tuple[AbortReason, ...] = ("claim-lost", "engine-died", "out-of-blocks", "draining", "engine")
"""Ends that the router has not asked for: it is told by a frame, not only by the log."""


class Ending(NamedTuple):
    """Why a life ended, and what becomes of the jobs without a first token."""

    reason: str
    abort: AbortReason


class Incarnation:
    """`live` until it returns; commands only while `serving`."""

    def __init__(self, ports: NodePorts, engine: Engine) -> None:
        self.ports = ports
        self.state: State = ports.state
        self.engine = engine
        self.description: EngineDescription = engine.describe()
        self.gate = Gate()
        self.serving = False
        self.finishing = False
        self._claims = Claims(ports.bulk, ports.subjects, ports.clock)
        self.transfers = Transfers(ports, engine, lambda: self.serving, self.spawn)
        self._fetches = Fetches(ports, engine, self.transfers, lambda: self.serving, self.spawn)
        self._frames = Frames(ports.bulk, ports.subjects, ports.clock)
        self._loops: dict[WorkerId, StepLoop] = {}
        self._loop_tasks: list[asyncio.Task[None]] = []
        elsewhere = Elsewhere(ports, engine, lambda: self.serving, self.spawn)
        self._streams = Streams(ports, engine, self._frames, elsewhere, self._died)
        self.guests = Guests(ports, engine, self._frames, self._claims, self.spawn, self._died)
        self._others: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._logger = structlog.get_logger(component="incarnation", node=ports.node)

    # --- life

    async def live(self) -> Ending:
        """Errors: EngineError or TimeoutError if the engine does not start; then nothing was said of it."""
        await within(self.ports.clock, START_LIMIT_S, self.engine.start())
        await self._boot()
        async with asyncio.TaskGroup() as self._tasks:
            self.start_loops()
            watch = self._tasks.create_task(self._watch())
            self.serving = True
            try:
                ending = await self._ended
            finally:
                self.serving = False  # and if it is the agent that is cancelled: the group takes no more tasks
            watch.cancel()
            await self._bury(ending)
        serve(self.state, NO_GEOMETRY, {})
        return ending

    async def _boot(self) -> None:
        """Serve the last committed composition, if these ranks can, and register."""
        geometry = self.state.committed
        fits = sum(geometry.composition) == self.description.prefill_ranks
        if geometry.epoch and not (fits and set(geometry.composition) <= set(self.description.degrees)):
            self._logger.warning("the committed composition does not fit", composition=geometry.composition)
            geometry = NO_GEOMETRY
        if geometry.epoch:
            await self.engine.adopt(geometry.epoch, geometry.composition)
        serve(self.state, geometry, {})
        version, chunk_tokens = self.ports.coefficients.version, self.ports.step_limits.chunk_tokens
        self.ports.outbox.record(register(self.state, self.description, version, chunk_tokens))
        self.ports.metrics.lives.labels(self.ports.node).inc()
        self._logger.info("registered", incarnation=self.state.incarnation, epoch=geometry.epoch)

    async def _watch(self) -> None:
        self._died(await self.engine.wait_died())

    def end(self, reason: str, abort: AbortReason) -> None:
        """The first reason counts."""
        if not self._ended.done():
            self._ended.set_result(Ending(reason, abort))

    async def _bury(self, ending: Ending) -> None:
        tell = self._logger.info if ending.abort == "draining" else self._logger.warning
        tell("ended", incarnation=self.state.incarnation, reason=ending.reason)
        told = [*((job.assign, self._streams.index(job)) for job in self.state.desk), *self.guests.told()]
        aborted = sum(job.stage is not Stage.STREAMING for job in self.state.desk)
        said = self.ports.outbox.record(lose(self.state, ending.reason))
        for job in self.state.desk:
            said += self.ports.outbox.record(abort_job(job, ending.abort), of_job(job))
        self.ports.metrics.ended.labels(ending.abort).inc(aborted)
        tasks = [*self._loop_tasks, *self._streams.tasks(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._claims.close()
        await self._acknowledged(said)
        try:
            await within(self.ports.clock, FAREWELL_LIMIT_S, self._tell(told, ending.abort))
        except TimeoutError as error:
            self._logger.warning("routers not told", jobs=len(told), error=str(error))

    async def _acknowledged(self, said: Sequence[Envelope]) -> None:
        """A router that was told before the log has it would place the request here again. Not worth a long wait."""
        if not said:
            return
        try:
            await within(self.ports.clock, ACKNOWLEDGE_LIMIT_S, self.ports.outbox.stored(said[-1]))
        except TimeoutError:
            self._logger.warning("the log does not acknowledge", waiting_for=said[-1].type)

    async def _tell(self, told: Collection[tuple[Assign, int]], reason: AbortReason) -> None:
        for assign, index in told:
            await self._frames.broke_off(assign, reason, index)

    async def finish(self, limit_s: float) -> None:
        """SIGTERM: be schedulable no more, give back what is queued, let what runs end for up to `limit_s`, then end."""
        self.finishing = True
        self.state.desk.drain(self.state.desk.workers)
        await self._acknowledged(self.ports.outbox.record(retired(self.state, self.description.prefill_ranks)))
        self.give_back(self.state.desk.workers)
        try:
            await within(self.ports.clock, limit_s, self._all_jobs_ended())
        except TimeoutError:
            self._logger.warning("stopped before the end", jobs=len(self.state.desk))
        self.end("shutdown", "draining")

    async def _all_jobs_ended(self) -> None:
        while len(self.state.desk) + len(self.guests):
            await self.ports.clock.sleep(POLL_S)

    # --- the workers of the geometry served

    def start_loops(self) -> None:
        """One for each worker. The old ones, if there were any, are parked and go."""
        for task in self._loop_tasks:
            task.cancel()
        effects = Effects(self._prefilled, self._aborted, self.stop_job, self._died)
        self._loops = {
            worker: StepLoop(worker, group, self.ports, self.engine, self.gate, self._claims, self._fetches, effects)
            for worker, group in self.state.served.workers(self.ports.node).items()
        }
        self._loop_tasks = [
            self._tasks.create_task(loop.run(), name=f"steps {worker}") for worker, loop in self._loops.items()
        ]

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Something that ends with this life at the latest."""
        task = self._tasks.create_task(work, name=name)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    # --- commands

    def assign(self, assign: Assign) -> Accepted | Refused:
        """Queue it, unless it is here already or cannot be."""
        desk = self.state.desk
        if (answer := desk.answer_to(JobKey(assign.request, assign.attempt))) is not None:
            return answer
        if (refusal := refuse_assign(self.state, self.description, assign)) is not None:
            return refusal
        if not self.ports.outbox.ready:
            return Refused(reason="full", detail="the log does not acknowledge events")
        for given_up in desk.of_request(assign.request):
            self.stop_job(given_up, "released")
        job = desk.accept(assign, self.ports.clock.monotonic_ns())
        self._loops[job.worker].wake()
        return Accepted()

    def release(self, command: Release) -> Released:
        """Give a queued job back. One that is not known is refused if it should come later."""
        job = self.state.desk.find(command.request, command.attempt)
        if job is None:
            self.state.desk.refuse_later(JobKey(command.request, command.attempt))
            return Released(outcome="unknown")
        if job.stage is not Stage.QUEUED:
            return Released(outcome="started")
        self.stop_job(job, "released")
        return Released(outcome="released")

    def cancel(self, command: Cancel) -> Accepted:
        """Stop the attempts up to this one. One that is not known is refused if it should come later."""
        for job in self.state.desk.of_request(command.request):
            if job.key.attempt <= command.attempt:
                self.stop_job(job, "cancelled")
        self.guests.cancel(command.request, command.attempt)
        self.state.desk.refuse_later(JobKey(command.request, command.attempt))
        return Accepted()

    def report(self, command: Report) -> Accepted | Refused:
        """Publish what the workers hold, after what left them untold; who has told nothing yet has nothing to take back."""
        served = self.state.served.workers(self.ports.node)
        if unknown := [worker for worker in command.workers if worker not in served]:
            return Refused(reason="unknown-worker", detail=f"{unknown} are none of {list(served)}")
        for worker in command.workers or served:
            if self.state.numbers.get(worker):
                self._tell_evicted(worker)
            resident, number = self.engine.resident(served[worker]), self.state.numbers.get(worker, 0)
            self.ports.outbox.record(cache_events.report(worker, self.state.incarnation, number, resident))
        return Accepted()

    def tell_evicted(self) -> None:
        """Publish what has left caches by itself: where decode shares an engine's memory, not only steps push blocks out."""
        for worker in self.state.served.workers(self.ports.node):
            try:
                self._tell_evicted(worker)
            except EngineError:
                return  # it has died, or serves another geometry by now: both are told elsewhere

    def _tell_evicted(self, worker: WorkerId) -> None:
        gone = self.engine.take_evicted(self.state.served.workers(self.ports.node)[worker])
        number = self.state.numbers.get(worker, 0)
        self.ports.outbox.record(cache_events.evictions(worker, self.state.incarnation, number, gone, "pressure"))

    def lose_router(self, source: str) -> None:
        """Nobody waits for its requests any more."""
        for job in self.state.desk:
            if job.assign.router_source == source:
                self.stop_job(job, "router-lost")
        self.guests.lose_router(source)

    def give_back(self, workers: Collection[WorkerId]) -> int:
        """Return what is queued at `workers`; says how many that were."""
        queued = [job for job in self.state.desk if job.stage is Stage.QUEUED and job.worker in workers]
        for job in queued:
            self.stop_job(job, "draining")
        return len(queued)

    def stop_job(self, job: Job, reason: AbortReason) -> None:
        """Queued: at once, with what the engine holds of it. In a step: at its end. Streaming: its stream."""
        match job.stage:
            case Stage.QUEUED:
                job.stop = job.stop or reason
                self.engine.cancel(job.key.engine_id)
                self.ports.outbox.record(abort_job(job, reason), of_job(job))
                self._aborted(job, reason)
            case Stage.RUNNING:
                job.stop = job.stop or reason
                self.engine.cancel(job.key.engine_id)
            case Stage.STREAMING:
                self._streams.stop(job)
            case Stage.ENDED:
                pass
            case _:
                assert_never(job.stage)

    # --- what steps lead to

    def _died(self, reason: str) -> None:
        self.end(reason, "engine-died")

    def _prefilled(self, job: Job, prefilled: Prefilled) -> None:
        self._streams.begin(job, prefilled, self._tasks)

    def _aborted(self, job: Job, reason: AbortReason) -> None:
        self._claims.drop(job)
        self.ports.metrics.ended.labels(reason).inc()
        if reason in UNASKED:
            self.spawn(self._tell([(job.assign, 0)], reason), f"tell {job.key.engine_id}")
