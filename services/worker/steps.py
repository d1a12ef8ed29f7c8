"""One worker's loop: the head of its queue, its tokens, one engine step, its facts. Then the next."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from services.worker.claims import Claims
from services.worker.decider import Prefilled, abort_job, complete, cut_short, start
from services.worker.engine.protocol import (
    Engine,
    EngineDied,
    EngineError,
    OutOfBlocks,
    PrefillItem,
    PrefillStep,
    StepResult,
)
from services.worker.gate import Gate
from services.worker.job import Job, Stage
from services.worker.origins import of_job
from services.worker.ports import NodePorts
from services.worker.stream import sampling_of
from services.worker.waiting import within
from shared.contracts.events import AbortReason
from shared.contracts.ids import WorkerId
from shared.model.blocks import Tokens
from shared.model.cost import US_PER_S
from shared.model.lattice import Group

CLAIM_BYTES_MAX = 8 * 2**20
"""Prompts of one worker that are here before their turn; the head's own is fetched whatever its size."""

HUNG_FACTOR = 10
"""A step that takes this many times its prediction, and longer than the configured minimum, is hung."""


class Effects(NamedTuple):
    """What a step leads to. `stream` is called when its facts are recorded, `aborted` likewise, `died` ends the engine."""

    stream: Callable[[Job, Prefilled], None]
    aborted: Callable[[Job, AbortReason], None]
    died: Callable[[str], None]


class StepLoop:
    """`run` until it is cancelled, which is safe between two steps; `wake` when the queue has got something."""

    def __init__(
        self,
        worker: WorkerId,
        group: Group,
        ports: NodePorts,
        engine: Engine,
        gate: Gate,
        claims: Claims,
        effects: Effects,
    ) -> None:
        self._worker = worker
        self._group = group
        self._ports = ports
        self._engine = engine
        self._gate = gate
        self._claims = claims
        self._effects = effects
        self._queue = ports.state.desk.queue(worker)
        self._woken = asyncio.Event()
        self._engine_well = True
        self._logger = structlog.get_logger(component="steps", worker=worker)

    def wake(self) -> None:
        """Something was queued: fetch its tokens if it is near the head."""
        self._claims.prefetch(self._queue.to_claim(CLAIM_BYTES_MAX))
        self._woken.set()

    async def run(self) -> None:
        while self._engine_well:
            job = self._queue.head
            if job is None:
                self._woken.clear()
                await self._woken.wait()
                continue
            self._claims.prefetch(self._queue.to_claim(CLAIM_BYTES_MAX))
            tokens = await self._claims.tokens(job)
            async with self._gate.step(self._worker):
                if job.stage is Stage.QUEUED:
                    await self._serve(job, tokens)

    async def _serve(self, job: Job, tokens: Tokens | None) -> None:
        self._claims.drop(job)
        if tokens is None:
            self._abort(job, "claim-lost")
            return
        queue_us = (self._ports.clock.monotonic_ns() - job.accepted_ns) // 1_000
        self._ports.outbox.record(start(job, queue_us), of_job(job))
        try:
            result = await self._prefill(job, tokens)
        except OutOfBlocks as error:
            self._logger.warning("out of blocks", request=job.assign.request, error=str(error))
            self._abort(job, "out-of-blocks")
        except EngineDied as error:
            self._died(str(error))
        except TimeoutError as error:
            self._died(f"hung step of {self._worker}: {error}")
        except EngineError as error:
            self._logger.error("engine refused", request=job.assign.request, error=str(error))
            self._abort(job, "engine")
        else:
            self._finish(job, result, queue_us)

    def _finish(self, job: Job, result: StepResult, queue_us: int) -> None:
        item = result.items[0]
        assert item.outcome != "unfinished", "this loop gives an engine whole prompts"
        if item.outcome == "cancelled":
            reason = job.stop or "cancelled"
            self._ports.outbox.record(cut_short(self._ports.state, job, reason, item, result.evicted), of_job(job))
            self._effects.aborted(job, reason)
            return
        prefilled = Prefilled(item, result.evicted, queue_us, round(result.seconds * US_PER_S))
        self._ports.outbox.record(complete(self._ports.state, job, prefilled), of_job(job))
        self._effects.stream(job, prefilled)

    async def _prefill(self, job: Job, tokens: Tokens) -> StepResult:
        item = PrefillItem(job.key.engine_id, tokens, job.chain, sampling_of(job.assign))
        step = PrefillStep(self._ports.state.served.epoch, self._group, (item,))
        limit_s = max(self._ports.hung_step_s_min, HUNG_FACTOR * job.assign.service_us / US_PER_S)
        return await within(self._ports.clock, limit_s, self._engine.prefill(step))

    def _died(self, reason: str) -> None:
        """The next in line must not meet a dead engine."""
        self._engine_well = False
        self._effects.died(reason)

    def _abort(self, job: Job, reason: AbortReason) -> None:
        self._ports.outbox.record(abort_job(job, reason), of_job(job))
        self._effects.aborted(job, reason)
