"""The routers in virtual time: each open request from its arrival to its one end, decided by `services.router.decider`.

A router decides on its own view of the log: it knows its own events at once and those of others when they have come.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from services.router import decider, turns
from services.router.decider import Arrival, Moment, State
from services.router.handshake import ABORT_REASON, REDIRECT_REASON
from services.router.stealing import Move
from services.worker.decider import Prefilled
from services.worker.job import Job
from shared.contracts.commands import Assign, Refused, SamplingSpec
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    AbortReason,
    EpochAborted,
    EpochCommitted,
    RedirectReason,
    RequestAssigned,
    RequestCompleted,
    RequestFailed,
    RequestHeld,
    RequestReceived,
    RequestRejected,
    RouterRegistered,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, Source, TenantId, node_of
from simulation.policies.agenda import Agenda
from simulation.policies.deciding import Router, routers_of
from simulation.policies.journal import Journal
from simulation.policies.node import Node
from simulation.policies.rebalancing import Rebalancing
from simulation.policies.setup import Setup
from simulation.policies.steps import Effects

NO_WORKER_WAIT_S = 5.0
"""As a router waits by default."""
TENANT, MODEL = TenantId("simulated"), "simulated"
_GREEDY = SamplingSpec(temperature=0)


class Asked(NamedTuple):
    """One request as it arrives. `chain` names the prompt's whole blocks."""

    at_ns: int
    prompt_tokens: int
    chain: tuple[BlockId, ...]
    slo_us: int | None = None
    tenant: TenantId = TENANT
    hard_slo: bool | None = None
    priority: int = 0


class Ended(NamedTuple):
    """How a request ended: with a first token, or without one."""

    asked: Asked
    slo_us: int
    assigned: RequestAssigned | None
    completed: RequestCompleted | None


class _Open(NamedTuple):
    router: Router
    asked: Asked
    slo_us: int
    block_ids: bytes


class Routers:
    """Requests go to the routers in turn. `ended` is told once of each."""

    def __init__(
        self,
        setup: Setup,
        agenda: Agenda,
        journal: Journal,
        nodes: Mapping[NodeId, Node],
        ended: Callable[[Ended], None],
    ) -> None:
        self._setup = setup
        self._agenda = agenda
        self._journal = journal
        self._nodes = nodes
        self._ended = ended
        self.routers = tuple(routers_of(setup, agenda, journal))
        self._open: dict[RequestId, _Open] = {}
        self._assigned: dict[RequestId, RequestAssigned] = {}
        self._waiting: dict[RequestId, Callable[[], bool]] = {}
        self._held: dict[RequestId, None] = {}
        self._count = 0
        for node in nodes.values():
            node.steps.effects = Effects(self._prefilled, self._aborted)
        self._rebalancing = Rebalancing(self.routers, agenda, setup.view_age_s, self._release)
        journal.listen(self._hear)
        journal.listen(self._rebalancing.hear)

    def register(self) -> None:
        """The routers are up."""
        for router in self.routers:
            coefficients = self._setup.coefficients.model_dump()
            seen_seq = router.view.seen_seq
            registered = RouterRegistered(router=router.id, seen_seq=seen_seq, coefficients=coefficients)
            self._journal.say(router.source, [registered])

    @property
    def open_requests(self) -> int:
        return len(self._open)

    # --- a request's life

    def arrive(self, asked: Asked) -> None:
        """A client asks."""
        self._count += 1
        router = self.routers[self._count % len(self.routers)]
        request = RequestId(f"q{self._count}")
        slo_us = self._setup.coefficients.slo_us(asked.prompt_tokens) if asked.slo_us is None else asked.slo_us
        self._open[request] = _Open(router, asked, slo_us, b"".join(asked.chain))
        arrival = Arrival(
            request=request,
            tenant=asked.tenant,
            model=MODEL,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=1,
            slo_us=slo_us,
            stream=False,
            chain=asked.chain,
            hard_slo=asked.hard_slo,
            priority=asked.priority,
        )
        if not self._receive(arrival, last_try=False):
            self._wait(
                request, partial(self._receive, arrival), decide_last=lambda: self._receive(arrival, last_try=True)
            )

    def _receive(self, arrival: Arrival, last_try: bool = False) -> bool:
        router = self._open[arrival.request].router
        facts = router.deciding.receive(router.view.look(), arrival, self._moment(router))
        if isinstance(facts[-1], RequestRejected) and facts[-1].reason == "no-worker" and not last_try:
            return False
        self._journal.say(router.source, facts)
        match facts[-1]:
            case RequestAssigned() as assigned:
                self._give(assigned)
            case RequestReceived():
                self._held[arrival.request] = None
            case RequestHeld():
                self._take_turns()
                held_s_max = router.view.look().parameters.held_s_max
                self._agenda.after(held_s_max, partial(self._settle, router, turns.overdue))
            case _:
                self._close(arrival.request, None)
        return True

    def _give(self, assigned: RequestAssigned, *, rebalanced: bool = False) -> None:
        self._assigned[assigned.request] = assigned
        if self._setup.dispatch_s:
            self._agenda.after(self._setup.dispatch_s, partial(self._given, assigned, rebalanced))
        else:
            self._given(assigned, rebalanced)

    def _given(self, assigned: RequestAssigned, rebalanced: bool) -> None:
        router, asked, _, block_ids = self._open[assigned.request]
        assign = Assign(
            request=assigned.request,
            attempt=assigned.attempt,
            router=router.id,
            router_source=router.source,
            worker=assigned.worker,
            decode_worker=assigned.decode_worker,
            prompt_tokens=asked.prompt_tokens,
            block_ids=block_ids,
            max_new_tokens=1,
            sampling=_GREEDY,
            service_us=assigned.service_us,
            ratio=assigned.ratio,
            fetch_from=assigned.fetch_from,
            fetch_blocks=assigned.fetch_blocks,
            rebalanced=rebalanced,
        )
        match self._nodes[node_of(assigned.worker)].assign(assign):
            case Refused() as refused:
                self._redirect(assigned, REDIRECT_REASON.get(refused.reason, "aborted"))
            case None:
                pass

    def _prefilled(self, job: Job, prefilled: Prefilled) -> None:
        request = job.assign.request
        router, asked, _, _ = self._open[request]
        ttft_us = (self._agenda.now_ns - asked.at_ns) // 1_000
        fetch_us = job.fetched.us if job.fetched else 0
        completed = RequestCompleted(
            request=request,
            worker=job.worker,
            ttft_us=ttft_us,
            queue_us=prefilled.queue_us,
            fetch_us=fetch_us,
            prefill_us=prefilled.prefill_us,
            handoff_us=max(0, ttft_us - prefilled.queue_us - fetch_us - prefilled.prefill_us),
            tpot_us=0,
            output_tokens=1,
            cached_tokens=prefilled.cached_tokens,
            finish="length",
        )
        self._journal.say(router.source, decider.end(router.view.look(), completed))
        self._close(request, completed)
        self._serve_held()
        self._agenda.after(self._setup.view_age_s, self._take_turns)
        self._rebalancing.ended()

    def _aborted(self, job: Job, reason: AbortReason) -> None:
        why: RedirectReason = "rebalanced" if reason == "released" else ABORT_REASON.get(reason, "aborted")
        self._redirect(self._assigned[job.assign.request], why)

    def _redirect(self, assigned: RequestAssigned, reason: RedirectReason) -> None:
        request = assigned.request
        router = self._open[request].router
        facts = decider.redirect(router.view.look(), request, assigned.attempt, reason)
        self._journal.say(router.source, facts)
        if any(isinstance(fact, RequestFailed) for fact in facts):
            self._close(request, None)
        elif facts and not self._place_again(request, reason):
            self._wait(request, partial(self._place_again, request), decide_last=partial(self._fail, request))

    def _place_again(self, request: RequestId, reason: RedirectReason | None = None) -> bool:
        router = self._open[request].router
        facts = router.deciding.assign_again(router.view.look(), request, 0, self._moment(router))
        self._journal.say(router.source, facts)
        for fact in facts:
            if isinstance(fact, RequestAssigned):
                # It may have found a better place than the idle worker, and takes its turn there.
                winner = fact.candidates[0]
                idle = not winner.queue_us and not winner.delayed_jobs
                self._give(fact, rebalanced=reason == "rebalanced" and idle)
        return bool(facts)

    def _release(self, move: Move) -> None:
        assigned = self._assigned[move.request]
        self._nodes[node_of(assigned.worker)].release(move.request, move.attempt)

    def _fail(self, request: RequestId) -> None:
        router = self._open[request].router
        failed = RequestFailed(request=request, reason="no-worker")
        self._journal.say(router.source, decider.end(router.view.look(), failed))
        self._close(request, None)

    def _close(self, request: RequestId, completed: RequestCompleted | None) -> None:
        opened = self._open.pop(request)
        self._ended(Ended(opened.asked, opened.slo_us, self._assigned.pop(request, None), completed))

    # --- waiting for a worker

    def _serve_held(self) -> None:
        """What a rule lets wait at its router is asked about again, in order of arrival, whenever a worker has ended one."""
        for request in tuple(self._held):
            if not self._place_again(request):
                break
            del self._held[request]

    def _take_turns(self) -> None:
        for router in self.routers:
            while self._settle(router, turns.next_turn):
                pass

    def _settle(self, router: Router, decide: Callable[[State, Source, Moment], Sequence[turns.Turn]]) -> bool:
        """As a router's waiting room: do what is decided of those who wait there."""
        decided = decide(router.view.look(), router.source, self._moment(router))
        for each in decided:
            self._journal.say(router.source, [each])
            self._give(each) if isinstance(each, RequestAssigned) else self._close(each.request, None)
        return bool(decided)

    def _wait(self, request: RequestId, try_again: Callable[[], bool], decide_last: Callable[[], object]) -> None:
        self._waiting[request] = try_again

        def give_up() -> None:
            if self._waiting.get(request) is try_again:
                del self._waiting[request]
                decide_last()

        self._agenda.after(NO_WORKER_WAIT_S, give_up)

    def _hear(self, stored: Stored) -> None:
        if self._waiting and isinstance(stored.data, (EpochCommitted, EpochAborted)):
            self._agenda.after(self._setup.view_age_s, self._try_again)

    def _try_again(self) -> None:
        for request, try_again in list(self._waiting.items()):
            if self._waiting.pop(request, None) is not None and not try_again():
                self._waiting[request] = try_again

    def _moment(self, router: Router) -> Moment:
        return Moment(self._agenda.now_ns, router.view.seen_seq)
