"""A node agent in virtual time: the agent's own decisions around steps that take as long as the cost model says.

What an agent does is `services.worker`'s: its state and events, admission, queue order, packing, KV index. Here is what its
shell does with them, less what needs a network: prompts need not be claimed, and KV is not moved to a decode rank.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

import numpy as np

from services.worker import cache_events, decider, geometry
from services.worker.admission import refuse_assign
from services.worker.composer import Share, compose
from services.worker.decider import Geometry, Prefilled
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.modelled import NOISE_MIN
from services.worker.engine.protocol import (
    STEP_ITEMS_MAX,
    ItemResult,
    OutOfBlocks,
    PrefillItem,
    PrefillStep,
    RankAdopted,
    Token,
)
from services.worker.engine.step_items import Reserved, finish, reserve
from services.worker.job import Job
from services.worker.step_cost import shared_out, step_us
from shared.contracts.commands import Adopt, Assign, Drain, Refused
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import AbortReason
from shared.contracts.ids import BlockId, NodeId, Source, WorkerId
from shared.model.cost import Coefficients
from shared.model.lattice import Composition, Group
from simulation.policies.agenda import Agenda
from simulation.policies.journal import Journal
from simulation.policies.setup import Setup

PROMPT_TOKENS_MAX = 1 << 22
_TOKENS = np.broadcast_to(np.uint32(0), PROMPT_TOKENS_MAX)
"""Any prompt: an index counts tokens and never reads one."""

_FIRST_TOKEN = Token(0)


class Effects(NamedTuple):
    """Told when the facts of it are said: a first token is out, or an accepted assignment has ended without one."""

    prefilled: Callable[[Job, Prefilled], None]
    aborted: Callable[[Job, AbortReason], None]


PINNED_S = 0.01
"""Between two tries for blocks that a finished prefill still holds."""


class _Step(NamedTuple):
    shares: list[Share]
    reserved: list[Reserved]
    measured_us: int


class Node:
    """`assign`, `drain` and `adopt` are the agent's commands. `chance` is the noise of step times."""

    def __init__(
        self, node: NodeId, composition: Composition, setup: Setup, agenda: Agenda, journal: Journal, chance: Random
    ) -> None:
        self.engine = setup.engine(composition)
        self.state = decider.initial(node, setup.queue_max)
        self.effects = Effects(lambda _job, _prefilled: None, lambda _job, _reason: None)
        self._setup = setup
        self._truth: Coefficients = setup.truth or setup.coefficients
        self._straggler = setup.stragglers.get(node, 1.0)
        self._agenda = agenda
        self._journal = journal
        self._chance = chance
        self._source = Source(node)
        self._pool = KvPool(self.engine.prefill_ranks, setup.blocks_per_rank, setup.block_tokens)
        self._groups: dict[WorkerId, Group] = {}
        self._steps: dict[WorkerId, _Step] = {}
        self._items_max: dict[WorkerId, int] = {}
        self._begun_only: set[WorkerId] = set()
        self.busy_gpu_us = 0
        self._draining: tuple[Drain, int, int] | None = None
        self._parked = False

    # --- what the agent is told

    def register(self) -> None:
        """The node's engine is up."""
        self._say(decider.register(self.state, self.engine, self._setup.coefficients.version))

    def learn(self, stored: Stored) -> None:
        """An event of the control subject."""
        decider.evolve(self.state, stored)

    def assign(self, assign: Assign) -> Refused | None:
        """Queue it, and begin if the worker is idle."""
        refused = refuse_assign(self.state, self.engine, assign)
        if refused is None:
            self.state.desk.accept(assign, self._agenda.now_ns)
            self._begin(assign.worker)
        return refused

    def drain(self, order: Drain) -> Refused | None:
        """Give back what is queued at the retiring workers; `drain-completed` follows when every step has ended."""
        if (refused := geometry.refuse_drain(self.state, order)) is not None:
            return refused
        desk = self.state.desk
        if self._draining is None:
            desk.drain(order.workers)
            returned = [job for worker in order.workers for job in desk.queue(worker)]
            self._draining = order, self._agenda.now_ns, len(returned)
            for job in returned:
                self._abort(job, "draining")
            self._park()
        return None

    def adopt(self, order: Adopt) -> Refused | None:
        """Switch, if no step runs: `rank-adopted-epoch` follows after the time that a switch takes."""
        refused = geometry.refuse_adopt(self.state, order, self.engine.prefill_ranks)
        wanted = Geometry(order.epoch, order.composition)
        if refused is None and wanted != self.state.served:
            assert not self._steps, "a node adopts when its steps have ended"
            self._parked = True
            seconds = self._setup.switch_s if self.state.served.epoch else 0.0
            self._agenda.after(seconds, partial(self._adopted, wanted, seconds))
        return refused

    def call_off(self) -> None:
        """The reconfiguration was aborted: the old workers take work again."""
        self._draining, self._parked = None, False
        self.state.desk.reopen()
        for worker in self._groups:
            self._begin(worker)

    def committed(self) -> None:
        """The geometry that is served is the pool's now: tell what its workers hold, and let those work that stayed."""
        for worker, group in self._groups.items():
            number = self.state.numbers.get(worker, 0)
            self._say(cache_events.report(worker, self.state.incarnation, number, self._pool.resident(group)))

    def _adopted(self, wanted: Geometry, seconds: float) -> None:
        if wanted == self.state.served:
            return
        for worker in self.state.desk.workers:
            for job in list(self.state.desk.queue(worker)):
                self._abort(job, "draining")
        self._pool.adopt(wanted.composition)
        self._groups = wanted.workers(self.state.node)
        held = {
            each: sum(len(run) for _, run in self._pool.resident(group).runs) for each, group in self._groups.items()
        }
        decider.serve(self.state, wanted, held)
        self._draining, self._parked = None, False
        self._items_max, self._begun_only = {}, set()
        self._say(
            geometry.adopted(self.state, tuple(RankAdopted(rank, seconds) for rank in range(self.engine.prefill_ranks)))
        )

    def _park(self) -> None:
        """When the retiring workers have ended their steps the others begin none, and when these have ended too, the node is
        drained."""
        if self._draining is None or self._parked:
            return
        order, since_ns, returned = self._draining
        if not self._steps.keys() & set(order.workers):
            self._parked = not self._steps
        if self._parked:
            drain_us = (self._agenda.now_ns - since_ns) // 1_000
            self._say(geometry.drained(self.state, order.workers, returned, drain_us))

    @property
    def _is_parking(self) -> bool:
        if self._draining is None:
            return self._parked
        return self._parked or not self._steps.keys() & set(self._draining[0].workers)

    # --- steps

    def _begin(self, worker: WorkerId) -> None:
        if worker in self._steps or self._is_parking:
            return
        if shares := self._compose(worker):
            for share in shares:
                self._announce(share.job)
            try:
                reserved = reserve(self._pool, self._step(worker, shares))
            except OutOfBlocks:
                self._out_of_blocks(worker, [share.job for share in shares])
                return
            self._items_max.pop(worker, None)
            self._begun_only.discard(worker)
            step = _Step(shares, reserved, self._step_us(worker, reserved))
            self._steps[worker] = step
            self._agenda.at(self._agenda.now_ns + step.measured_us * 1_000, partial(self._end, worker, step))

    def _compose(self, worker: WorkerId) -> list[Share]:
        order, queue = self.state.parameters.worker_order, self.state.desk.queue(worker)
        candidates = queue.in_order(order, self._agenda.now_ns)
        if worker in self._begun_only:
            candidates = filter(lambda job: job.begun, candidates)
        group = self._groups[worker]
        return compose(
            candidates,
            lambda job: self._pool.cached_blocks(group, job.chain),
            order,
            self._setup.step_limits,
            self._items_max.get(worker, STEP_ITEMS_MAX),
            self._setup.block_tokens,
        )

    def _announce(self, job: Job) -> None:
        if job.started:
            self.state.desk.start(job)
        else:
            self._say(decider.start(job, (self._agenda.now_ns - job.accepted_ns) // 1_000))

    def _step(self, worker: WorkerId, shares: list[Share]) -> PrefillStep:
        items = tuple(
            PrefillItem(
                each.job.key.engine_id, _TOKENS[: each.job.assign.prompt_tokens], each.job.chain, until=each.until
            )
            for each in shares
        )
        return PrefillStep(self.state.served.epoch, self._groups[worker], items)

    def _step_us(self, worker: WorkerId, reserved: list[Reserved]) -> int:
        sizes = [(each.end_tokens - each.cached_tokens, each.cached_tokens) for each in reserved]
        noise = max(NOISE_MIN, self._chance.gauss(1.0, self._setup.noise_sd))
        return round(step_us(self._truth, self._groups[worker].degree, sizes) * noise * self._straggler)

    def _end(self, worker: WorkerId, step: _Step) -> None:
        del self._steps[worker]
        degree = self._groups[worker].degree
        self.busy_gpu_us += degree * step.measured_us
        sizes = [(each.end_tokens - each.cached_tokens, each.cached_tokens) for each in step.reserved]
        costs = shared_out(self._setup.coefficients, degree, sizes, step.measured_us)
        results = [finish(self._pool, each, _FIRST_TOKEN if each.ends_prompt else None) for each in step.reserved]
        evicted = self._pool.take_evicted(self._groups[worker])
        for share, item, cost in zip(step.shares, results, costs, strict=True):
            share.job.progress.add(item.computed_tokens, cost.measured_us, cost.predicted_us)
            if item.outcome == "finished":
                self._finished(share.job, item, evicted)
            else:
                self._unfinished(share.job, item, evicted, degree)
            evicted = ()
        self._park()
        self._begin(worker)

    def _finished(self, job: Job, item: ItemResult, evicted: tuple[BlockId, ...]) -> None:
        done, since_us = job.progress, (self._agenda.now_ns - job.accepted_ns) // 1_000
        prefilled = Prefilled(
            item,
            evicted,
            queue_us=max(0, since_us - done.measured_us),
            prefill_us=done.measured_us,
            predicted_us=done.predicted_us,
            computed_tokens=done.computed_tokens,
            cached_tokens=job.assign.prompt_tokens - done.computed_tokens,
            steps=done.steps,
        )
        self._say(decider.complete(self.state, job, prefilled))
        if self._setup.handoff_s:
            self._agenda.after(self._setup.handoff_s, partial(self._first_token, job, prefilled))
        else:
            self._first_token(job, prefilled)

    def _first_token(self, job: Job, prefilled: Prefilled) -> None:
        self._pool.release(job.key.engine_id)
        self.state.desk.end(job)
        self.effects.prefilled(job, prefilled)

    def _unfinished(self, job: Job, item: ItemResult, evicted: tuple[BlockId, ...], degree: int) -> None:
        self._say(decider.chunk_done(self.state, job, item, evicted))
        done_tokens = item.cached_tokens + item.computed_tokens
        job.remaining_us = self._setup.coefficients.prefill_us(
            degree, job.assign.prompt_tokens - done_tokens, done_tokens
        )
        self._put_back(job)

    # --- steps that did not work out

    def _out_of_blocks(self, worker: WorkerId, jobs: list[Job]) -> None:
        """As the agent does: fewer at a time, those that were begun first, when a hand-off has ended, or not at all."""
        for job in jobs:
            self.state.desk.put_back(job)
        if len(jobs) > 1:
            self._items_max[worker] = len(jobs) // 2
        elif worker not in self._begun_only and any(job.begun for job in self.state.desk.queue(worker)):
            self._begun_only.add(worker)
        elif any(job.holds_prefill and job.worker == worker for job in self.state.desk):
            self._agenda.after(PINNED_S, partial(self._begin, worker))
            return
        else:
            self._abort(jobs[0], "out-of-blocks")
        self._begin(worker)

    def _put_back(self, job: Job) -> None:
        self.state.desk.put_back(job)
        if self.state.desk.is_draining(job.worker):
            self._abort(job, "draining")

    def _abort(self, job: Job, reason: AbortReason) -> None:
        self._say(decider.abort_job(job, reason))
        self._pool.release(job.key.engine_id)
        self.effects.aborted(job, reason)

    # --- facts

    def _say(self, facts: list[EventData]) -> None:
        self._journal.say(self._source, facts, own=self.learn)

    def check(self) -> None:
        """Every structure's own rules."""
        self._pool.check()
        self.state.desk.check()
