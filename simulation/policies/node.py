"""A node agent in virtual time: the agent's own decisions around steps that take as long as the cost model says.

What an agent does is `services.worker`'s: its state and events, admission, queue order, packing, KV index. Here is what its
shell does with them, less what needs a network: prompts need not be claimed, and KV is not moved to a decode rank.
"""

from collections.abc import Mapping
from functools import partial
from random import Random

from services.worker import cache_events, decider, geometry
from services.worker.admission import refuse_assign
from services.worker.decider import Geometry
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.protocol import RankAdopted
from services.worker.job import Stage
from shared.contracts.commands import Adopt, Assign, Drain, Refused
from shared.contracts.envelope import EventData, Stored
from shared.contracts.ids import NodeId, RequestId, Source
from simulation.policies.agenda import Agenda
from simulation.policies.journal import Journal
from simulation.policies.setup import Setup
from simulation.policies.steps import Around, Steps


class Node:
    """`assign`, `drain` and `adopt` are the agent's commands. `chance` is the noise of step times."""

    def __init__(
        self,
        node: NodeId,
        pools: Mapping[NodeId, KvPool],
        setup: Setup,
        agenda: Agenda,
        journal: Journal,
        chance: Random,
    ) -> None:
        self.engine = setup.engine(setup.nodes[node])
        self.state = decider.initial(node, setup.queue_max)
        self._setup = setup
        self._agenda = agenda
        self._journal = journal
        self._source = Source(node)
        around = Around(self.say, self._is_parking, self._park)
        self.steps = Steps(self.state, pools, setup, agenda, chance, around)
        self._draining: tuple[Drain, int, int] | None = None
        self._parked = False

    # --- what the agent is told

    def register(self) -> None:
        """The node's engine is up."""
        version, chunk_tokens = self._setup.coefficients.version, self._setup.step_limits.chunk_tokens
        self.say(decider.register(self.state, self.engine, version, chunk_tokens))

    def learn(self, stored: Stored) -> None:
        """An event of the control subject."""
        decider.evolve(self.state, stored)

    def assign(self, assign: Assign) -> Refused | None:
        """Queue it, and begin if the worker is idle."""
        refused = refuse_assign(self.state, self.engine, assign)
        if refused is None:
            self.state.desk.accept(assign, self._agenda.now_ns)
            self.steps.begin(assign.worker)
        return refused

    def release(self, request: RequestId, attempt: int) -> None:
        """Give a queued request back; one that has begun stays."""
        job = self.state.desk.find(request, attempt)
        if job is not None and job.stage is Stage.QUEUED:
            self.steps.abort(job, "released")

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
                self.steps.abort(job, "draining")
            self._park()
        return None

    def adopt(self, order: Adopt) -> Refused | None:
        """Switch, if no step runs: `rank-adopted-epoch` follows after the time that a switch takes."""
        refused = geometry.refuse_adopt(self.state, order, self.engine.prefill_ranks)
        wanted = Geometry(order.epoch, order.composition)
        if refused is None and wanted != self.state.served:
            assert not self.steps.running, "a node adopts when its steps have ended"
            self._parked = True
            seconds = self._setup.switch_s if self.state.served.epoch else 0.0
            self._agenda.after(seconds, partial(self._adopted, wanted, seconds))
        return refused

    def call_off(self) -> None:
        """The reconfiguration was aborted: the old workers take work again."""
        self._draining, self._parked = None, False
        self.state.desk.reopen()
        for worker in self.steps.groups:
            self.steps.begin(worker)

    def committed(self) -> None:
        """The geometry that is served is the pool's now: tell what its workers hold, and let those work that stayed."""
        for worker, group in self.steps.groups.items():
            number = self.state.numbers.get(worker, 0)
            self.say(cache_events.report(worker, self.state.incarnation, number, self.steps.pool.resident(group)))

    def _adopted(self, wanted: Geometry, seconds: float) -> None:
        if wanted == self.state.served:
            return
        # What is given back is placed again at once here, and must not come back to a queue that was emptied already.
        self.state.desk.drain(tuple(self.state.desk.workers))
        for worker in self.state.desk.workers:
            for job in list(self.state.desk.queue(worker)):
                self.steps.abort(job, "draining")
        self.steps.pool.adopt(wanted.composition)
        self.steps.open_workers(wanted.workers(self.state.node))
        resident = {worker: self.steps.pool.resident(group).runs for worker, group in self.steps.groups.items()}
        decider.serve(self.state, wanted, {each: sum(len(run) for _, run in runs) for each, runs in resident.items()})
        self._draining, self._parked = None, False
        ranks = tuple(RankAdopted(rank, seconds) for rank in range(self.engine.prefill_ranks))
        self.say(geometry.adopted(self.state, ranks))

    def _park(self) -> None:
        """When the retiring workers have ended their steps the others begin none, and when these have ended too, the node is
        drained."""
        if self._draining is None or self._parked:
            return
        order, since_ns, returned = self._draining
        if not self.steps.running.keys() & set(order.workers):
            self._parked = not self.steps.running
        if self._parked:
            drain_us = (self._agenda.now_ns - since_ns) // 1_000
            self.say(geometry.drained(self.state, order.workers, returned, drain_us))

    def _is_parking(self) -> bool:
        if self._draining is None:
            return self._parked
        return self._parked or not self.steps.running.keys() & set(self._draining[0].workers)

    # --- facts

    def say(self, facts: list[EventData]) -> None:
        """Facts of this node, which it folds first."""
        self._journal.say(self._source, facts, own=self.learn)

    def check(self) -> None:
        """Every structure's own rules."""
        self.steps.pool.check()
        self.state.desk.check()
