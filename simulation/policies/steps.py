"""The steps of a node's workers in virtual time: composed, priced and reported by the agent's own code.

As long as the cost model says, times noise: prompts need not be claimed, and nothing is computed. What each step stores and
evicts is counted in the node's real `KvPool`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from random import Random
from typing import NamedTuple

import numpy as np

from services.worker import decider
from services.worker.composer import Share, compose
from services.worker.decider import Prefilled, State
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.modelled import NOISE_MIN
from services.worker.engine.protocol import (
    ItemResult,
    OutOfBlocks,
    PrefillItem,
    PrefillStep,
    Token,
)
from services.worker.engine.step_items import Reserved, finish, reserve
from services.worker.fetches import is_over
from services.worker.job import Job
from services.worker.step_cost import WorkerCost, shared_out, step_us
from services.worker.steps import CLAIM_BYTES_MAX
from shared.contracts.envelope import EventData
from shared.contracts.events import AbortReason
from shared.contracts.ids import BlockId, NodeId, WorkerId
from shared.model.lattice import Group
from simulation.policies.agenda import Agenda
from simulation.policies.fetching import Fetching
from simulation.policies.setup import Setup

PROMPT_TOKENS_MAX = 1 << 22
_TOKENS = np.broadcast_to(np.uint32(0), PROMPT_TOKENS_MAX)
"""Any prompt: an index counts tokens and never reads one."""

_FIRST_TOKEN = Token(0)

PINNED_S = 0.01
"""Between two tries for blocks that a finished prefill still holds."""


class Effects(NamedTuple):
    """Told when the facts of it are said: a first token is out, or an accepted assignment has ended without one."""

    prefilled: Callable[[Job, Prefilled], None]
    aborted: Callable[[Job, AbortReason], None]


class Around(NamedTuple):
    """What a node's steps need of the node: to say something, to know whether it parks, and to tell that a step has ended."""

    say: Callable[[list[EventData]], None]
    is_parking: Callable[[], bool]
    ended: Callable[[], None]


class _Step(NamedTuple):
    shares: list[Share]
    reserved: list[Reserved]
    measured_us: int


class Steps:
    """`begin` a worker when it has got something. `chance` is the noise of step times."""

    def __init__(
        self, state: State, pools: Mapping[NodeId, KvPool], setup: Setup, agenda: Agenda, chance: Random, around: Around
    ) -> None:
        self.effects = Effects(lambda _job, _prefilled: None, lambda _job, _reason: None)
        self.pool = pools[state.node]
        self.groups: dict[WorkerId, Group] = {}
        self.running: dict[WorkerId, _Step] = {}
        self.busy_gpu_us = 0
        self._state = state
        self._setup = setup
        self._truth = setup.truth or setup.coefficients
        self._straggler = setup.stragglers.get(state.node, 1.0)
        self._agenda = agenda
        self._chance = chance
        self._say, self._is_parking, self._ended = around
        self._fetching = Fetching(state, setup, agenda, pools, self._say)
        self._items_max: dict[WorkerId, int] = {}
        self._begun_only: set[WorkerId] = set()

    def open_workers(self, groups: dict[WorkerId, Group]) -> None:
        """The geometry has changed. No step runs."""
        self.groups, self._items_max, self._begun_only = groups, {}, set()

    def begin(self, worker: WorkerId) -> None:
        """Something was queued, or a step or a fetch has ended: fetch for those near the head, and run the next step if none
        runs."""
        if self._is_parking():
            return
        near = self._near_head(worker)
        self._fetching.begin(near, self.groups[worker], self._fetched)
        if worker in self.running:
            return
        if shares := self._compose(worker, near):
            for share in shares:
                self._announce(share.job)
            try:
                reserved = reserve(self.pool, self._step(worker, shares))
            except OutOfBlocks:
                self._out_of_blocks(worker, [share.job for share in shares])
                return
            self._items_max.pop(worker, None)
            self._begun_only.discard(worker)
            step = _Step(shares, reserved, self._step_us(worker, reserved))
            self.running[worker] = step
            self._agenda.at(self._agenda.now_ns + step.measured_us * 1_000, partial(self._end, worker, step))

    def _fetched(self) -> None:
        """There may be room for the fetch of another worker too."""
        for worker in self.groups:
            self.begin(worker)

    def _near_head(self, worker: WorkerId) -> list[Job]:
        queue = self._state.desk.queue(worker)
        begun_only = worker in self._begun_only and any(job.begun for job in queue)
        return queue.to_claim(self._state.parameters.worker_order, self._agenda.now_ns, CLAIM_BYTES_MAX, begun_only)

    def _compose(self, worker: WorkerId, near: list[Job]) -> list[Share]:
        order, group = self._state.parameters.worker_order, self.groups[worker]
        # Nobody overtakes who waits for a fetch if order is arrival.
        ready = takewhile(is_over, near) if order == "fcfs" else filter(is_over, near)
        return compose(
            list(ready),
            lambda job: self.pool.cached_blocks(group, job.chain),
            order,
            self._setup.step_limits,
            self._items_max.get(worker, self._setup.step_items_max),
            self._setup.block_tokens,
            WorkerCost(self._setup.coefficients, group.degree),
        )

    def _since_us(self, job: Job) -> int:
        """Time since it was accepted, without its fetch."""
        return (self._agenda.now_ns - job.accepted_ns) // 1_000 - (job.fetched.us if job.fetched else 0)

    def _announce(self, job: Job) -> None:
        if job.started:
            self._state.desk.start(job)
        else:
            self._say(decider.start(job, self._since_us(job)))

    def _step(self, worker: WorkerId, shares: list[Share]) -> PrefillStep:
        items = tuple(
            PrefillItem(
                each.job.key.engine_id, _TOKENS[: each.job.assign.prompt_tokens], each.job.chain, until=each.until
            )
            for each in shares
        )
        return PrefillStep(self._state.served.epoch, self.groups[worker], items)

    def _step_us(self, worker: WorkerId, reserved: list[Reserved]) -> int:
        sizes = [(each.end_tokens - each.cached_tokens, each.cached_tokens) for each in reserved]
        noise = max(NOISE_MIN, self._chance.gauss(1.0, self._setup.noise_sd))
        return round(step_us(self._truth, self.groups[worker].degree, sizes) * noise * self._straggler)

    def _end(self, worker: WorkerId, step: _Step) -> None:
        del self.running[worker]
        degree = self.groups[worker].degree
        self.busy_gpu_us += degree * step.measured_us
        sizes = [(each.end_tokens - each.cached_tokens, each.cached_tokens) for each in step.reserved]
        costs = shared_out(self._setup.coefficients, degree, sizes, step.measured_us)
        results = [finish(self.pool, each, _FIRST_TOKEN if each.ends_prompt else None) for each in step.reserved]
        evicted = self.pool.take_evicted(self.groups[worker])
        for share, item, cost in zip(step.shares, results, costs, strict=True):
            share.job.progress.add(item.computed_tokens, cost.measured_us, cost.predicted_us)
            if item.outcome == "finished":
                self._finished(share.job, item, evicted)
            else:
                self._unfinished(share.job, item, evicted, degree)
            evicted = ()
        self._ended()
        self.begin(worker)

    def _finished(self, job: Job, item: ItemResult, evicted: tuple[BlockId, ...]) -> None:
        prefilled = Prefilled.of(job, item, evicted, self._since_us(job))
        self._say(decider.complete(self._state, job, prefilled))
        self._agenda.after(self._setup.handoff_s, partial(self._first_token, job, prefilled))

    def _first_token(self, job: Job, prefilled: Prefilled) -> None:
        self.pool.release(job.key.engine_id)
        self._state.desk.end(job)
        self.effects.prefilled(job, prefilled)

    def _unfinished(self, job: Job, item: ItemResult, evicted: tuple[BlockId, ...], degree: int) -> None:
        self._say(decider.chunk_done(self._state, job, item, evicted))
        done_tokens = item.cached_tokens + item.computed_tokens
        job.go_on(self._setup.coefficients.prefill_us(degree, job.assign.prompt_tokens - done_tokens, done_tokens))
        self._put_back(job)

    # --- steps that did not work out

    def _out_of_blocks(self, worker: WorkerId, jobs: list[Job]) -> None:
        """As the agent does: fewer at a time, those that were begun first, when a hand-off has ended, or not at all."""
        for job in jobs:
            self._state.desk.put_back(job)
        if len(jobs) > 1:
            self._items_max[worker] = len(jobs) // 2
        elif worker not in self._begun_only and any(job.begun for job in self._state.desk.queue(worker)):
            self._begun_only.add(worker)
        elif any(job.holds_prefill and job.worker == worker for job in self._state.desk):
            self._agenda.after(PINNED_S, partial(self.begin, worker))
            return
        else:
            self.abort(jobs[0], "out-of-blocks")
        self.begin(worker)

    def _put_back(self, job: Job) -> None:
        self._state.desk.put_back(job)
        if self._state.desk.is_draining(job.worker):
            self.abort(job, "draining")

    def abort(self, job: Job, reason: AbortReason) -> None:
        """An assignment ends without a first token."""
        self._say(decider.abort_job(job, reason))
        self.pool.release(job.key.engine_id)
        self.effects.aborted(job, reason)
