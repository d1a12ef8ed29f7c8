"""Every job of one incarnation that is past its prefill, and how each of them leaves."""

import asyncio
from collections.abc import Callable

import structlog

from services.worker.decider import Prefilled
from services.worker.elsewhere import Elsewhere
from services.worker.engine.protocol import Engine, EngineDied, EngineError
from services.worker.frames import Frames
from services.worker.job import Job, JobKey
from services.worker.ports import NodePorts
from services.worker.stream import Stream
from shared.model.cost import US_PER_S
from shared.runtime.ports import Unavailable


class Streams:
    """`died` is told when an engine turns out to be dead."""

    def __init__(
        self,
        ports: NodePorts,
        engine: Engine,
        frames: Frames,
        elsewhere: Elsewhere,
        died: Callable[[str], None],
    ) -> None:
        self._ports = ports
        self._engine = engine
        self._frames = frames
        self._elsewhere = elsewhere
        self._died = died
        self._open: dict[JobKey, tuple[Stream, asyncio.Task[None]]] = {}
        self._logger = structlog.get_logger(component="streams", node=ports.node)

    def begin(self, job: Job, prefilled: Prefilled, tasks: asyncio.TaskGroup) -> None:
        """Send what the prefill gave, and what decode gives after it."""
        self._measure(job, prefilled)
        if job.stop is not None:
            # The cancellation came too late for the step: its blocks stay, its tokens go nowhere.
            self._end(job)
            return
        stream = Stream(job, self._ports, self._engine, self._frames, self._elsewhere)
        task = tasks.create_task(self._run(job, stream, prefilled), name=f"stream {job.key.engine_id}")
        self._open[job.key] = stream, task
        # A callback, because a task that is cancelled before it began runs no `finally`.
        task.add_done_callback(lambda _: self._end(job))

    def stop(self, job: Job) -> None:
        """Nobody wants the rest."""
        self._open[job.key][1].cancel()

    def index(self, job: Job) -> int:
        """How many of the job's tokens were sent."""
        found = self._open.get(job.key)
        return found[0].index if found else 0

    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._open.values()]

    async def _run(self, job: Job, stream: Stream, prefilled: Prefilled) -> None:
        try:
            await stream.run(prefilled)
        except EngineDied as error:
            self._died(str(error))
        except EngineError as error:
            self._logger.error("stream failed", request=job.assign.request, error=str(error))
            await self._frames.broke_off(job.assign, "engine", stream.index)
        except Unavailable as error:
            self._logger.error("router not reachable", request=job.assign.request, error=str(error))

    def _end(self, job: Job) -> None:
        """Nothing of it stays pinned or in the decode memory."""
        self._open.pop(job.key, None)
        self._engine.cancel(job.key.engine_id)
        self._ports.state.desk.end(job)

    def _measure(self, job: Job, prefilled: Prefilled) -> None:
        metrics, served = self._ports.metrics, self._ports.state.served.workers(self._ports.node)
        metrics.ended.labels("completed").inc()
        metrics.prefill_s.labels(served[job.worker].degree).observe(prefilled.prefill_us / US_PER_S)
        metrics.queue_s.observe(prefilled.queue_us / US_PER_S)
        metrics.tokens.labels("computed").inc(prefilled.computed_tokens)
        fetched_tokens = job.fetched.used_tokens(prefilled.cached_tokens) if job.fetched else 0
        metrics.tokens.labels("fetched").inc(fetched_tokens)
        metrics.tokens.labels("cached").inc(prefilled.cached_tokens - fetched_tokens)
