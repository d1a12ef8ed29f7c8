"""A rule in the place of the router's own: what it is shown, what it is told, and what is recorded of its choices."""

from collections.abc import Sequence

from services.router.decider import Moment, end, redirect
from shared.contracts.envelope import EventData
from shared.contracts.events import NodeLost, RequestAssigned, RequestFailed, RequestReceived, RequestRejected
from shared.contracts.ids import RequestId, WorkerId
from simulation.baselines.placing import Placing
from simulation.baselines.rule import Prompt, WorkerView
from simulation.baselines.simple import CentralQueue, RoundRobin
from tests.services.router.router_world import ME, NOW_NS, Log, arrival, chunk, pool_of, prefilled, started

FIRST, SECOND, THIRD = (WorkerId(f"n0/1/{rank}") for rank in (0, 1, 2))


class Scripted:
    """Says what it is told to say, and remembers what it was asked and told."""

    name = "scripted"

    def __init__(self) -> None:
        self.answer: WorkerId | None = FIRST
        self.asked: list[tuple[Prompt, Sequence[WorkerView]]] = []
        self.told: list[tuple[str, str, WorkerId]] = []

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        self.asked.append((prompt, workers))
        return self.answer

    def placed(self, request: RequestId, prompt: Prompt, worker: WorkerId) -> None:
        self.told.append(("placed", request, worker))

    def ended(self, request: RequestId, worker: WorkerId) -> None:
        self.told.append(("ended", request, worker))

    @property
    def seen(self) -> dict[WorkerId, WorkerView]:
        return {each.worker: each for each in self.asked[-1][1]}


class Ruled:
    """A router with a rule, and the log that it folds."""

    def __init__(self, rule: Scripted | CentralQueue | RoundRobin) -> None:
        self.placing, self.log = Placing(rule), Log()
        self.say(*pool_of(1, 1, 2))

    def say(self, *facts: EventData) -> None:
        for data in facts:
            self.placing.evolve(self.log.state, self.log.store(self.log.event(ME, data)))

    def ask(self, request: str, tokens: int = 1_000) -> EventData:
        facts = self.placing.receive(self.log.state, arrival(request, tokens), self.moment)
        self.say(*facts)
        return facts[-1]

    @property
    def moment(self) -> Moment:
        return Moment(NOW_NS, self.log.seq)


def test_what_is_outstanding_is_shown_until_the_first_token() -> None:
    rule = Scripted()
    router = Ruled(rule)
    router.ask("a", 1_050)
    assert rule.asked[0][0] == Prompt(1_050, arrival("a").chain, 100, NOW_NS)
    assert rule.seen[FIRST] == WorkerView(FIRST, 1, 0, 0, 0, 0, 0, 1_000)
    assert rule.seen[THIRD] == WorkerView(THIRD, 2, 0, 0, 0, 0, 0, 2_000)
    router.ask("b", 500)
    assert rule.seen[FIRST] == WorkerView(FIRST, 1, 0, 1, 0, 1_050, 0, 1_000)
    router.say(started("a", FIRST), chunk("a", FIRST, 1_000))
    router.ask("c", 450)
    # "c" has 4 whole blocks, which "a" begins with and has stored; "a" runs with 11 blocks, the last of them partial.
    assert rule.seen[FIRST] == WorkerView(FIRST, 1, 4, 1, 1, 1_550, 11, 1_000)
    router.say(prefilled("a", FIRST, tokens=1_050))
    router.ask("d")
    # Of 1,000 tokens one is always computed, so 9 blocks are of use. "c" has 50 tokens to compute.
    assert rule.seen[FIRST] == WorkerView(FIRST, 1, 9, 2, 0, 500 + 50, 0, 1_000)
    assert rule.told == [
        ("placed", "a", FIRST),
        ("placed", "b", FIRST),
        ("placed", "c", FIRST),
        ("ended", "a", FIRST),
        ("placed", "d", FIRST),
    ]


def test_a_choice_is_recorded_with_the_price_it_has_in_our_model() -> None:
    rule = Scripted()
    rule.answer = THIRD
    assigned = Ruled(rule).ask("a")
    assert isinstance(assigned, RequestAssigned)
    assert (assigned.worker, assigned.degree, assigned.policy) == (THIRD, 2, "scripted")
    # 1 s + 4 s / 2.
    assert (assigned.service_us, assigned.uncached_tokens) == (3_000_000, 1_000)
    assert [each.worker for each in assigned.candidates] == [THIRD]


def test_a_request_that_goes_elsewhere_or_fails_has_ended() -> None:
    rule = Scripted()
    router = Ruled(rule)
    router.ask("a")
    router.say(*redirect(router.log.state, RequestId("a"), 1, "full"))
    rule.answer = SECOND
    router.say(*router.placing.assign_again(router.log.state, RequestId("a"), 0, router.moment))
    assert FIRST not in rule.seen
    router.say(*end(router.log.state, RequestFailed(request=RequestId("a"), reason="engine")))
    router.ask("b")
    router.say(NodeLost(node="n0", incarnation=1, reason="engine"))
    assert rule.told == [
        ("placed", "a", FIRST),
        ("ended", "a", FIRST),
        ("placed", "a", SECOND),
        ("ended", "a", SECOND),
        ("placed", "b", SECOND),
        ("ended", "b", SECOND),
    ]
    assert isinstance(router.ask("c"), RequestRejected)


def test_what_a_rule_lets_wait_is_placed_later() -> None:
    router = Ruled(CentralQueue())
    # The highest degree first; then the first of equals.
    placed = [router.ask(each) for each in "abc"]
    assert [each.worker for each in placed if isinstance(each, RequestAssigned)] == [THIRD, FIRST, SECOND]
    assert isinstance(router.ask("d"), RequestReceived)
    assert router.placing.assign_again(router.log.state, RequestId("d"), 0, router.moment) == []
    router.say(started("b", FIRST), prefilled("b", FIRST))
    [assigned] = router.placing.assign_again(router.log.state, RequestId("d"), 0, router.moment)
    assert isinstance(assigned, RequestAssigned)
    assert (assigned.worker, assigned.attempt) == (FIRST, 1)
    assert isinstance(router.ask("e", tokens=10**6), RequestRejected)
