"""Which queued request goes to an idle worker: by hand, and that in whatever order things happen none is served twice.

`ROUND`: 1,000 uncached tokens take 1 s + 4 s / C.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from router_world import AGENT, ME, NOW_NS, ROUND, SECOND_NS, Log, arrival, pool_of, prefilled, started

from services.router import decider, stealing
from services.router.decider import Moment, State, assign_again, receive, redirect
from services.router.stealing import WAITING_MAX
from services.worker.desk import Desk
from services.worker.job import JobKey, Stage
from shared.contracts.commands import Accepted, Assign, SamplingSpec
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import (
    Cordoned,
    Frozen,
    NodeLost,
    ParametersChanged,
    PrefillAborted,
    RedirectReason,
    RequestAssigned,
    Uncordoned,
)
from shared.contracts.ids import NodeId, RequestId, RouterId, Source, WorkerId

BUSY, IDLE = WorkerId("n0/1/0"), WorkerId("n1/1/0")


def pool(**changes: object) -> Log:
    """A worker of degree 4 on each of two nodes, under `vertumnus` without the price of a GPU and with a β of 1."""
    log = Log()
    ours = {"placement_policy": "vertumnus", "lam_vertumnus": 0, "adaptive_beta": False, "beta": 1.0, **changes}
    log.fold(*pool_of(4), *pool_of(4, node="n1"), ParametersChanged(parameters_version=1, changes=ours, asked_by="t"))
    return log


def queue(log: Log, request: str, tokens: int = 1_000, salt: int | None = None) -> RequestAssigned:
    """At the first worker, whatever else there is. Prompts with one salt have one prefix."""
    salt = len(log.state.loads.open) if salt is None else salt
    log.fold(Cordoned(node=NodeId("n1"), asked_by="t"))
    facts = receive(log.state, arrival(request, tokens, salt=salt), Moment(NOW_NS, log.seq))
    log.fold(*facts, source=ME)
    log.fold(Uncordoned(node=NodeId("n1"), asked_by="t"))
    assert isinstance(facts[-1], RequestAssigned)
    return facts[-1]


def move(log: Log, source: Source = ME, staying: tuple[str, ...] = (), now_ns: int = NOW_NS) -> stealing.Move | None:
    idle = log.state.pool.workers[IDLE]
    return stealing.best_move(log.state, source, idle, now_ns, tuple(map(RequestId, staying)))


def test_who_would_wait_longest_goes() -> None:
    log = pool()
    for request, tokens in (("short", 100), ("long", 3_000), ("middle", 1_000)):
        queue(log, request, tokens)
    # The long one waits for 2.2 s; the middle one for 0.2 s and delays the long one by its own 2 s; a move takes 20 ms.
    assert move(log) == ("middle", 1, 2_180_000)
    assert move(log, staying=("middle",)) == ("long", 1, 2_180_000)
    assert move(log, staying=("long", "middle")) == ("short", 1, 2 * 200_000 - 20_000)


def test_another_router_s_work_before_one_s_own_is_a_reason_to_look_and_nothing_else_is() -> None:
    """Both chose the first worker before they had heard of each other. The other router has nothing there that could move."""
    log = pool()
    other = Source("router-2-0000")
    facts = receive(log.state, arrival("theirs", salt=9), Moment(NOW_NS, log.seq))
    queue(log, "ours")
    log.fold(*facts, source=other)

    def hears(source: Source, who: Source, fact: EventData) -> bool:
        return stealing.is_crowded(log.state, source, log.store(log.event(who, fact)))

    assert facts[-1].worker == BUSY  # type: ignore[attr-defined]
    assert hears(ME, other, facts[-1])
    assert not hears(Source("router-3-0000"), other, facts[-1]), "nobody of its own waits there"
    log.fold(started("theirs", BUSY))
    assert hears(ME, AGENT, started("theirs", BUSY))
    assert not hears(other, AGENT, started("theirs", BUSY)), "it knew of itself"
    assert [each.id for each in stealing.of_each_degree(stealing.idle_workers(log.state))] == [IDLE]
    assert move(log) == ("ours", 1, 2_000_000 - 20_000)
    log.fold(started("ours", BUSY))
    assert not hears(ME, AGENT, started("theirs", BUSY)), "who has started stays"


def test_of_a_long_line_only_the_end_is_looked_through() -> None:
    """Those at the end are another router's, so one's own is found only if it is among the last ones looked at."""
    log = pool()
    queue(log, "ours", 100)
    for number in range(WAITING_MAX):
        queue(log, f"theirs-{number}", 1_000 + number)
    for request, opened in log.state.loads.open.items():
        opened.source = ME if request == "ours" else Source("router-2-0000")
    assert move(log) is None
    log.fold(started(f"theirs-{WAITING_MAX - 1}", BUSY))
    found = move(log)
    assert found is not None
    assert found.request == "ours"


def test_what_another_gateway_forwards_stays() -> None:
    log = pool()
    for request, tokens in (("short", 100), ("middle", 1_000), ("long", 3_000)):
        queue(log, request, tokens)
    log.state.loads.open[RequestId("long")].placed_only = True
    found = move(log)
    assert found is not None
    assert found.request == "middle"


def test_a_move_that_gains_less_than_it_takes_is_none() -> None:
    for tokens, gain_us in ((10, None), (11, 2_000)):
        log = pool()
        queue(log, "first", tokens)
        log.fold(started("first", BUSY))
        queue(log, "next")
        # It waits for 2 ms per token, and a move takes 20.
        found = move(log)
        assert (found and found.gain_us) == gain_us


def test_what_is_cached_at_the_old_worker_is_lost_by_a_move() -> None:
    log = pool()
    first = queue(log, "first", salt=1)
    log.fold(started("first", BUSY))
    again = queue(log, "again", salt=1)
    assert first.service_us == 2_000_000
    assert again.cached_tokens == 900
    # It waits for 2 s, and would take 2 s instead of 0.29 there.
    assert move(log) == ("again", 1, 2_000_000 - 1_710_000 - 20_000)


def test_gpu_time_is_paid_for() -> None:
    log = pool(lam_vertumnus=0.5)
    log.fold(*pool_of(1, node="n2"))
    for request in ("first", "second"):
        queue(log, request, 1_000 if request == "first" else 2_000)
    large = move(log, staying=("first",))
    small = stealing.best_move(log.state, ME, log.state.pool.workers[WorkerId("n2/1/0")], NOW_NS, {RequestId("first")})
    assert large is not None
    assert large.gain_us == 2_000_000 - 20_000
    assert small is None, "10 s on one GPU for 4 s on four: 6 s more, for 2 s of waiting and half of 6 GPU-seconds"


def slow(log: Log, worker: WorkerId) -> None:
    """It takes 1.25 times what is predicted, in numbers that have no remainder when they fade."""
    done = prefilled("x", worker).model_copy(update={"prefill_us": 5 * 2**38, "predicted_us": 2**40})
    log.fold(*[done] * 10)


@pytest.mark.parametrize(("own_time", "gain_us"), [(False, 280_000), (True, 1_480_000)])
def test_at_a_slow_idle_worker_a_request_pays_for_its_own_time(own_time: bool, gain_us: int) -> None:
    """It waits for 2 s, takes 2 s here and 2.5 s there. With β 3 and λ 0.1 that is 6.8 s here; there 3.4 x 2.5 s, or 2.5 s
    and 2.4 x 2."""
    log = pool(beta=3.0, lam_vertumnus=0.1, ratio_in_own_time=own_time)
    slow(log, IDLE)
    queue(log, "first")
    log.fold(started("first", BUSY))
    queue(log, "next")
    assert move(log) == ("next", 1, gain_us)


@pytest.mark.parametrize(("own_time", "gain_us"), [(False, 4_503_000), (True, 3_303_000)])
def test_at_a_slow_busy_worker_only_the_prefill_is_slow(own_time: bool, gain_us: int) -> None:
    """It waits for 2.5 s. 95 ms of its 2.595 s are for a fetch: without the ratio it would be 2.095 s. With β 3 and λ 0.1
    that is 3.4 x 2.595 s, or 2.595 s and 2.4 x 2.095; at the idle worker 3.4 x 2 s."""
    log = pool(beta=3.0, lam_vertumnus=0.1, ratio_in_own_time=own_time)
    slow(log, BUSY)
    queue(log, "first")
    log.fold(started("first", BUSY), Cordoned(node=NodeId("n1"), asked_by="t"))
    received, given = receive(log.state, arrival("next", salt=7), Moment(NOW_NS, log.seq))
    assert isinstance(given, RequestAssigned)
    assert given.service_us == 2_500_000
    log.fold(received, given.model_copy(update={"service_us": 2_595_000, "fetch_from": IDLE}), source=ME)
    log.fold(Uncordoned(node=NodeId("n1"), asked_by="t"))
    assert move(log) == ("next", 1, gain_us)


@pytest.mark.parametrize(
    "changes",
    [{"stealing": False}, {"worker_order": "fcfs"}, {"placement_policy": "paper"}],
    ids=str,
)
def test_nobody_goes(changes: dict[str, object]) -> None:
    log = pool(**changes)
    for request in ("first", "second", "third"):
        queue(log, request)
    assert move(log) is None


def test_nobody_goes_in_a_freeze_or_to_who_may_not_have_it() -> None:
    log = pool()
    for request in ("first", "second", "third"):
        queue(log, request)
    assert move(log) is not None
    assert move(log, source=Source("other")) is None, "it is not theirs to move"
    assert [each.id for each in stealing.idle_workers(log.state)] == [IDLE]
    log.fold(Frozen(asked_by="t"))
    assert move(log) is None
    log = pool()
    for request in ("first", "second", "third"):
        queue(log, request)
    log.fold(NodeLost(node=NodeId("n1"), incarnation=1, reason="t"))
    assert move(log) is None
    assert stealing.idle_workers(log.state) == []


def test_the_decision_after_it_finds_the_idle_worker_and_may_come_back() -> None:
    log = pool()
    for request in ("first", "second", "third"):
        queue(log, request)
    found = move(log)
    assert found is not None
    log.fold(*redirect(log.state, found.request, found.attempt, "rebalanced"), source=ME)
    [again] = assign_again(log.state, found.request, 0, Moment(NOW_NS, log.seq))
    assert isinstance(again, RequestAssigned)
    assert (again.worker, again.attempt, again.excluded) == (IDLE, 2, {})


@pytest.mark.parametrize("attempts_max", range(2, 6))
def test_who_goes_and_is_refused_may_still_meet_a_worker_that_dies(attempts_max: int) -> None:
    log = pool(attempts_max=attempts_max)
    for request in ("first", "second", "third"):
        queue(log, request)
    found = move(log)
    assert (found is not None) == (attempts_max >= 4)
    reasons: tuple[RedirectReason, ...] = ("rebalanced", "full", "node-lost") if found else ()
    for attempt, reason in enumerate(reasons, 1):
        assert found is not None
        redirected = redirect(log.state, found.request, attempt, reason)
        assert [each.TYPE for each in redirected] == ["request-redirected"], "it has failed"
        log.fold(*redirected, source=ME)
        log.fold(*assign_again(log.state, found.request, 0, Moment(NOW_NS, log.seq)), source=ME)


class Router:
    """A real decider that hears of others when chance lets it; what it records is in the log a while later."""

    def __init__(self, world: "Rounds", number: int) -> None:
        self.world, self.source = world, Source(f"router-{number}-0")
        self.state: State = decider.initial(ROUND)
        self.seen = 0
        self.asked: dict[RequestId, int] = {}

    def hear(self) -> None:
        for stored in self.world.log[self.seen :]:
            if stored.event.source != self.source:
                decider.evolve(self.state, stored)
        self.seen = len(self.world.log)

    def record(self, facts: list[EventData]) -> None:
        for data in facts:
            event = self.world.told.event(self.source, data, self.world.now_ns)
            decider.evolve(self.state, Stored("log", 0, event))
            self.world.store(event)
            if isinstance(data, RequestAssigned):
                self.world.later(lambda data=data: self.world.give(self, data))  # type: ignore[misc]

    def receive(self, request: str, tokens: int) -> None:
        self.record(receive(self.state, arrival(request, tokens, salt=tokens % 7), self.moment()))

    def steal(self, idle: WorkerId) -> None:
        worker = self.state.pool.workers[idle]
        found = stealing.best_move(self.state, self.source, worker, self.world.now_ns, self.asked)
        if found is not None:
            self.asked[found.request] = found.attempt
            self.world.later(lambda: self.world.release(self, found))

    def again(self, request: RequestId, attempt: int, reason: str) -> None:
        self.record(redirect(self.state, request, attempt, reason))  # type: ignore[arg-type]
        self.record(assign_again(self.state, request, 0, self.moment()))

    def moment(self) -> Moment:
        return Moment(self.world.now_ns, self.seen)


class Rounds:
    """Four routers and the desks of eight workers. Every message arrives later, in an order of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.told, self.log, self.now_ns = Log(), list[Stored](), NOW_NS
        self.messages: list[Callable[[], None]] = []
        self.runs: Counter[RequestId] = Counter()
        self.moved: Counter[str] = Counter()
        ours = {"placement_policy": "vertumnus", "attempts_max": 20, "calibration": False}
        for data in (
            *pool_of(1, 1, 1, 1, 1, 1, 1, 1),
            ParametersChanged(parameters_version=1, changes=ours, asked_by="t"),
        ):
            self.store(self.told.event(AGENT, data))
        self.desk = Desk(1_000)
        self.desk.open_workers([WorkerId(f"n0/1/{rank}") for rank in range(8)])
        self.taken, self.refused = set[JobKey](), set[JobKey]()
        self.routers = [Router(self, number) for number in range(4)]

    def store(self, event: Envelope) -> None:
        self.log.append(Stored("log", len(self.log) + 1, event))

    def say(self, data: EventData) -> None:
        self.store(self.told.event(AGENT, data, self.now_ns))

    def later(self, message: Callable[[], None]) -> None:
        self.messages.append(message)

    def give(self, router: Router, data: RequestAssigned) -> None:
        """`assign`, as the driver sends it and the agent takes it."""
        rebalanced = data.attempt > 1 and not data.queue_us and not data.candidates[0].delayed_jobs
        assign = Assign(
            request=data.request, attempt=data.attempt, router=RouterId("r"), router_source=router.source, worker=data.worker,
            prompt_tokens=1, block_ids=b"", max_new_tokens=1, sampling=SamplingSpec(), service_us=data.service_us,
            rebalanced=rebalanced,
        )  # fmt: skip
        answer = self.desk.answer_to(JobKey(data.request, data.attempt)) or self.desk.refusal(assign)
        self.moved["refused" if answer else "taken"] += rebalanced
        if answer is not None:
            assert not isinstance(answer, Accepted)
            self.refused.add(JobKey(data.request, data.attempt))
            self.later(lambda: router.again(data.request, data.attempt, "full"))
            return
        self.taken.add(self.desk.accept(assign, self.now_ns).key)

    def release(self, router: Router, move: stealing.Move) -> None:
        """`release`, which a driver sends when its assignment was taken, and what it does with the answer."""
        key = JobKey(move.request, move.attempt)
        job = self.desk.find(*key)
        if key in self.refused or (job is None and key in self.taken) or (job and job.stage is not Stage.QUEUED):
            return
        if job is None:
            self.later(lambda: self.release(router, move))
            return
        self.say(PrefillAborted(request=move.request, attempt=move.attempt, worker=job.worker, reason="released"))
        self.desk.end(job)
        self.later(lambda: router.again(move.request, move.attempt, "rebalanced"))

    def step(self) -> None:
        """An idle worker begins with the head of its queue, or a busy one ends. The first is much faster than predicted."""
        worker = self.chance.choices(list(self.desk.workers), (30, 1, 1, 1, 1, 1, 1, 1))[0]
        if (jobs := self.desk.running().get(worker)) is not None:
            [job] = jobs
            self.desk.stream(job)
            self.desk.end(job)
            self.say(prefilled(job.assign.request, worker, job.assign.attempt))
        elif (head := next(self.desk.queue(worker).in_order("shortest-first", self.now_ns), None)) is not None:
            self.desk.start(head)
            self.runs[head.assign.request] += 1
            self.say(started(head.assign.request, worker, head.assign.attempt))

    def play(self) -> None:
        """One thing happens."""
        self.now_ns += self.chance.randrange(SECOND_NS // 10)
        match self.chance.randrange(8):
            case 0:
                self.chance.choice(self.routers).hear()
            case 1 | 2 | 3 | 4 if self.messages:
                self.messages.pop(self.chance.randrange(len(self.messages)))()
            case 5 | 6:
                self.step()
            case _:
                worker = WorkerId("n0/1/0")
                if worker not in self.desk.running() and not len(self.desk.queue(worker)):
                    for router in self.routers:
                        if self.chance.random() < 0.7:
                            router.hear()
                        router.steal(worker)


def test_four_routers_and_an_idle_worker_a_thousand_times_and_nothing_is_served_twice() -> None:
    """Every request is served exactly once, although routers act on old views and the same idle worker is wanted by all."""
    world = Rounds(1)
    requests = 0
    for router in world.routers:
        router.hear()
    for number in range(1_000):
        requests += 1
        world.routers[number // 20 % 4].receive(f"r{requests}", world.chance.choice((300, 1_000, 4_000)))
        for _ in range(0 if number % 20 else 160):
            world.play()
        world.desk.check()
    for _ in range(100_000):
        if sum(world.runs.values()) == requests and not world.messages and not world.desk.running():
            break
        world.play()
    assert world.runs == Counter({RequestId(f"r{number}"): 1 for number in range(1, requests + 1)})
    assert world.moved["taken"] > 20
    assert world.moved["refused"] > 10
    for router in world.routers:
        router.hear()
        router.state.loads.check()
        assert not router.state.loads.of_worker
