"""The router's decisions: what they free, that they repeat harmlessly, and that they can be derived again from the log."""

from collections.abc import Callable
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st
from router_world import (
    AGENT,
    ME,
    NOW_NS,
    OTHER,
    SECOND_NS,
    Log,
    arrival,
    committed,
    pool_of,
    prefilled,
    registered,
    started,
)

from services.router.decider import Moment, State, assign_again, end, evolve, initial, receive, redirect
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import (
    BlocksStored,
    CalibrationUpdated,
    NodeDeclaredLost,
    NodeLost,
    ParametersChanged,
    PrefillAborted,
    RequestAssigned,
    RequestCancelled,
    RequestFailed,
    RequestReceived,
    RequestRedirected,
    RouterLost,
)
from shared.contracts.ids import NodeId, RequestId, Source, WorkerId, node_of
from shared.model.cost import Coefficients

CONTROLLER = Source("controller-1-00000000")


def now(log: Log) -> Moment:
    return Moment(NOW_NS, log.seq)


def open_request(log: Log, request: str, source: Source = ME) -> RequestAssigned:
    facts = receive(log.state, arrival(request), now(log))
    log.fold(*facts, source=source)
    assert isinstance(facts[-1], RequestAssigned)
    return facts[-1]


def is_idle(state: State) -> bool:
    state.loads.check()
    loads = state.loads
    return not any(each.assignment for each in loads.open.values()) and not loads.of_worker and not loads.output_tokens


class TestRedirect:
    def test_frees_the_worker_and_goes_to_another(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4))
        first = open_request(log, "r1")
        log.fold(*redirect(log.state, RequestId("r1"), 1, "no-reply"), source=ME)
        assert is_idle(log.state)
        [second] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(second, RequestAssigned)
        assert (second.attempt, second.excluded) == (2, {"refused": 1})
        assert second.worker != first.worker

    def test_of_an_agent_that_did_not_answer_no_worker_is_asked_until_the_node_registers_anew(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 2, 2), *pool_of(1, node="n1"))
        first = open_request(log, "r1")
        assert first.worker == "n0/1/0", "4 ranks take 2 s, 1 takes 5 s"
        log.fold(*redirect(log.state, RequestId("r1"), 1, "no-reply", node_silent=True), source=ME)
        [second] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(second, RequestAssigned)
        assert (second.worker, second.excluded) == ("n1/1/0", {"silent": 3})
        assert [each.worker for each in second.candidates] == ["n1/1/0"]
        log.fold(registered("n0", 8, incarnation=2, epoch=1))
        [second] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(second, RequestAssigned)
        assert (second.worker, second.excluded) == ("n0/1/0", {})

    def test_a_node_that_registered_behind_what_the_assignment_had_seen_was_never_asked(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4), *pool_of(1, node="n1"))
        open_request(log, "r1")
        log.fold(registered("n0", 8, incarnation=2, epoch=1))
        log.fold(*redirect(log.state, RequestId("r1"), 1, "no-reply", node_silent=True), source=ME)
        [second] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(second, RequestAssigned)
        assert (second.worker, second.excluded) == ("n0/1/0", {})

    def test_a_node_that_gives_the_request_back_is_not_silent_any_more(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4))
        open_request(log, "r1")
        log.fold(*redirect(log.state, RequestId("r1"), 1, "no-reply", node_silent=True), source=ME)
        [second] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(second, RequestAssigned)
        assert (second.worker, second.excluded) == ("n0/1/0", {}), "there is no other node"
        log.fold(second, *redirect(log.state, RequestId("r1"), 2, "full"), source=ME)
        log.fold(*redirect(log.state, RequestId("r1"), 2, "full"), *pool_of(1, node="n1"), source=ME)
        [third] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(third, RequestAssigned)
        assert (third.worker, third.excluded) == ("n0/1/4", {"refused": 1})

    def test_a_record_of_before_says_nothing_of_the_node(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4), *pool_of(1, node="n1"))
        first = open_request(log, "r1")
        older = {"request": "r1", "attempt": 1, "worker": first.worker, "reason": "no-reply"}
        log.fold(RequestRedirected.model_validate(older), source=ME)
        [second] = assign_again(log.state, RequestId("r1"), 0, now(log))
        assert isinstance(second, RequestAssigned)
        assert (second.worker, second.excluded) == ("n0/1/4", {"refused": 1})

    def test_the_last_attempt_fails_the_request(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        open_request(log, "r1")
        for attempt in range(1, 4):
            log.fold(*redirect(log.state, RequestId("r1"), attempt, "full"), source=ME)
            log.fold(*assign_again(log.state, RequestId("r1"), 0, now(log)), source=ME)
        redirected, failed = redirect(log.state, RequestId("r1"), 4, "full")
        assert isinstance(redirected, RequestRedirected)
        assert failed == RequestFailed(request=RequestId("r1"), reason="attempts-exhausted")

    def test_is_decided_once_and_only_for_the_current_attempt(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        open_request(log, "r1")
        assert redirect(log.state, RequestId("r1"), 2, "full") == []
        assert assign_again(log.state, RequestId("r1"), 0, now(log)) == []
        log.fold(*redirect(log.state, RequestId("r1"), 1, "full"), source=ME)
        assert redirect(log.state, RequestId("r1"), 1, "full") == []
        assert redirect(log.state, RequestId("unknown"), 1, "full") == []

    def test_goes_on_behind_the_tokens_that_were_generated(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        worker = open_request(log, "r1").worker
        log.fold(prefilled("r1", worker))
        log.fold(*redirect(log.state, RequestId("r1"), 1, "aborted"), source=ME)
        [again] = assign_again(log.state, RequestId("r1"), 50, now(log))
        assert isinstance(again, RequestAssigned)
        assert again.uncached_tokens + again.cached_tokens == 1_050

    def test_waits_while_no_worker_is_there(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        open_request(log, "r1")
        log.fold(NodeLost(node=NodeId("n0"), incarnation=1, reason="test"))
        log.fold(*redirect(log.state, RequestId("r1"), 1, "node-lost"), source=ME)
        assert assign_again(log.state, RequestId("r1"), 0, now(log)) == []


class TestRelease:
    def test_a_prefill_frees_the_worker_and_the_end_frees_the_decode_rank(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        worker = open_request(log, "r1").worker
        log.fold(started("r1", worker), prefilled("r1", worker))
        assert not log.state.loads.of_worker
        assert log.state.loads.output_tokens == {"n0/decode/0": 10}
        log.fold(*end(log.state, RequestCancelled(request=RequestId("r1"))), source=ME)
        assert is_idle(log.state)
        assert end(log.state, RequestCancelled(request=RequestId("r1"))) == []

    def test_an_aborted_prefill_frees_the_worker(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        worker = open_request(log, "r1").worker
        log.fold(PrefillAborted(request=RequestId("r1"), attempt=1, worker=worker, reason="claim-lost"))
        assert not log.state.loads.of_worker

    def test_what_an_agent_says_of_an_old_attempt_counts_for_nothing(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        worker = open_request(log, "r1").worker
        log.fold(*redirect(log.state, RequestId("r1"), 1, "no-reply"), source=ME)
        log.fold(*assign_again(log.state, RequestId("r1"), 0, now(log)), source=ME)
        before = deepcopy(log.state.loads)
        log.fold(started("r1", worker), prefilled("r1", worker))
        assert log.state.loads == before

    def test_a_lost_router_leaves_nothing_and_is_heard_no_more(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        open_request(log, "r1", OTHER)
        log.fold(RouterLost(router="router-2", source=OTHER))
        assert is_idle(log.state)
        log.fold(*receive(log.state, arrival("r2"), now(log)), source=OTHER)
        assert is_idle(log.state)

    def test_a_lost_node_leaves_nothing(self) -> None:
        log = Log()
        log.fold(*pool_of(4), *pool_of(4, node="n1"))
        open_request(log, "r1")
        open_request(log, "r2")
        log.fold(NodeDeclaredLost(node=NodeId("n0"), incarnation=1, silent_us=1))
        assert set(log.state.loads.of_worker) == {"n1/1/0"}
        log.state.loads.check()

    def test_a_late_word_on_an_old_incarnation_voids_nothing(self) -> None:
        log = Log()
        log.fold(*pool_of(4), registered("n0", 4, incarnation=2, epoch=1))
        open_request(log, "r1")
        log.fold(NodeDeclaredLost(node=NodeId("n0"), incarnation=1, silent_us=1))
        assert set(log.state.loads.of_worker) == {"n0/1/0"}


def test_calibration_replaces_the_coefficients() -> None:
    log = Log()
    fitted = {"version": "fitted", "d": 1.0, "a": 0.0, "b": 0.0, "c": 0.0, "alpha": 0.0}
    log.fold(CalibrationUpdated(coefficients=fitted, samples=1, error_before=1.0, error_after=0.5))
    assert log.state.coefficients == Coefficients(version="fitted", d=1, a=0, b=0, c=0, alpha=0)


class World:
    """One router, the stream, and everybody else who writes to it. The router folds its own events when it records them
    and the stream as far as it was delivered; `derived` folds what the router had seen as a reader of the log would."""

    def __init__(self, policy: str = "paper") -> None:
        self.live = initial(Log().state.coefficients)
        self.stream: list[Envelope] = []
        self.seen_seq = 0
        self.own: list[Envelope] = []
        self.stored_own = 0
        self.decided: list[tuple[Callable[[State, Moment], list[EventData]], Moment, int, list[EventData]]] = []
        self.now_ns = NOW_NS
        self.incarnations = {"n0": 1, "n1": 1}
        self.epochs = {"n0": 1, "n1": 1}
        self.requests = 0
        self._log = Log()
        self._numbers: dict[WorkerId, int] = {}
        for data in (*self._pool("n0", 1, 1, 2, 4), *self._pool("n1", 4, 4)):
            self.append(AGENT, data)
        if policy != "paper":
            self.append(
                CONTROLLER,
                ParametersChanged(parameters_version=1, changes={"placement_policy": policy}, asked_by="ops"),
            )
        self.deliver(len(self.stream))

    def _pool(self, node: str, *composition: int) -> list[EventData]:
        return pool_of(*composition, node=node, fetches=True, chunk_tokens=500)

    def append(self, source: Source, data: EventData) -> None:
        self.stream.append(self._log.event(source, data, self.now_ns))

    def deliver(self, count: int) -> None:
        for envelope in self.stream[self.seen_seq : self.seen_seq + count]:
            self.seen_seq += 1
            if envelope.source != ME:
                evolve(self.live, Stored("log", self.seen_seq, envelope))

    def decide(self, decision: Callable[[State, Moment], list[EventData]]) -> None:
        moment = Moment(self.now_ns, self.seen_seq)
        facts = decision(self.live, moment)
        self.decided.append((decision, moment, len(self.own), facts))
        for data in facts:
            envelope = self._log.event(ME, data, self.now_ns)
            self.own.append(envelope)
            evolve(self.live, Stored("log", 0, envelope))

    def store_own(self) -> None:
        if self.stored_own < len(self.own):
            self.stream.append(self.own[self.stored_own])
            self.stored_own += 1

    def derived(self, seen_seq: int, own_before: int) -> State:
        """The log folded to `seen_seq`, then the router's own events that it had recorded and that lie behind that."""
        state = initial(self._log.state.coefficients)
        folded = 0
        for seq, envelope in enumerate(self.stream[:seen_seq], 1):
            if envelope.source == ME:
                folded += 1
            evolve(state, Stored("log", seq, envelope))
        assert folded <= own_before
        for envelope in self.own[folded:own_before]:
            evolve(state, Stored("log", 0, envelope))
        return state

    def assignments(self, source: Source | None = None) -> list[RequestAssigned]:
        """What agents know of: assignments that are in the stream."""
        return [
            each.data
            for each in self.stream
            if isinstance(each.data, RequestAssigned) and (source is None or each.source == source)
        ]

    def _prefill(self, job: RequestAssigned, pick: int) -> None:
        """It took between half and twice of what was predicted; its blocks are told, but not every time."""
        done = prefilled(job.request, job.worker, job.attempt)
        measured = {"prefill_us": job.service_us * (30 + pick) // 60, "predicted_us": job.service_us}
        fetched = {"cached_fetched_tokens": 100 * job.fetch_blocks, "fetched_from": job.fetch_from, "fetch_us": 6_000}
        self.append(AGENT, done.model_copy(update={**measured, **fetched}))
        chain = next(each.data for each in self.stream if getattr(each.data, "request", None) == job.request)
        assert isinstance(chain, RequestReceived)
        if pick % 5 and (blocks := len(chain.block_ids) // 16):
            number = self._numbers[job.worker] = self._numbers.get(job.worker, 0) + 1 + (pick == 7)
            stored = {"worker": job.worker, "incarnation": self.incarnations[node_of(job.worker)], "number": number}
            self.append(AGENT, BlocksStored(**stored, cause="prefill", request=job.request, blocks=blocks))

    def act(self, action: str, pick: int) -> None:
        own = sorted(request for request, each in self.live.loads.open.items() if each.source == ME)
        mine = RequestId(own[pick % len(own)]) if own else RequestId("none")
        node = ("n0", "n1")[pick % 2]
        known = self.assignments()
        theirs = known[pick % len(known)] if known else None
        match action:
            case "receive":
                self.requests += 1
                arriving = arrival(f"r{self.requests}", 300 + 100 * (pick % 30), salt=pick % 2)
                self.decide(lambda state, moment: receive(state, arriving, moment))
            case "redirect" if own:
                attempt = self.live.loads.open[mine].attempt
                reason = ("no-reply", "rebalanced")[pick % 2]
                silent = reason == "no-reply" and pick % 4 == 0
                self.decide(lambda state, _: redirect(state, mine, attempt, reason, node_silent=silent))
            case "again" if own:
                self.decide(lambda state, moment: assign_again(state, mine, pick, moment))
            case "end" if own:
                self.decide(lambda state, _: end(state, RequestCancelled(request=mine)))
            case "store":
                self.store_own()
            case "deliver":
                self.deliver(1 + pick % 3)
            case "other":
                self.requests += 1
                state = self.derived(len(self.stream), self.stored_own)
                arriving = arrival(f"o{self.requests}", 300 + 100 * (pick % 30))
                for data in receive(state, arriving, Moment(self.now_ns, max(0, len(self.stream) - pick % 3))):
                    self.append(OTHER, data)
            case "start" if theirs:
                self.append(AGENT, started(theirs.request, theirs.worker, theirs.attempt))
            case "prefill" if theirs:
                self._prefill(theirs, pick)
            case "lose":
                self.append(AGENT, NodeLost(node=NodeId(node), incarnation=self.incarnations[node], reason="test"))
            case "register":
                self.incarnations[node] += 1
                epoch = self.epochs[node]
                self.append(AGENT, registered(node, 8, incarnation=self.incarnations[node], epoch=epoch))
            case "switch":
                self.epochs[node] += 1
                self.append(AGENT, committed((8,) if pick % 4 < 2 else (4, 4), node, self.epochs[node]))
                self.append(AGENT, registered(node, 8, incarnation=self.incarnations[node], epoch=self.epochs[node]))
            case _:
                pass
        self.now_ns += SECOND_NS // 4


OFTEN = ("receive", "again", "store", "deliver", "start", "prefill")
ACTIONS = (*OFTEN, *OFTEN, "store", "deliver", "redirect", "end", "other", "lose", "register", "switch")
HISTORY = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 60)), min_size=10, max_size=60)


@settings(deadline=None, max_examples=150)
@given(HISTORY, st.sampled_from(["paper", "vertumnus"]))
def test_every_decision_can_be_derived_again_from_the_log(history: list[tuple[str, int]], policy: str) -> None:
    """Folding one's own events early commutes with the log: same state, so same prices (`3-protocols.md` 3.4)."""
    world = World(policy)
    for action, pick in history:
        world.act(action, pick)
        world.live.loads.check()
    derived = world.derived(world.seen_seq, len(world.own))
    assert derived.loads == world.live.loads
    assert derived.rate == world.live.rate
    assert derived.calibration == world.live.calibration
    for decision, moment, own_before, facts in world.decided:
        assert decision(world.derived(moment.seen_seq, own_before), moment) == facts


@settings(deadline=None, max_examples=100)
@given(HISTORY, st.booleans())
def test_nothing_stays_reserved_once_every_request_has_ended(history: list[tuple[str, int]], by_loss: bool) -> None:
    world = World()
    for action, pick in history:
        world.act(action, pick)
    for request, opened in list(world.live.loads.open.items()):
        if opened.source == ME:
            ending = RequestId(request)
            world.decide(lambda state, _, ending=ending: end(state, RequestCancelled(request=ending)))  # type: ignore[misc]
    while world.stored_own < len(world.own):
        world.store_own()
    if by_loss:
        world.append(AGENT, RouterLost(router="router-2", source=OTHER))
    else:
        for each in {each.request for each in world.assignments(OTHER)}:
            world.append(OTHER, RequestCancelled(request=each))
    world.deliver(len(world.stream))
    assert is_idle(world.live)
    assert not world.live.loads.open


def test_a_worker_id_is_no_worker_once_its_epoch_has_passed() -> None:
    log = Log()
    log.fold(*pool_of(4, 4))
    worker = open_request(log, "r1").worker
    log.fold(committed((8,), epoch=2), registered("n0", 8, incarnation=2, epoch=2))
    assert WorkerId(worker) not in log.state.pool.workers
    assert is_idle(log.state)
