"""A pool of deciders in one process whose routers and leaders lag behind the log by as much as chance wants.

The deciders are the services' own; agents and shells are scripted. Equal seeds tell equal logs.
"""

import random
from collections import deque
from collections.abc import Sequence
from uuid import UUID

from services.cachemgr import decider as cachemgr
from services.controller import decider as controller
from services.controller import epochs
from services.controller.capacity import Capacity
from services.router import decider as router
from services.router import turns
from shared.contracts.codec import decode, encode
from shared.contracts.envelope import Envelope, EventData, Stored, UnknownEvent
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    KvHandedOff,
    NodeLost,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestHeld,
    RequestReceived,
    RequestRejected,
    RouterRegistered,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, RouterId, Source, TenantId, WorkerId, node_of
from shared.model.cost import Coefficients
from tests.support.story import adopted, registered

COST = Coefficients(version="toy", d=1e-3, a=1e-5, b=1e-6, c=4e-5, alpha=1e-9, g=1e-4)
BLOCK_TOKENS = 100
COMPOSITION = (1, 1, 2, 4)
NODES = ("n0", "n1")
SHARING = {
    "tenants": {
        "few": {"weight": 3, "priority_max": 9, "queued_tokens_max": 15_000},
        "many": {"tokens_per_minute": 90_000, "requests_max": 40, "slo_ms": 900},
    },
    "share_s": 0.1,
    "held_s_max": 8,
    "queued_tokens_max": 75_000,
}
LIFE_MAX = 1_000_000
"""Ids, requests and routers of one life."""

START_NS = 1_800_000_000 * 10**9


class Process:
    """One deciding process: its state, how far it has folded, and what it has recorded that is not stored yet."""

    def __init__(self, name: str, state: object, evolve: object) -> None:
        self.source, self.state, self.evolve = Source(name), state, evolve
        self.seen_seq = 0
        self.numbered = 0
        self.outbox: deque[Envelope] = deque()


class World:
    """`log` is what was stored. With `tenants`, two of them share the pool under limits, and one asks for most. Another `life`
    of the pool has other processes, requests and ids."""

    def __init__(
        self, seed: int, routers: int = 3, policy: str = "paper", *, tenants: bool = False, life: int = 1
    ) -> None:
        self.chance = random.Random(seed)
        self.log: list[Stored] = []
        self.now_ns = START_NS
        self._ids = self._requests = self._joined = LIFE_MAX * (life - 1)
        self._numbers: dict[WorkerId, int] = {}
        self._held: dict[WorkerId, list[bytes]] = {}
        self._incarnations: dict[str, int] = {}
        self._prefixes = [self.chance.randbytes(16 * 20) for _ in range(6)]
        self.controller = Process(f"controller-{life}", controller.initial(), controller.evolve)
        self.cachemgr = Process(f"cachemgr-{life}", cachemgr.initial(COST), cachemgr.evolve)
        self.agents = {name: Process(f"worker-{name}-{life}", None, None) for name in NODES}
        self.routers: list[Process] = []
        self._upgraded = Process("router-next", None, None)
        self._jobs: dict[str, list[RequestAssigned]] = {name: [] for name in NODES}
        self._running: list[RequestAssigned] = []
        self._open: dict[RequestId, Process] = {}
        self._tenants = tenants
        self._begin()
        if tenants:
            self.commit(
                self.controller, controller.change_parameters(self.controller.state, SHARING, controller.Asker("a", ""))
            )
        if policy != "paper":
            changes = {"placement_policy": policy, "ratio_in_own_time": bool(seed % 2)}
            asker = controller.Asker("ann", "")
            self.commit(self.controller, controller.change_parameters(self.controller.state, changes, asker))
        for _ in range(routers):
            self.join_router()

    # --- the log

    def seal(self, process: Process, fact: EventData) -> Envelope:
        self._ids += 1
        process.numbered += 1
        envelope = Envelope(
            id=UUID(int=self._ids), type=fact.TYPE, version=fact.VERSION, pool="main", source=process.source,
            source_seq=process.numbered, time_ns=self.now_ns, correlation=getattr(fact, "request", None), data=fact,
        )  # fmt: skip
        return decode(encode(envelope))

    def store(self, envelope: Envelope) -> None:
        self.log.append(Stored("log", len(self.log) + 1, envelope))

    def fold(self, process: Process, to_seq: int) -> None:
        """Let a process see the log up to `to_seq`; what it recorded itself it has folded already."""
        own_recorded = process in self.routers
        for stored in self.log[process.seen_seq : to_seq]:
            is_folded = own_recorded and stored.event.source == process.source
            is_known = not isinstance(stored.data, UnknownEvent)
            is_heard = is_known and (process is not self.controller or stored.data.CHANNEL not in ("cache", "ledger"))
            if is_heard and not is_folded:
                process.evolve(process.state, stored)
            process.seen_seq = stored.stream_seq

    def commit(self, leader: Process, decisions: list[EventData]) -> None:
        """A leader whose fence holds: it has seen the last event of its subject."""
        for fact in decisions:
            self.store(self.seal(leader, fact))

    def record(self, process: Process, facts: list[EventData]) -> None:
        for fact in facts:
            envelope = self.seal(process, fact)
            process.outbox.append(envelope)
            process.evolve(process.state, Stored("log", 0, envelope))

    def say(self, node: str, fact: EventData) -> None:
        self.store(self.seal(self.agents[node], fact))

    def store_of_tomorrow(self) -> None:
        """An event of a version that is not known here, from a process that was upgraded first: nobody folds it."""
        self._ids += 1
        self._upgraded.numbered += 1
        self.store(
            Envelope(
                id=UUID(int=self._ids), type="request-teleported", version=7, pool="main", source=self._upgraded.source,
                source_seq=self._upgraded.numbered, time_ns=self.now_ns, correlation="r1", data=UnknownEvent(where=["mars"]),
            )
        )  # fmt: skip

    # --- who is there

    def _begin(self) -> None:
        self.commit(self.controller, [controller.take_leadership(self.controller.state, "controller-1", 1)])
        self.commit(
            self.cachemgr,
            [cachemgr.take_leadership(self.cachemgr.state, "cachemgr-1", 1, cachemgr.Began(1, 0, COST))],
        )
        for name in NODES:
            self.bring_up(name, 1, 1)

    def bring_up(self, name: str, incarnation: int, epoch: int) -> None:
        """A node registers, and the controller commits its epoch once every rank has adopted it."""
        spec = registered(name, incarnation).model_copy(
            update={"fetches": True, "chunk_tokens": 1_000, "coefficients_version": "toy"}
        )
        self.say(name, spec)
        self._incarnations[name] = incarnation
        self.fold(self.controller, len(self.log))
        for fact in adopted(name, epoch, incarnation=incarnation):
            self.say(name, fact)
        self.fold(self.controller, len(self.log))
        wanted = epochs.Wanted(NodeId(name), incarnation, epoch, COMPOSITION)
        self.commit(
            self.controller, epochs.commit(self.controller.state, wanted, lambda degree: Capacity(10_000_000 * degree))
        )
        for worker in [each for each in self._numbers if node_of(each) == name]:
            self._numbers[worker] = 0
            self._held[worker] = []

    def join_router(self, kept: Sequence[Stored] = (), first_seq: int = 1) -> Process:
        """`kept` is all that a router learns of what lies before `first_seq`, the first event that the log still has."""
        self._joined += 1
        process = Process(f"router-{self._joined}", router.initial(COST), router.evolve)
        self.routers.append(process)
        for each in kept:
            router.evolve(process.state, each._replace(kept=True))
        process.seen_seq = first_seq - 1
        self.fold(process, len(self.log))
        begun = RouterRegistered(
            router=RouterId(process.source), seen_seq=process.seen_seq, coefficients=COST.model_dump(),
            first_seq=first_seq, kept_events=len(kept),
        )  # fmt: skip
        self.record(process, [begun])
        return process

    # --- what happens

    def run(self, steps: int) -> None:
        """Anything may happen at each step; at the end everybody has said what they had to say."""
        happenings = (
            (self._lag, 8), (self._arrive, 6), (self._flush, 6), (self._start, 5), (self._finish, 5), (self._redirect, 1),
            (self._cancel, 1), (self._evict, 1), (self._window, 2), (self._scan, 1), (self._settle, 1), (self._operator, 2),
            (self._take_turns, 8 if self._tenants else 0), (self._arrive, 12 if self._tenants else 0),
        )  # fmt: skip
        choices = [happening for happening, weight in happenings for _ in range(weight)]
        for _ in range(steps):
            self.now_ns += self.chance.randrange(1, 40_000_000)
            self.chance.choice(choices)()
        for each in self.routers:
            while each.outbox:
                self.store(each.outbox.popleft())

    def _lag(self) -> None:
        process = self.chance.choice(self.routers)
        self.fold(process, self.chance.randint(process.seen_seq, len(self.log)))

    def _arrive(self) -> None:
        process = self.chance.choice(self.routers)
        self._requests += 1
        prompt_tokens = self.chance.randrange(50, 3_000)
        chain = (self.chance.choice(self._prefixes) + self.chance.randbytes(16 * 10))[
            : prompt_tokens // BLOCK_TOKENS * 16
        ]
        arrival = router.Arrival(
            RequestId(f"r{self._requests}"), TenantId("t"), "m", prompt_tokens, 5, 2_000_000, False,
            tuple(BlockId(chain[n : n + 16]) for n in range(0, len(chain), 16)),
        )  # fmt: skip
        if self._tenants:
            few = self._requests % 4 == 0
            arrival = arrival._replace(
                tenant=TenantId("few" if few else "many"), slo_us=None, hard_slo=self._requests % 3 == 0,
                priority=self._requests % 8,
            )  # fmt: skip
        moment = router.Moment(self.now_ns, process.seen_seq)
        facts = router.receive(process.state, arrival, moment)
        self.record(process, facts)
        if isinstance(facts[-1], (RequestAssigned, RequestHeld)):
            self._open[arrival.request] = process

    def _take_turns(self) -> None:
        process = self.chance.choice(self.routers)
        moment = router.Moment(self.now_ns, process.seen_seq)
        decided = [*turns.overdue(process.state, process.source, moment)]
        self.record(process, list(decided))
        while after := turns.next_turn(process.state, process.source, moment):
            self.record(process, list(after))
            decided += after
        for each in decided:
            if isinstance(each, RequestRejected):
                del self._open[each.request]

    def _flush(self) -> None:
        process = self.chance.choice(self.routers)
        for _ in range(self.chance.randint(0, len(process.outbox))):
            envelope = process.outbox.popleft()
            self.store(envelope)
            if isinstance(envelope.data, RequestAssigned):
                self._jobs[node_of(envelope.data.worker)].append(envelope.data)

    def _start(self) -> None:
        name = self.chance.choice(NODES)
        if not self._jobs[name]:
            return
        job = self._jobs[name].pop(self.chance.randrange(len(self._jobs[name])))
        self.say(name, PrefillStarted(request=job.request, attempt=job.attempt, worker=job.worker, queue_us=5))
        self._running.append(job)

    def _finish(self) -> None:
        if not self._running:
            return
        job = self._running.pop(self.chance.randrange(len(self._running)))
        name, place = node_of(job.worker), {"request": job.request, "attempt": job.attempt, "worker": job.worker}
        if self.chance.random() < 0.1:
            self.say(name, PrefillAborted(**place, reason="claim-lost"))
            return
        self.say(
            name,
            PrefillCompleted(
                **place, node_epoch=1, computed_tokens=job.uncached_tokens, queue_us=5,
                cached_own_tokens=0 if job.fetch_from else job.cached_tokens,
                cached_fetched_tokens=job.cached_tokens if job.fetch_from else 0,
                fetched_from=job.fetch_from, fetch_us=7_000 if job.fetch_from else 0,
                # n1 is slow.
                prefill_us=job.service_us * (8 if name == "n1" else 5) // 5, predicted_us=job.service_us,
            ),
        )  # fmt: skip
        self._store_blocks(name, job)
        self.say(name, KvHandedOff(**place, decode_worker=WorkerId(f"{name}/decode/0"), bytes=1, handoff_us=1))
        process = self._open.pop(job.request, None)
        if process is not None:
            fact = RequestCompleted(
                request=job.request, worker=job.worker, ttft_us=job.service_us, queue_us=5, prefill_us=job.service_us,
                handoff_us=1, tpot_us=1, output_tokens=5, cached_tokens=job.cached_tokens, finish="stop",
            )  # fmt: skip
            self.record(process, router.end(process.state, fact))

    def _store_blocks(self, name: str, job: RequestAssigned) -> None:
        chain = next(
            each.data.block_ids
            for each in self.log
            if isinstance(each.data, RequestReceived) and each.data.request == job.request
        )
        blocks = [chain[n : n + 16] for n in range(0, len(chain), 16)]
        held = self._held.setdefault(job.worker, [])
        first = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
        if first < len(blocks):
            number = self._numbers[job.worker] = self._numbers.get(job.worker, 0) + 1
            held += blocks[first:]
            self.say(
                name,
                BlocksStored(
                    worker=job.worker, incarnation=self._incarnations[name], number=number, cause="prefill",
                    request=job.request, first_depth=first, blocks=len(blocks) - first,
                ),
            )  # fmt: skip

    def _evict(self) -> None:
        worker = self.chance.choice(sorted(self._held) or [WorkerId("")])
        if worker and (held := self._held[worker]):
            number = self._numbers[worker] = self._numbers[worker] + 1
            name, block = node_of(worker), held.pop()
            fact = BlocksEvicted(
                worker=worker, incarnation=self._incarnations[name], number=number, cause="pressure", block_ids=block
            )
            self.say(name, fact)

    def _redirect(self) -> None:
        for request, process in list(self._open.items())[:1]:
            opened = process.state.loads.open.get(request)
            if opened is None or opened.worker is None:
                continue
            reason, silent = (("full", False), ("rebalanced", False), ("no-reply", True))[self._requests % 3]
            self.record(process, router.redirect(process.state, request, opened.attempt, reason, node_silent=silent))
            moment = router.Moment(self.now_ns, process.seen_seq)
            self.record(process, router.assign_again(process.state, request, 3, moment))
            if request not in process.state.loads.open:
                del self._open[request]

    def _cancel(self) -> None:
        if self._open:
            request = self.chance.choice(list(self._open))
            process = self._open.pop(request)
            self.record(process, router.end(process.state, RequestCancelled(request=request)))

    def _leads(self, leader: Process, channel: str) -> None:
        """Fold to anywhere behind the last event of its subject."""
        known = [each for each in self.log if not isinstance(each.data, UnknownEvent)]
        last = max(each.stream_seq for each in known if channel == each.data.CHANNEL)
        self.fold(leader, self.chance.randint(max(last, leader.seen_seq), len(self.log)))

    def _window(self) -> None:
        self._leads(self.controller, "control")
        self.commit(self.controller, controller.close_window(self.controller.state, self.now_ns))

    def _scan(self) -> None:
        self._leads(self.cachemgr, "cache-control")
        self.commit(self.cachemgr, cachemgr.scan(self.cachemgr.state))

    def _settle(self) -> None:
        self._leads(self.cachemgr, "cache-control")
        state = self.cachemgr.state
        told = {
            each: "busy"
            for each in [*state.operations.open, *state.operations.reclaiming]
            if self.chance.random() < 0.3
        }
        self.commit(self.cachemgr, cachemgr.settle(state, self.now_ns, told))

    def _operator(self) -> None:
        self._leads(self.controller, "control")
        state, asker = self.controller.state, controller.Asker("ann", "")
        decisions = self.chance.choice(
            [
                lambda: controller.change_parameters(state, {"beta": self.chance.choice([2.0, 3.0, 5.0])}, asker),
                lambda: controller.change_parameters(
                    state,
                    {
                        "cache_policy": self.chance.choice(["paper", "regret", "lru"]),
                        "theta_inter": 0.001,
                        "theta_intra": 0.5,
                        "copy_price_s": 0.0001,
                    },
                    asker,
                ),
                lambda: controller.change_parameters(state, {"window_s": self.chance.choice([1, 2])}, asker),
                lambda: controller.cordon(state, NodeId("n1"), asker),
                lambda: controller.uncordon(state, NodeId("n1"), asker),
                lambda: controller.freeze(state, asker),
                lambda: controller.thaw(state, asker),
            ]
        )()
        self.commit(self.controller, decisions)

    def kill_router(self) -> None:
        """Nothing more is asked of it; what it had recorded may still be stored after it was declared lost."""
        killed = self.routers.pop(0)
        self._open = {request: process for request, process in self._open.items() if process is not killed}
        self.fold(self.controller, len(self.log))
        self.commit(self.controller, controller.lose_routers(self.controller.state, [killed.source]))
        while killed.outbox:
            self.store(killed.outbox.popleft())

    def lose_node(self, name: str, incarnation: int) -> None:
        """The node ends; what ran there is gone."""
        self.say(name, NodeLost(node=NodeId(name), incarnation=incarnation, reason="rank died"))
        self._jobs[name].clear()
        self._running = [each for each in self._running if node_of(each.worker) != name]
