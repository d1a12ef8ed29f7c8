"""Limits and shares by sums done by hand. `ROUND`: 1,000 uncached tokens take 1 s + 4 s / C, cached ones 0.1 s."""

from typing import Any

import pytest
from router_world import ME, NOW_NS, SECOND_NS, Log, arrival, pool_of, prefilled, started

from services.router import decider, turns
from services.router.admission import Books, idle_in_s, last_minute
from services.router.decider import Arrival, Moment, receive
from services.router.usage import SECONDS_MAX, total
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    LimitMet,
    ParametersChanged,
    RequestAssigned,
    RequestCancelled,
    RequestHeld,
    RequestReceived,
    RequestRejected,
    RouterLost,
)
from shared.contracts.ids import RequestId, RouterId, Source, TenantId, WorkerId
from shared.model.parameters import changed

OTHER = Source("router-2-0000")


def pool(*composition: int, **changes: Any) -> Log:
    log = Log()
    log.fold(*pool_of(*composition))
    if changes:
        told = {
            name: value
            for name, value in changed(log.state.parameters, changes).model_dump(mode="json").items()
            if name in changes
        }
        log.fold(ParametersChanged(parameters_version=1, changes=told, asked_by="ops"))
    return log


def of(tenant: str, request: str, tokens: int = 1_000, **more: Any) -> Arrival:
    return arrival(request, tokens)._replace(tenant=TenantId(tenant), **more)


def ask(log: Log, asked: Arrival, now_ns: int = NOW_NS, source: Source = ME) -> Any:
    """What was decided of it, folded."""
    facts = receive(log.state, asked, Moment(now_ns, log.seq))
    log.fold(*facts, source=source)
    log.state.usage.check(log.state.loads)
    return facts[-1]


def turn(log: Log, now_ns: int = NOW_NS, source: Source = ME) -> list[turns.Turn]:
    decided = turns.next_turn(log.state, source, Moment(now_ns, log.seq))
    log.fold(*decided, source=source)
    log.state.usage.check(log.state.loads)
    return decided


def met(fact: EventData) -> LimitMet:
    assert isinstance(fact, RequestRejected)
    assert fact.limit is not None
    return fact.limit


def finish(log: Log, request: str, worker: str) -> None:
    log.fold(started(request, WorkerId(worker)), prefilled(request, WorkerId(worker)))


def test_the_first_worker_that_is_done_decides_how_long_nobody_finds_room() -> None:
    """Each takes 2 s at degree 4, and there are two workers."""
    log = pool(4, 4)
    expected = [1, 1, 2, 2, 4]
    for number, wait_s in enumerate(expected):
        state = log.state
        assert idle_in_s(Books(state.usage, state.parameters, state.pool, state.loads), NOW_NS) == wait_s
        ask(log, of("a", str(number)))
    nothing = Log().state
    assert idle_in_s(Books(nothing.usage, nothing.parameters, nothing.pool, nothing.loads), NOW_NS) is None


class TestLimits:
    def test_open_requests(self) -> None:
        log = pool(4, 4, tenants={"a": {"requests_max": 2}})
        assert isinstance(ask(log, of("a", "1")), RequestAssigned)
        assert isinstance(ask(log, of("a", "2"), NOW_NS + SECOND_NS), RequestAssigned)
        refused = ask(log, of("a", "3"), NOW_NS + SECOND_NS)
        assert met(refused) == LimitMet(name="requests", scope="a", allowed=2, used=2, added=1)
        assert (refused.reason, refused.retry_after_s) == ("rate-limited", 30), "two a minute, so one in half of it"
        assert isinstance(ask(log, of("b", "4")), RequestAssigned), "nobody else is meant"
        log.fold(RequestCancelled(request=RequestId("1")), source=ME)
        assert isinstance(ask(log, of("a", "5")), RequestAssigned)

    def test_tokens_of_the_last_minute(self) -> None:
        """1,000 at second 0 and 2,000 at second 10 of 3,500 allowed: 700 fit again at second 60, 2,000 at second 70."""
        log = pool(4, 4, tenants={"a": {"tokens_per_minute": 3_500}})
        ask(log, of("a", "1"), NOW_NS)
        ask(log, of("a", "2", 2_000), NOW_NS + 10 * SECOND_NS)
        later = NOW_NS + 15 * SECOND_NS
        for tokens, wait_s in ((700, 45), (2_000, 55), (3_501, None)):
            refused = ask(log, of("a", f"r{tokens}", tokens), later)
            assert met(refused) == LimitMet(
                name="tokens-per-minute", scope="a", allowed=3_500, used=3_000, added=tokens
            )
            assert refused.retry_after_s == wait_s
        assert isinstance(ask(log, of("a", "500", 500), later), RequestAssigned)
        assert isinstance(ask(log, of("a", "600", 600), NOW_NS + 60 * SECOND_NS), RequestAssigned)

    def test_a_router_whose_clock_is_far_ahead_hides_nobody_s_tokens(self) -> None:
        log = pool(4, 4, tenants={"a": {"tokens_per_minute": 3_500}})
        ask(log, of("a", "1", 3_000), NOW_NS)
        for minutes in range(2, 90):
            ask(log, of("b", f"ahead-{minutes}", 10), NOW_NS + minutes * 60 * SECOND_NS, source=OTHER)
        ask(log, of("a", "ahead", 400), NOW_NS + 180 * SECOND_NS, source=OTHER)
        refused = ask(log, of("a", "2"), NOW_NS + SECOND_NS)
        assert met(refused).used == 3_000, "and what is three minutes ahead is in no minute here"
        assert isinstance(ask(log, of("a", "3"), NOW_NS + 61 * SECOND_NS), RequestAssigned)

    def test_what_is_kept_of_seconds_is_bounded_and_the_minute_is_in_it(self) -> None:
        log = pool(4, 4, tenants={"a": {"tokens_per_minute": 10**9}, "b": {}})
        for second in range(SECONDS_MAX + 100):
            ask(log, of("a", f"{second}", 10), NOW_NS + second * SECOND_NS)
            log.fold(RequestCancelled(request=RequestId(f"{second}")), source=ME)
        usage = log.state.usage
        assert len(usage.seconds) == SECONDS_MAX
        usage.check(log.state.loads)
        now_ns = NOW_NS + (SECONDS_MAX + 99) * SECOND_NS
        assert last_minute(usage, TenantId("a"), now_ns).tokens == 600

    @pytest.mark.parametrize("limit", ["tenant", "pool"])
    def test_queued_tokens(self, limit: str) -> None:
        changes: dict[str, Any] = {"queued_tokens_max": 2_500}
        log = pool(4, **(changes if limit == "pool" else {"tenants": {"a": changes}}))
        first = ask(log, of("a", "1"))
        ask(log, of("a", "2"))
        refused = ask(log, of("a", "3"))
        scope, reason = ("pool", "overloaded") if limit == "pool" else ("a", "rate-limited")
        assert met(refused) == LimitMet(name="queued-tokens", scope=scope, allowed=2_500, used=2_000, added=1_000)
        assert (refused.reason, refused.retry_after_s) == (reason, 15), "500 of 2,000 a minute"
        finish(log, "1", first.worker)
        assert isinstance(ask(log, of("a", "4")), RequestAssigned)

    def test_whoever_is_not_listed_counts_with_the_others(self) -> None:
        log = pool(4, 4, tenants={"a": {}, "*": {"requests_max": 2}}, share_s=60)
        for tenant in ("x", "y", "a", "a", "a"):
            assert isinstance(ask(log, of(tenant, f"{tenant}{log.seq}")), RequestAssigned)
        assert met(ask(log, of("z", "z"))) == LimitMet(name="requests", scope="*", allowed=2, used=2, added=1)

    def test_requests_of_every_router_count_until_it_is_lost(self) -> None:
        log = pool(4, 4, tenants={"a": {"requests_max": 1}})
        ask(log, of("a", "1"), source=OTHER)
        assert met(ask(log, of("a", "2"))).used == 1
        log.fold(RouterLost(router=RouterId("r2"), source=OTHER))
        assert isinstance(ask(log, of("a", "3")), RequestAssigned)


class TestObjectives:
    def test_a_hard_one_is_refused_rather_than_missed(self) -> None:
        """A prompt of 1,000 takes 2 s at degree 4."""
        log = pool(4)
        hard = {"slo_us": 3_500_000, "hard_slo": True}
        assert isinstance(ask(log, of("a", "1", **hard)), RequestAssigned)
        late = ask(log, of("a", "2", **hard))
        assert met(late) == LimitMet(name="ttft-us", scope="n0/1/0", allowed=3_500_000, used=2_000_000, added=2_000_000)
        assert (late.reason, late.retry_after_s) == ("slo", 1), "half a second too much"
        assert isinstance(ask(log, of("a", "3", slo_us=3_500_000)), RequestAssigned), "a soft one is tried"
        never = ask(log, of("a", "4", slo_us=1_500_000, hard_slo=True))
        assert (never.reason, never.retry_after_s) == ("slo", None)

    def test_a_dearer_worker_that_is_in_time_gets_it(self) -> None:
        """Degree 1 takes 5 s and is the cheaper by λ; with 4.9 s of objective only degree 4 is in time."""
        log = pool(4, 1, 1, 1, 1, beta=1, lam=10)
        soft = ask(log, of("a", "1", slo_us=4_900_000))
        assert soft.degree == 1
        log.fold(RequestCancelled(request=RequestId("1")), source=ME)
        hard = ask(log, of("a", "2", slo_us=4_900_000, hard_slo=True))
        assert (hard.degree, hard.excluded) == (4, {"slo": 4})

    def test_a_tenants_objective_holds_unless_the_request_names_one(self) -> None:
        log = pool(4, tenants={"a": {"slo_ms": 1_000, "hard_slo": True}})
        received, rejected = receive(log.state, of("a", "1", slo_us=None), Moment(NOW_NS, log.seq))
        assert isinstance(received, RequestReceived)
        assert (received.slo_us, received.hard_slo) == (1_000_000, True)
        assert isinstance(rejected, RequestRejected)
        assert isinstance(ask(log, of("a", "2", slo_us=None, hard_slo=False)), RequestAssigned)
        assert isinstance(ask(log, of("a", "3", slo_us=9_000_000)), RequestAssigned)
        [received, _] = receive(log.state, of("b", "4", slo_us=None), Moment(NOW_NS, log.seq))
        assert isinstance(received, RequestReceived)
        assert received.slo_us == log.state.coefficients.slo_us(1_000), "the model's"


SHARED = {"tenants": {"a": {"priority_max": 3}, "b": {}}, "share_s": 4}
"""Of one worker each may have 2 s of work, a prompt of 1,000 at degree 4, or an eighth of it who was given more than half."""


class TestTurns:
    def test_beyond_its_share_a_tenant_waits_and_goes_on_when_the_share_is_free(self) -> None:
        log = pool(4, **SHARED)
        first = ask(log, of("a", "1"))
        held = ask(log, of("a", "2"))
        assert isinstance(held, RequestHeld)
        assert (held.outstanding_us, held.share_us, held.service_us) == (2_000_000, 250_000, 2_000_000)
        assert (held.uncached_tokens, held.ahead) == (1_000, 0)
        assert turn(log) == []
        assert isinstance(ask(log, of("b", "3")), RequestAssigned), "the other has its share"
        finish(log, "1", first.worker)
        [went] = turn(log)
        assert isinstance(went, RequestAssigned)
        assert (went.request, went.attempt) == ("2", 1)
        assert turn(log) == []

    def test_who_was_given_less_than_its_part_has_all_of_its_share(self) -> None:
        """Of 8 s each has 4. a has 3 s of work on the worker, and 1,500 of 3,500 tokens; b has more than half of them."""
        log = pool(4, **{**SHARED, "share_s": 8})
        for tenant, tokens in (("b", 2_000), ("a", 1_000), ("a", 500)):
            assert isinstance(ask(log, of(tenant, f"{tenant}{tokens}", tokens)), RequestAssigned)
        held = ask(log, of("b", "held", 100))
        assert isinstance(held, RequestHeld)
        assert held.share_us == 500_000
        later = ask(log, of("b", "later", 100), NOW_NS + 11 * SECOND_NS)
        assert isinstance(later, RequestHeld)
        assert later.share_us == 4_000_000, "what was given is forgotten; one of its own waits already"

    def test_nobody_waits_while_a_worker_has_nothing_to_do(self) -> None:
        log = pool(4, 4, **{**SHARED, "share_s": 0})
        assert isinstance(ask(log, of("a", "1")), RequestAssigned)
        assert isinstance(ask(log, of("a", "2")), RequestAssigned)
        assert isinstance(ask(log, of("a", "3")), RequestHeld)

    def test_without_a_second_entry_nobody_waits(self) -> None:
        log = pool(4, tenants={"a": {}}, share_s=0)
        assert all(isinstance(ask(log, of("a", str(n))), RequestAssigned) for n in range(20))

    def test_nobody_overtakes_his_own_tenants_line_but_the_more_urgent(self) -> None:
        log = pool(4, **SHARED)
        first = ask(log, of("a", "1"))
        ask(log, of("a", "2"), NOW_NS + 1)
        held = ask(log, of("a", "small", 100), NOW_NS + 2)
        assert isinstance(held, RequestHeld)
        assert held.ahead == 1
        ask(log, of("a", "urgent", priority=9), NOW_NS + 3)
        finish(log, "1", first.worker)
        assert [each.request for _ in range(3) for each in turn(log, NOW_NS + 4)] == ["urgent"]

    @pytest.mark.parametrize(("weight", "order"), [(3, ["a2", "b2"]), (1, ["b2", "a2"])])
    def test_whose_tenant_was_given_least_by_weight_goes_first(self, weight: int, order: list[str]) -> None:
        """a has had 2,000 uncached tokens and b 1,000: at weight 3 that is less, at weight 1 it is more."""
        log = pool(4, tenants={"a": {"weight": weight}, "b": {}}, share_s=0)
        first = [ask(log, of("a", "a1", 2_000)), ask(log, of("b", "b1"))]
        for tenant in ("a", "b"):
            assert isinstance(ask(log, of(tenant, f"{tenant}2")), RequestHeld)
        for each in first:
            finish(log, each.request, each.worker)
        assert [turn(log)[0].request for _ in range(2)] == order

    def test_an_urgent_one_goes_before_other_tenants_if_its_tenant_may_say_so(self) -> None:
        log = pool(4, **{**SHARED, "share_s": 0})
        first = [ask(log, of("a", "a1")), ask(log, of("b", "b1"))]
        ask(log, of("b", "b2", priority=9), NOW_NS)
        ask(log, of("a", "a2", priority=1), NOW_NS + 1)
        for each in first:
            finish(log, each.request, each.worker)
        assert [turn(log, NOW_NS + 2)[0].request for _ in range(2)] == ["a2", "b2"]

    def test_whoever_has_waited_too_long_is_told(self) -> None:
        log = pool(4, **SHARED, held_s_max=3)
        ask(log, of("a", "1"))
        ask(log, of("a", "2"), NOW_NS)
        ask(log, of("a", "3", slo_us=4_000_000, hard_slo=False), NOW_NS + SECOND_NS)
        at = [turns.overdue(log.state, ME, Moment(NOW_NS + round(s * SECOND_NS), log.seq)) for s in (3, 3.1)]
        assert at[0] == []
        [over] = at[1]
        assert (over.request, met(over).name, met(over).used) == ("2", "held-us", 3_100_000)

    def test_a_hard_objective_ends_the_waiting(self) -> None:
        """2 s of work are due within 5 s: there is no sense in waiting for more than 3 s, or in a queue of 2 s after 2 s."""
        log = pool(4, **SHARED)
        ask(log, of("b", "0"))
        first = ask(log, of("a", "1"))
        held = ask(log, of("a", "2", slo_us=6_500_000, hard_slo=True), NOW_NS)
        assert isinstance(held, RequestHeld)
        assert held.hard_slo_us == 6_500_000
        assert turns.overdue(log.state, ME, Moment(NOW_NS + 4 * SECOND_NS, log.seq)) == []
        [late] = turns.overdue(log.state, ME, Moment(NOW_NS + 5 * SECOND_NS, log.seq))
        assert (met(late).used, met(late).added) == (5_000_000, 2_000_000)
        finish(log, "1", first.worker)
        [late] = turn(log, NOW_NS + 3 * SECOND_NS)
        assert (late.request, met(late).used, met(late).added) == ("2", 3_000_000, 4_000_000)

    def test_a_router_lets_go_its_own_alone(self) -> None:
        log = pool(4, **SHARED)
        first = ask(log, of("a", "1"))
        ask(log, of("a", "2"), source=OTHER)
        finish(log, "1", first.worker)
        assert turn(log) == []
        assert [each.request for each in turn(log, source=OTHER)] == ["2"]

    def test_what_another_gateway_forwards_cannot_wait(self) -> None:
        log = pool(4, **SHARED)
        ask(log, of("a", "1"))
        refused = ask(log, of("a", "2", placed_only=True))
        assert met(refused) == LimitMet(name="share-us", scope="a", allowed=250_000, used=2_000_000, added=2_000_000)
        assert refused.retry_after_s == 4

    def test_what_another_gateway_forwards_need_not_wait_while_a_worker_has_nothing_to_do(self) -> None:
        log = pool(4, 4, **{**SHARED, "share_s": 0})
        workers = [ask(log, of("a", request, placed_only=True)).worker for request in ("1", "2")]
        assert sorted(workers) == ["n0/1/0", "n0/1/4"]
        assert met(ask(log, of("a", "3", placed_only=True))).name == "share-us"

    def test_a_turn_that_would_be_late_at_the_cheapest_worker_is_taken_at_one_that_is_in_time(self) -> None:
        """Degree 1 takes 5 s and is the cheaper by λ; after 3 s of waiting only degree 4, which takes 2 s, is in time."""
        log = pool(4, 1, 1, 1, 1, **SHARED, beta=1, lam=10)
        for _ in range(5):
            ask(log, of("a", f"a{log.seq}"))
        hard = {"slo_us": 6_000_000, "hard_slo": True}
        assert isinstance(ask(log, of("a", "hard", **hard)), RequestHeld)
        for request, opened in list(log.state.loads.open.items()):
            if opened.worker is not None:
                log.fold(RequestCancelled(request=request), source=ME)
        [went] = turn(log, NOW_NS + 3 * SECOND_NS)
        assert isinstance(went, RequestAssigned)
        assert (went.request, went.degree, went.excluded) == ("hard", 4, {"slo": 4})

    def test_what_was_given_is_counted_by_entry(self) -> None:
        """Sums over a minute are those over its requests, of one tenant, of the unlisted together, and of all."""
        log = pool(4, tenants={"a": {}, "b": {}, "unused": {}})
        given = [("a", 100, 0), ("x", 200, 1), ("b", 300, 1), ("y", 400, 1), ("a", 500, 70), ("x", 600, 70)]
        for number, (tenant, tokens, second) in enumerate(given):
            log.fold(*receive(log.state, of(tenant, str(number), tokens), Moment(NOW_NS + second * SECOND_NS, 0))[:1])
            assigned = decider.assign_again(
                log.state, RequestId(str(number)), 0, Moment(NOW_NS + second * SECOND_NS, 0)
            )
            log.fold(*assigned)
        whose: dict[str | None, tuple[str, ...]] = {
            "a": ("a",), "b": ("b",), "x": ("x", "y"), "z": ("x", "y"), "unused": (), None: ("a", "b", "x", "y"),
        }  # fmt: skip
        first_s = NOW_NS // SECOND_NS
        for tenant, counted in whose.items():
            asked = TenantId(tenant) if tenant is not None else None
            for since in (0, 1, 70):
                tokens = [tokens for name, tokens, second in given if name in counted and second >= since]
                found = total(served for _, served in log.state.usage.served(asked, first_s + since))
                assert (found.requests, found.tokens) == (len(tokens), sum(tokens)), (tenant, since)
