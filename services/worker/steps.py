"""One worker's loop: from the claimed head of its queue the next step's items, one engine step, its facts. Then the next."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import structlog

from services.worker.claims import Claims
from services.worker.composer import Share, compose
from services.worker.decider import Prefilled, abort_job, chunk_done, complete, cut_short, start
from services.worker.engine.past import past_of
from services.worker.engine.protocol import (
    Engine,
    EngineDied,
    EngineError,
    ItemResult,
    OutOfBlocks,
    PrefillItem,
    PrefillStep,
    StepResult,
)
from services.worker.fetches import Fetches, is_over
from services.worker.gate import Gate
from services.worker.job import Job, Stage
from services.worker.origins import of_job
from services.worker.ports import NodePorts
from services.worker.room import Room
from services.worker.speaking import continuation_of, sampling_of
from services.worker.step_cost import WorkerCost, shared_out, step_us
from services.worker.waiting import within
from shared.contracts.events import AbortReason
from shared.contracts.ids import BlockId, WorkerId
from shared.model.cost import US_PER_S
from shared.model.lattice import Group
from shared.model.parameters import WorkerOrder

CLAIM_BYTES_MAX = 8 * 2**20
"""Prompts of one worker that are here before their turn; the head's own is fetched whatever its size."""

HUNG_FACTOR = 10
"""A step that takes this many times its prediction, and longer than the configured minimum, is hung."""

PINNED_S = 0.01
"""Between two tries for blocks that a finished prefill, a copy or a lease still holds."""


class Effects(NamedTuple):
    """What a step leads to. `stream` is called when its facts are recorded, `aborted` likewise; `stop` ends a queued job for
    a reason; `died` ends the engine."""

    stream: Callable[[Job, Prefilled], None]
    aborted: Callable[[Job, AbortReason], None]
    stop: Callable[[Job, AbortReason], None]
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
        fetches: Fetches,
        effects: Effects,
    ) -> None:
        self._worker = worker
        self._group = group
        self._ports = ports
        self._engine = engine
        self._block_tokens = engine.describe().block_tokens
        self._gate = gate
        self._claims = claims
        self._fetches = fetches
        self._effects = effects
        self._queue = ports.state.desk.queue(worker)
        self._room = Room()
        self._woken = asyncio.Event()
        self._engine_well = True
        self._logger = structlog.get_logger(component="steps", worker=worker)

    def wake(self) -> None:
        """Something was queued, or a fetch is over: see who is near the head."""
        self._near_head()
        self._woken.set()

    async def run(self) -> None:
        while self._engine_well:
            self._woken.clear()
            if not self._ready():
                await self._woken.wait()
                continue
            async with self._gate.step(self._worker):
                # Waiting for the gate may have changed the queue.
                if shares := self._compose():
                    await self._serve(shares)

    # --- whose turn it is

    @property
    def _order(self) -> WorkerOrder:
        return self._ports.state.parameters.worker_order

    def _near_head(self) -> list[Job]:
        now_ns = self._ports.clock.monotonic_ns()
        if not any(job.begun for job in self._queue):
            self._room.none_begun()
        near = self._queue.to_claim(self._order, now_ns, CLAIM_BYTES_MAX, self._room.begun_only)
        self._claims.prefetch(near, self._woken.set)
        # What others have pushed back is fetched again in its turn. A prompt that was begun is short of its turn for one
        # step at most, and the KV blocks that it holds bound how many there are.
        self._claims.keep(near, [job for job in self._queue if not job.begun])
        self._fetches.begin(near, self.wake)
        return near

    def _ready(self) -> list[Job]:
        """Those near the head whose tokens are here and whose fetch is over. Nobody overtakes them if order is arrival."""
        near = self._near_head()
        if lost := [job for job in near if self._claims.is_lost(job)]:
            for job in lost:
                self._abort(job, "claim-lost")
            # Others are near the head now.
            near = self._near_head()
        ready = [job for job in near if self._claims.has_arrived(job) and is_over(job)]
        return list(takewhile(ready.__contains__, near)) if self._order == "fcfs" else ready

    def _compose(self) -> list[Share]:
        return compose(
            self._ready(),
            lambda job: self._engine.cached_blocks(self._group, job.chain),
            self._order,
            self._ports.step_limits,
            self._room.items_max,
            self._block_tokens,
            WorkerCost(self._ports.coefficients, self._group.degree),
        )

    # --- one step

    async def _serve(self, shares: list[Share]) -> None:
        for share in shares:
            self._begin(share.job)
        # Asked now: by the time that the refusal is here, they may have let go.
        others_hold = self._others_hold()
        try:
            await self._prefill(shares)
        except OutOfBlocks as error:
            await self._out_of_blocks(shares, error, others_hold)
        except EngineDied as error:
            self._died(str(error))
        except TimeoutError as error:
            self._died(f"hung step of {self._worker}: {error}")
        except EngineError as error:
            self._refused(shares, error)

    def _others_hold(self) -> bool:
        """Whether finished prefills still pin blocks here: this worker's own, or those of a geometry that was left."""
        desk = self._ports.state.desk
        return any(job.holds_prefill and (job.worker == self._worker or job.worker not in desk.workers) for job in desk)

    def _begin(self, job: Job) -> None:
        if job.started:
            self._ports.state.desk.start(job)
        else:
            self._ports.outbox.record(start(job, self._since_us(job)), of_job(job))

    async def _prefill(self, shares: Sequence[Share]) -> None:
        items = tuple(
            PrefillItem(
                share.job.key.engine_id,
                self._claims.tokens(share.job),
                share.job.chain,
                sampling_of(share.job.assign),
                share.until,
                continuation_of(share.job.assign),
                share.job.assign.generated_tokens,
            )
            for share in shares
        )
        step = PrefillStep(self._ports.state.served.epoch, self._group, items)
        sizes = [(share.uncached_tokens, share.cached_tokens) for share in shares]
        predicted_us = step_us(self._ports.coefficients, self._group.degree, sizes)
        limit_s = max(self._ports.hung_step_s_min, HUNG_FACTOR * predicted_us / US_PER_S)
        await within(self._ports.clock, limit_s, self._engine.prefill(step, partial(self._finish, shares)))

    def _finish(self, shares: Sequence[Share], result: StepResult) -> None:
        """Facts of every item, in order, in the turn of the loop in which they became true. Of the step's evictions the first
        one tells. Nothing is left to be told of jobs that ended with this life."""
        if any(share.job.stage is not Stage.RUNNING for share in shares):
            return
        self._room.found()
        sizes = [(item.computed_tokens, item.cached_tokens) for item in result.items]
        measured_us = round(result.seconds * US_PER_S)
        costs = shared_out(self._ports.coefficients, self._group.degree, sizes, measured_us)
        evicted = result.evicted
        for share, item, cost in zip(shares, result.items, costs, strict=True):
            share.job.progress.add(item.computed_tokens, cost.measured_us, cost.predicted_us)
            self._finish_item(share.job, item, evicted)
            evicted = ()

    def _finish_item(self, job: Job, item: ItemResult, evicted: tuple[BlockId, ...]) -> None:
        state, outbox = self._ports.state, self._ports.outbox
        match item.outcome:
            case "cancelled":
                reason = job.stop or "cancelled"
                outbox.record(cut_short(state, job, reason, item, evicted), of_job(job))
                self._effects.aborted(job, reason)
            case "unfinished":
                outbox.record(chunk_done(state, job, item, evicted), of_job(job))
                done_tokens = item.cached_tokens + item.computed_tokens
                left_tokens = job.assign.prompt_tokens - done_tokens
                job.go_on(self._ports.coefficients.prefill_us(self._group.degree, left_tokens, done_tokens))
                self._put_back(job)
            case "finished":
                past = past_of(self._claims.tokens(job), job.assign.generated_tokens, sampling_of(job.assign))
                prefilled = Prefilled.of(job, item, evicted, self._since_us(job))._replace(past=past)
                self._claims.drop(job)
                outbox.record(complete(state, job, prefilled), of_job(job))
                self._effects.stream(job, prefilled)

    def _since_us(self, job: Job) -> int:
        """Time since it was accepted, without its fetch."""
        fetch_us = job.fetched.us if job.fetched else 0
        return (self._ports.clock.monotonic_ns() - job.accepted_ns) // 1_000 - fetch_us

    # --- steps that did not work out

    async def _out_of_blocks(self, shares: list[Share], error: OutOfBlocks, others_hold: bool) -> None:
        """See `room`."""
        jobs = [share.job for share in shares]
        begun = any(job.begun for job in self._queue)
        now_ns = self._ports.clock.monotonic_ns()
        match self._room.lacking(len(jobs), now_ns, begun=begun, others_hold=others_hold, passing=error.passing):
            case "again":
                self._put_all_back(jobs)
            case "wait":
                await self._ports.clock.sleep(PINNED_S)
                self._put_all_back(jobs)
            case "give-up":
                self._logger.warning("out of blocks", request=jobs[0].assign.request, error=str(error))
                self._abort(jobs[0], "out-of-blocks")

    def _refused(self, shares: list[Share], error: EngineError) -> None:
        """An engine refuses steps, not requests: one by one, all but the one that it means go through."""
        jobs = [share.job for share in shares]
        if len(jobs) > 1:
            self._room.items_max = 1
            self._put_all_back(jobs)
            return
        self._logger.error("engine refused", request=jobs[0].assign.request, error=str(error))
        self._engine.release(jobs[0].key.engine_id)
        self._abort(jobs[0], "engine")

    def _put_all_back(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._put_back(job)

    def _put_back(self, job: Job) -> None:
        """Between two steps it is queued, so it can be stopped; a worker that drains gives it back."""
        self._ports.state.desk.put_back(job)
        if job.stop is not None:
            self._effects.stop(job, job.stop)
        elif self._ports.state.desk.is_draining(self._worker):
            self._effects.stop(job, "draining")

    def _died(self, reason: str) -> None:
        """The next in line must not meet a dead engine."""
        self._engine_well = False
        self._effects.died(reason)

    def _abort(self, job: Job, reason: AbortReason) -> None:
        self._ports.outbox.record(abort_job(job, reason), of_job(job))
        self._effects.aborted(job, reason)
