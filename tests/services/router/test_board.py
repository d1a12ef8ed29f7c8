"""Decisions out of columns against the rule worked out worker by worker, in pools to which anything may happen."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from one_by_one import cheapest
from router_world import ME, NOW_NS, ROUND, SECOND_NS, Log, arrival, chunk, committed, pool_of, prefilled, started

from services.router import decider
from services.router.decider import Moment, assign_again, receive, redirect, weigh
from services.router.placement import Question, digest
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    CalibrationUpdated,
    Cordoned,
    DrainStarted,
    EpochAborted,
    NodeLost,
    ParametersChanged,
    PrefillCompleted,
    RequestAssigned,
    Uncordoned,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId

NODES = {"n0": (1, 1, 2, 4), "n1": (8,), "n2": (2, 2)}
SPEC = {"fetches": True, "chunk_tokens": 500, "kv_bytes_per_token": 10, "blocks_per_rank": 60}

POLICIES: list[dict[str, object]] = [
    {"placement_policy": "vertumnus"},
    {"placement_policy": "vertumnus", "ratio_in_own_time": True},
    {"placement_policy": "vertumnus", "worker_order": "fcfs", "adaptive_beta": False},
    {"placement_policy": "vertumnus", "prefix_fetch": False, "calibration": False},
    {"placement_policy": "vertumnus", "ordered_queue": False, "in_flight_prefixes": False},
    {"placement_policy": "paper"},
    {"placement_policy": "least-work"},
]
PROMPTS = st.tuples(st.sampled_from((99, 900, 1_000, 2_500, 6_100)), st.integers(0, 2))
PLACES = st.integers(0, 10**6)


class Pools(RuleBasedStateMachine):
    """Three nodes; requests come, run in chunks, end and move; nodes are cordoned, drain, are lost and come back."""

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: dict[str, object]) -> None:
        self.log, self.now_ns, self.count, self.versions = Log(), NOW_NS, 0, 0
        self.numbers: dict[str, int] = {}
        self.incarnations = dict.fromkeys(NODES, 1)
        for node, composition in NODES.items():
            self.fold(*pool_of(*composition, node=node, **SPEC))
        self.change(policy)

    def fold(self, *facts: EventData, **more: Any) -> None:
        self.log.fold(*facts, time_ns=self.now_ns, **more)

    def one(self, place: int, *, has_started: bool | None = None) -> tuple[str, RequestAssigned | Any] | None:
        """One of the requests that are at a worker."""
        found = [
            (request, each)
            for request, each in self.log.state.loads.open.items()
            if each.assignment is not None
            and not each.assignment.prefilled
            and (has_started is None or each.assignment.started is has_started)
        ]
        return found[place % len(found)] if found else None

    @rule(policy=st.sampled_from(POLICIES))
    def change(self, policy: dict[str, object]) -> None:
        self.versions += 1
        self.fold(ParametersChanged(parameters_version=self.versions, changes=policy, asked_by="t"))

    @rule(prompt=PROMPTS)
    def ask(self, prompt: tuple[int, int]) -> None:
        self.count += 1
        tokens, salt = prompt
        asked = arrival(f"r{self.count}", tokens, salt=salt)
        facts = receive(self.log.state, asked, Moment(self.now_ns, self.log.seq))
        for each in facts:
            valid = type(each).model_validate(each.model_dump())
            assert valid == each, "what is made without being validated is not what is valid"
            assert valid.model_dump_json() == each.model_dump_json()
        self.fold(*facts, source=ME)

    @rule(seconds=st.sampled_from((0.05, 1.0, 4.0, 12.0, -2.0)))
    def pass_time(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)

    @rule(place=PLACES)
    def start(self, place: int) -> None:
        if (found := self.one(place, has_started=False)) is not None:
            request, opened = found
            self.fold(started(request, opened.worker, opened.attempt))

    @rule(place=PLACES, blocks=st.integers(1, 12))
    def store(self, place: int, blocks: int) -> None:
        found = self.one(place, has_started=True)
        if found is not None and (stored_tokens := min(100 * blocks, found[1].prompt_tokens // 100 * 100)):
            request, opened = found
            number = self.numbers[opened.worker] = self.numbers.get(opened.worker, 0) + 1
            done = chunk(request, opened.worker, stored_tokens)
            self.fold(done.model_copy(update={"number": number, "incarnation": self.incarnations[opened.worker[:2]]}))

    @rule(place=PLACES, slowness=st.sampled_from((1, 3, 16)))
    def finish(self, place: int, slowness: int) -> None:
        if (found := self.one(place)) is not None:
            request, opened = found
            done: PrefillCompleted = prefilled(request, opened.worker, opened.attempt)
            for _ in range(9):
                self.fold(done.model_copy(update={"prefill_us": slowness * 100_000, "predicted_us": 100_000}))

    @rule(place=PLACES, again=st.booleans(), silent=st.booleans())
    def give_back(self, place: int, again: bool, silent: bool) -> None:
        if (found := self.one(place)) is not None:
            request, opened = RequestId(found[0]), found[1]
            self.fold(*redirect(self.log.state, request, opened.attempt, "no-reply", node_silent=silent), source=ME)
            if again:
                self.fold(*assign_again(self.log.state, request, 1, Moment(self.now_ns, self.log.seq)), source=ME)

    @rule(node=st.sampled_from(sorted(NODES)), barred=st.booleans())
    def cordon(self, node: str, barred: bool) -> None:
        kind = Cordoned if barred else Uncordoned
        self.fold(kind(node=NodeId(node), asked_by="t"))

    @rule(drains=st.booleans())
    def drain(self, drains: bool) -> None:
        workers = (WorkerId("n0/1/0"), WorkerId("n0/1/1"))
        if drains:
            self.fold(DrainStarted(node=NodeId("n0"), epoch=2, workers=workers, deadline_us=0))
        else:
            self.fold(EpochAborted(node=NodeId("n0"), epoch=2, step="draining", reason="t"))

    @rule(node=st.sampled_from(sorted(NODES)), serves=st.booleans())
    def restart(self, node: str, serves: bool) -> None:
        """The new incarnation serves the epoch that was committed, or has yet to adopt it."""
        incarnation = self.incarnations[node]
        self.fold(NodeLost(node=NodeId(node), incarnation=incarnation, reason="t"))
        self.incarnations[node] = incarnation + 1
        joined, _ = pool_of(*NODES[node], node=node, **SPEC)
        self.fold(joined.model_copy(update={"incarnation": incarnation + 1, "epoch": 1 if serves else 0}))
        self.fold(committed(NODES[node], node))
        self.numbers = {worker: number for worker, number in self.numbers.items() if not worker.startswith(node)}

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def decides_as_it_is_written(self) -> None:
        state = self.log.state
        for tokens, salt in ((950, 0), (6_500, 1)):
            refused_by = (WorkerId("n1/1/0"),) if self.count % 2 else ()
            silent = (NodeId("n0"), NodeId("n2"))[: self.count % 3]
            chain = arrival("x", tokens, salt=salt).chain
            question = Question(tokens, chain, self.now_ns, refused_by, silent=silent)
            expected, excluded = cheapest(state, question)
            placement, why_not = weigh(state, question, runners_up=99)
            assert why_not == excluded
            if placement is None:
                assert not expected
                continue
            found = {each.worker: each for each in placement.candidates}
            assert placement.winner.worker == expected[0].worker
            prices = [(each.worker, each.price_us) for each in expected]
            assert [*map(placement.prices.digest, (1, 2))] == [digest(prices, 1), digest(prices, 2)]
            for each in expected:
                told = found[each.worker]
                assert (told.cached_tokens, told.queue_us, told.service_us, told.price_us, told.fetch_us) == (
                    each.cached_tokens, each.queue_us, each.service_us, each.price_us, each.fetch_us
                )  # fmt: skip
                assert (told.delayed_jobs, told.in_flight_tokens, told.fetch_from) == (
                    each.delayed_jobs, each.in_flight_tokens, each.fetch_from
                )  # fmt: skip
                assert told.ratio == each.ratio_ppm / 1e6
        state.board.check(state.pool, state.loads, state.calibration)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_has_waited_too_long_has_not_if_the_clock_is_set_back() -> None:
    log = Log()
    log.fold(*pool_of(8), ParametersChanged(parameters_version=1, changes=POLICIES[0], asked_by="t"))
    log.fold(*receive(log.state, arrival("long", 2_000), Moment(NOW_NS, log.seq)), source=ME)
    queues_us = []
    for seconds in (0, 600, 0):
        placement, _ = weigh(log.state, Question(1_000, arrival("x").chain, NOW_NS + seconds * SECOND_NS))
        assert placement is not None
        queues_us.append(placement.winner.queue_us)
    assert queues_us == [0, 3_000_000, 0]


def test_no_more_workers_wait_to_be_read_than_anybody_asks_about(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.fold(*pool_of(2, 2, 2, 2))
    for number in range(4):
        log.fold(*receive(log.state, arrival(f"r{number}"), Moment(NOW_NS, log.seq)), source=ME)
    monkeypatch.setattr(decider, "TOUCHED_MAX", 2)
    for request, opened in log.state.loads.open.items():
        log.fold(started(request, opened.worker), time_ns=NOW_NS)
        assert len(log.state.loads.touched) <= 2
    weigh(log.state, Question(1_000, arrival("x").chain, NOW_NS))
    log.state.board.check(log.state.pool, log.state.loads, log.state.calibration)


def test_what_was_measured_begins_anew_with_new_coefficients() -> None:
    log = Log()
    log.fold(*pool_of(8), ParametersChanged(parameters_version=1, changes=POLICIES[0], asked_by="t"))
    log.fold(*receive(log.state, arrival("r"), Moment(NOW_NS, log.seq)), source=ME)
    done = prefilled("r", "n0/1/0").model_copy(update={"prefill_us": 300_000, "predicted_us": 100_000})
    log.fold(*[done] * 9)
    ratios = []
    for _ in range(2):
        placement, _ = weigh(log.state, Question(1_000, arrival("x").chain, NOW_NS))
        assert placement is not None
        ratios.append(round(placement.winner.ratio, 3))
        fitted = ROUND.model_dump()
        log.fold(CalibrationUpdated(coefficients=fitted, samples=64, error_before=0.1, error_after=0.1))
    assert ratios == [3.0, 1.0]
