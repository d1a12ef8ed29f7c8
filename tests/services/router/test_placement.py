"""The placement rule against sums done by hand. `ROUND`: 1,000 uncached tokens take 1 s + 4 s / C, cached ones 0.1 s."""

import struct
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import (
    ME,
    NOW_NS,
    ROUND,
    SECOND_NS,
    Log,
    arrival,
    blocks,
    chunk,
    pool_of,
    prefilled,
    registered,
    started,
)

from services.router.board import Lines
from services.router.decider import Moment, look, receive, weigh
from services.router.outlook import weights
from services.router.placement import Able, Placement, Question, choose, digest
from services.router.pricing import Pricing, Ways, recorded_lines
from services.router.roster import Roster
from shared.contracts.events import (
    BlocksStored,
    Cordoned,
    DrainStarted,
    NodeLost,
    ParametersChanged,
    RequestAssigned,
    RequestReceived,
    RequestRejected,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId
from shared.model.calibration import PPM
from shared.model.cost import Coefficients
from shared.model.parameters import Parameters

PAPER = Parameters()


class Candidate(NamedTuple):
    """One worker, before it has a price."""

    worker: WorkerId
    degree: int
    cached_tokens: int
    queue_us: int


def candidate(worker: str, degree: int, cached: int = 0, queue_s: float = 0.0) -> Candidate:
    return Candidate(WorkerId(f"{worker}/1/0"), degree, cached, round(queue_s * 1e6))


def place(
    *candidates: Candidate, tokens: int = 1_000, parameters: Parameters = PAPER, coefficients: Coefficients = ROUND
) -> Placement:
    listed = sorted(candidates)
    roster = Roster((each.worker, each.degree) for each in listed)
    lines = recorded_lines(
        Lines.empty(roster), (each.queue_us for each in listed), [0] * len(listed), [PPM] * len(listed)
    )
    pricing = Pricing(coefficients, tokens, weights(parameters, 0), roster, roster.smallest, lines, 0, ordered=True)
    priced = pricing.of(Ways(np.array([each.cached_tokens for each in listed])))
    return choose(Able(roster, roster.all_W), priced, lambda _: "exact")


def eligible(log: Log, question: Question) -> tuple[dict[str, int], dict[WorkerId, str]]:
    """The workers that may have the request, with what is cached there, and why each of the others may not."""
    able, excluded, cached_W = look(log.state, question)
    rows = log.state.board.roster.rows
    return {each: int(cached_W[rows[each]]) for each in able.roster.workers} if able else {}, dict(excluded)


def ask(
    tokens: int = 1_000, *, now_ns: int = NOW_NS, refused_by: tuple[str, ...] = (), silent: tuple[str, ...] = ()
) -> Question:
    chain = blocks(tokens // 100)
    return Question(tokens, chain, now_ns, tuple(map(WorkerId, refused_by)), silent=tuple(map(NodeId, silent)))


def assign(log: Log, request: str, tokens: int = 1_000, now_ns: int = NOW_NS) -> RequestAssigned:
    facts = receive(log.state, arrival(request, tokens), Moment(now_ns, log.seq))
    log.fold(*facts, source=ME)
    assert isinstance(facts[-1], RequestAssigned)
    return facts[-1]


class TestPrice:
    def test_parts_on_an_idle_pool(self) -> None:
        placement = place(candidate("a", 1), candidate("b", 2), candidate("c", 4), candidate("d", 8))
        # s = 5, 3, 2, 1.5 s; λ prices C·s - 5 = 0, 1, 3, 7 s.
        parts = {p.degree: (p.service_us, p.occupancy_us, p.price_us) for p in placement.candidates}
        assert parts == {
            1: (5_000_000, 0, 15_000_000),
            2: (3_000_000, 100_000, 9_100_000),
            4: (2_000_000, 300_000, 6_300_000),
            8: (1_500_000, 700_000, 5_200_000),
        }
        assert placement.winner.worker == "d/1/0"
        assert placement.preferred_degree == 8

    def test_lambda_is_zero_at_the_smallest_eligible_degree_whichever_it_is(self) -> None:
        placement = place(candidate("b", 2, cached=500), candidate("c", 4))
        smallest = next(p for p in placement.candidates if p.degree == 2)
        assert smallest.occupancy_us == 0
        # The baseline of c: C_min = 2 with c's own R and P, so 4·2 s - 2·3 s = 2 s.
        assert next(p for p in placement.candidates if p.degree == 4).occupancy_us == 200_000

    def test_a_high_lambda_keeps_a_request_off_large_workers(self) -> None:
        everybody = (candidate("a", 1), candidate("d", 8))
        # 15 s against 4.5 + 7λ: even at λ = 1.5, where the lower id wins.
        assert place(*everybody, parameters=Parameters(lam=1.49)).winner.worker == "d/1/0"
        assert place(*everybody, parameters=Parameters(lam=1.5)).winner.worker == "a/1/0"

    def test_cached_tokens_lower_the_price(self) -> None:
        placement = place(candidate("a", 4), candidate("b", 4, cached=900))
        # R = 100, P = 900: 0.1 + 0.09 + 0.4 / 4 = 0.29 s.
        assert (placement.winner.worker, placement.winner.service_us) == ("b/1/0", 290_000)

    def test_a_queue_is_weighed_against_beta_times_the_service(self) -> None:
        # b: 3·0.29 + q against 6.0: it wins until q reaches 5.13 s.
        assert place(candidate("a", 4), candidate("b", 4, cached=900, queue_s=5.1)).winner.worker == "b/1/0"
        assert place(candidate("a", 4), candidate("b", 4, cached=900, queue_s=5.2)).winner.worker == "a/1/0"

    def test_preferred_degree_ignores_queues(self) -> None:
        placement = place(candidate("a", 1), candidate("d", 8, queue_s=100))
        assert (placement.winner.degree, placement.preferred_degree) == (1, 8)

    def test_equal_prices_go_to_the_lower_queue(self) -> None:
        # β = 3: 0.87 s + 5.13 s of queue against 6 s of service and none.
        placement = place(candidate("a", 4, cached=900, queue_s=5.13), candidate("b", 4))
        assert placement.candidates[0].price_us == placement.candidates[1].price_us
        assert placement.winner.worker == "b/1/0"

    def test_equal_queues_go_to_the_lower_id(self) -> None:
        assert place(candidate("n1", 4), candidate("n01", 4), candidate("n02", 4)).winner.worker == "n01/1/0"

    def test_least_work_is_the_least_queue(self) -> None:
        placement = place(
            candidate("a", 1, queue_s=1.0), candidate("d", 8, queue_s=1.1), parameters=Parameters(frozen=True)
        )
        assert (placement.winner.worker, placement.policy) == ("a/1/0", "least-work")
        assert placement.winner.price_us == placement.winner.queue_us
        assert (placement.beta, placement.lam, placement.preferred_degree) == (0, 0, 8)

    def test_least_work_on_an_idle_pool_takes_the_fastest(self) -> None:
        policy = Parameters(placement_policy="least-work")
        assert place(candidate("a", 1), candidate("d", 8), parameters=policy).winner.worker == "d/1/0"

    def test_lambda_counts_from_the_smallest_degree_that_is_in_time(self) -> None:
        log = Log()
        log.fold(*pool_of(1, 1, 2, 4), *pool_of(8, node="n1"))
        placement, excluded = weigh(log.state, ask()._replace(within_us=2_500_000))
        assert placement is not None
        assert excluded == dict.fromkeys(("n0/1/0", "n0/1/1", "n0/1/2"), "slo")
        # 4·2 s are no extra; 8·1.5 s are 4 s more.
        assert {each.degree: each.occupancy_us for each in placement.candidates} == {4: 0, 8: 400_000}


class TestRecord:
    def test_winner_then_best_of_each_degree_then_the_next_four(self) -> None:
        small = [candidate(f"s{i}", 1, queue_s=i) for i in range(8)]
        large = [candidate(f"l{i}", 4, queue_s=i) for i in range(8)]
        placement = place(*small, *large)
        assert [p.worker.split("/")[0] for p in placement.candidates] == ["l0", "s0", "l1", "l2", "l3", "l4"]

    def test_digest_covers_every_price_in_id_order(self) -> None:
        placement = place(candidate("b", 2), candidate("a", 1))
        prices = [(each.worker, each.price_us) for each in placement.candidates]
        told = {
            1: b"a/1/0 15000000\nb/1/0 9100000",
            2: b"a/1/0\nb/1/0\n" + struct.pack("<2q", 15_000_000, 9_100_000),
        }
        for version, raw in told.items():
            expected = blake2b(raw, digest_size=16).hexdigest()
            assert placement.prices.digest(version) == digest(prices, version) == expected

    def test_a_part_of_a_roster_is_of_the_rows_that_were_asked_for_last(self) -> None:
        roster = Roster([(WorkerId("n0/1/0"), 2), (WorkerId("n0/1/2"), 4), (WorkerId("n1/1/0"), 8)])
        parts = [roster.only(np.array(rows)) for rows in ([0, 1], [1, 2], [0, 1])]
        assert [each.workers for each in parts] == [roster.workers[:2], roster.workers[1:], roster.workers[:2]]
        assert [each.smallest for each in parts] == [2, 4, 2]

    def test_rows_are_in_the_order_of_ids_however_they_come(self) -> None:
        roster = Roster([(WorkerId("n1/1/0"), 2), (WorkerId("n01/1/8"), 4), (WorkerId("n01/1/0"), 8)])
        assert (roster.workers, roster.degree_W.tolist()) == (("n01/1/0", "n01/1/8", "n1/1/0"), [8, 4, 2])


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 9), st.integers(0, 10**7)), min_size=1, max_size=20
    ),
    st.floats(1, 10),
    st.floats(0, 2),
)
def test_the_winner_is_the_argmin_of_the_formula(workers: list[tuple[int, int, int]], beta: float, lam: float) -> None:
    coefficients = Coefficients(version="x", d=0.03, a=4.468e-05, b=2e-06, c=5.2e-05, alpha=6.1e-09)
    candidates = [Candidate(WorkerId(f"n0/1/{i:02}"), C, 100 * p, q) for i, (C, p, q) in enumerate(workers)]
    placement = place(*candidates, parameters=Parameters(beta=beta, lam=lam), coefficients=coefficients)
    smallest = min(C for C, _, _ in workers)

    def price(each: Candidate) -> tuple[int, int, str]:
        R, P = 1_000 - each.cached_tokens, each.cached_tokens
        service = coefficients.prefill_us(each.degree, R, P)
        extra = each.degree * service - smallest * coefficients.prefill_us(smallest, R, P)
        return each.queue_us + round(beta * service) + round(lam * extra), each.queue_us, each.worker

    best = min(candidates, key=price)
    assert placement.winner.worker == best.worker
    assert all(each.occupancy_us >= 0 for each in placement.candidates)


class TestEligible:
    def test_a_prefix_miss_excludes_nobody(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4))
        first = assign(log, "r1")
        log.fold(prefilled("r1", first.worker))
        log.fold(
            BlocksStored(
                worker=first.worker, incarnation=1, number=1, cause="prefill", request=RequestId("r1"), blocks=10
            )
        )
        candidates, excluded = eligible(log, ask())
        assert candidates == {"n0/1/0": 900, "n0/1/4": 0}
        assert not excluded

    def test_at_least_one_token_is_computed(self) -> None:
        log = Log()
        log.fold(*pool_of(4))
        log.fold(*receive(log.state, arrival("r1"), Moment(NOW_NS, log.seq)), source=ME)
        worker = WorkerId("n0/1/0")
        log.fold(
            BlocksStored(worker=worker, incarnation=1, number=1, cause="prefill", request=RequestId("r1"), blocks=10)
        )
        for tokens, cached in ((999, 900), (1_000, 900), (1_001, 1_000), (100, 0), (101, 100), (99, 0)):
            question = Question(tokens, blocks(tokens // 100), NOW_NS)
            assert eligible(log, question) == ({worker: cached}, {})

    @pytest.mark.parametrize(
        ("event", "reason"),
        [
            (NodeLost(node=NodeId("n0"), incarnation=1, reason="test"), "not-schedulable"),
            (Cordoned(node=NodeId("n0"), asked_by="test"), "cordoned"),
            (DrainStarted(node=NodeId("n0"), epoch=2, workers=(WorkerId("n0/1/0"),), deadline_us=0), "draining"),
            (registered("n0", 4, incarnation=2), "stale-epoch"),
            (registered("n0", 4, incarnation=2, epoch=1, prompt_tokens_max=999), "too-long"),
            (registered("n0", 4, incarnation=2, epoch=1, blocks_per_rank=2), "full"),
            (registered("n0", 4, incarnation=2, epoch=1, blocks_per_rank=9, kv_layout="replicated"), "full"),
        ],
    )
    def test_each_reason_is_counted(self, event: NodeLost, reason: str) -> None:
        log = Log()
        log.fold(*pool_of(4), event)
        candidates, excluded = eligible(log, ask())
        assert (candidates, list(excluded.values())) == ({}, [reason])

    def test_kv_just_fits(self) -> None:
        log = Log()
        log.fold(*pool_of(4, blocks_per_rank=3))
        assert eligible(log, ask(1_200))[0]
        assert eligible(log, ask(1_201))[1] == {"n0/1/0": "full"}

    @pytest.mark.parametrize(
        ("field", "other"),
        [("model", "other"), ("model_revision", "2"), ("tokenizer_revision", "2"), ("block_tokens", 64)],
    )
    def test_a_node_that_serves_something_else_gets_nothing(self, field: str, other: object) -> None:
        log = Log()
        joined, epoch = pool_of(1, node="n1")
        log.fold(*pool_of(1), joined.model_copy(update={field: other}), epoch)
        candidates, excluded = eligible(log, ask())
        assert list(candidates) == ["n0/1/0"]
        assert list(excluded.values()) == ["not-schedulable"]

    def test_a_hung_worker_does_not_look_idle(self) -> None:
        log = Log()
        log.fold(*pool_of(8))
        first = assign(log, "r1")  # 1.5 s, so hung after 5 s
        log.fold(started("r1", first.worker))
        for seconds, hung in ((5.0, False), (5.1, True)):
            question = ask(now_ns=NOW_NS + round(seconds * SECOND_NS))
            assert bool(eligible(log, question)[1]) is hung
        log.fold(prefilled("r1", first.worker))
        question = ask(now_ns=NOW_NS + 100 * SECOND_NS)
        assert eligible(log, question)[0]

    def test_a_long_prediction_has_three_times_as_long(self) -> None:
        log = Log()
        log.fold(*pool_of(8))
        first = assign(log, "r1", 2_000)  # 3 s, so hung after 9 s
        log.fold(started("r1", first.worker))
        for seconds, hung in ((8.9, False), (9.1, True)):
            question = ask(now_ns=NOW_NS + round(seconds * SECOND_NS))
            assert bool(eligible(log, question)[1]) is hung

    def test_who_refused_is_asked_again_only_when_nobody_else_is_left(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4))
        candidates, excluded = eligible(log, ask(refused_by=("n0/1/0",)))
        assert (list(candidates), excluded) == (["n0/1/4"], {"n0/1/0": "refused"})
        candidates, excluded = eligible(log, ask(refused_by=("n0/1/0", "n0/1/4")))
        assert (len(candidates), excluded) == (2, {})

    def test_a_silent_node_is_asked_again_only_when_not_even_those_are_left_who_refused(self) -> None:
        log = Log()
        log.fold(*pool_of(4, 4), *pool_of(8, node="n1"))
        silence: dict[str, str] = {"n0/1/0": "silent", "n0/1/4": "silent"}
        assert eligible(log, ask(silent=("n0",))) == ({"n1/1/0": 0}, silence)
        assert eligible(log, ask(silent=("n0",), refused_by=("n1/1/0",))) == ({"n1/1/0": 0}, silence)
        candidates, excluded = eligible(log, ask(silent=("n0", "n1"), refused_by=("n0/1/4",)))
        assert (list(candidates), excluded) == (["n0/1/0", "n1/1/0"], {"n0/1/4": "refused"})
        log.fold(Cordoned(node=NodeId("n1"), asked_by="t"))
        candidates, excluded = eligible(log, ask(silent=("n0", "stranger")))
        assert (list(candidates), excluded) == (["n0/1/0", "n0/1/4"], {"n1/1/0": "cordoned"})


class TestReservation:
    def test_the_next_arrival_sees_the_work(self) -> None:
        log = Log()
        log.fold(*pool_of(8, 8))
        assert assign(log, "r1").worker == "n0/1/0"
        second = assign(log, "r2")
        assert second.worker == "n0/1/8"
        assert {p.worker: p.queue_us for p in second.candidates} == {"n0/1/0": 1_500_000, "n0/1/8": 0}
        assert {p.queue_us for p in assign(log, "r3").candidates} == {1_500_000}

    @pytest.mark.parametrize(
        ("elapsed_s", "remaining_us"), [(0, 1_500_000), (1, 500_000), (1.4, 350_000), (4, 1_000_000)]
    )
    def test_a_running_job_counts_what_is_left_of_it(self, elapsed_s: float, remaining_us: int) -> None:
        log = Log()
        log.fold(*pool_of(8))
        first = assign(log, "r1")
        log.fold(started("r1", first.worker))
        log.fold(*receive(log.state, arrival("r2"), Moment(NOW_NS, log.seq)), source=ME)
        load = log.state.loads.of_worker[first.worker]
        assert load.at(NOW_NS + round(elapsed_s * SECOND_NS)) == (remaining_us + 1_500_000, False)

    def test_the_time_of_a_packed_step_is_taken_off_once(self) -> None:
        log = Log()
        log.fold(*pool_of(8))
        for request in ("r1", "r2"):
            worker = assign(log, request).worker
        log.fold(started("r1", worker), started("r2", worker))
        load = log.state.loads.of_worker[worker]
        assert load.at(NOW_NS + SECOND_NS) == (2_000_000, False)
        assert load.at(NOW_NS + 8 * SECOND_NS) == (2_000_000, False), "hung after three times 3 s, not after 5 s"
        assert load.at(NOW_NS + 10 * SECOND_NS) == (2_500_000, True)

    def test_a_chunk_takes_its_part_off_and_shows_that_the_worker_lives(self) -> None:
        """500 of 1,000 tokens are stored after 4 s; then another request has a step in between."""
        log = Log()
        log.fold(*pool_of(8))
        for request in ("r1", "r2"):
            worker = assign(log, request).worker
        log.fold(started("r1", worker))
        log.fold(chunk("r1", worker, 500), time_ns=NOW_NS + 4 * SECOND_NS)
        load = log.state.loads.of_worker[worker]
        assert load.at(NOW_NS + 4 * SECOND_NS) == (750_000 + 1_500_000, False)
        log.fold(started("r2", worker), time_ns=NOW_NS + 5 * SECOND_NS)
        assert load.at(NOW_NS + 6 * SECOND_NS) == (1_250_000, False)
        log.fold(prefilled("r2", worker), time_ns=NOW_NS + 7 * SECOND_NS)
        assert load.at(NOW_NS + 7 * SECOND_NS) == (750_000, False)
        assert load.at(NOW_NS + 12 * SECOND_NS + 1_000) == (1_250_000, True), "5 s without a sign"
        log.state.loads.check()

    def test_an_agent_whose_clock_is_ahead_takes_no_time_off(self) -> None:
        log = Log()
        log.fold(*pool_of(8))
        first = assign(log, "r1")
        log.fold(started("r1", first.worker), time_ns=NOW_NS + SECOND_NS)
        assert log.state.loads.of_worker[first.worker].at(NOW_NS) == (1_500_000, False)


class TestReceive:
    def test_records_what_it_decided_on(self) -> None:
        log = Log()
        log.fold(*pool_of(1, 1, 2, 4))
        received, assigned = receive(log.state, arrival("r1", max_tokens=7), Moment(NOW_NS + 5, log.seq))
        assert isinstance(received, RequestReceived)
        assert isinstance(assigned, RequestAssigned)
        assert (len(received.block_ids), received.prompt_tokens, received.max_tokens) == (160, 1_000, 7)
        assert (assigned.worker, assigned.degree, assigned.attempt) == ("n0/1/4", 4, 1)
        assert assigned.decode_worker == "n0/decode/0"
        assert (assigned.seen_seq, assigned.now_ns) == (log.seq, NOW_NS + 5)
        assert (assigned.service_us, assigned.queue_us) == (2_000_000, 0)
        assert (assigned.uncached_tokens, assigned.cached_tokens) == (1_000, 0)
        assert (assigned.policy, assigned.beta, assigned.lam) == ("paper", 3.0, 0.1)
        assert assigned.coefficients_version == "round"

    def test_records_the_queue_and_the_degree_that_it_would_prefer_without_one(self) -> None:
        log = Log()
        log.fold(*pool_of(4), *pool_of(1, node="n1"))
        # 6.3 s and 2 s more for each one in front, against 15 s at degree 1, and 5 s more for the one in front there.
        *_, sixth, seventh = [assign(log, f"r{number}") for number in range(7)]
        assert (sixth.worker, sixth.queue_us, sixth.degree, sixth.preferred_degree) == ("n1/1/0", 0, 1, 4)
        assert (seventh.worker, seventh.queue_us, seventh.preferred_degree) == ("n0/1/0", 10_000_000, 4)

    def test_records_which_parameters_it_decided_with(self) -> None:
        log = Log()
        log.fold(*pool_of(4), ParametersChanged(parameters_version=3, changes={"beta": 4.0}, asked_by="ops"))
        assigned = assign(log, "r1")
        assert (assigned.parameters_version, assigned.beta) == (3, 4.0)

    def test_too_long_for_every_worker(self) -> None:
        log = Log()
        log.fold(*pool_of(1, prompt_tokens_max=500))
        _, rejected = receive(log.state, arrival("r1"), Moment(NOW_NS, 0))
        assert isinstance(rejected, RequestRejected)
        assert (rejected.reason, rejected.retry_after_s) == ("too-long", None)

    def test_no_worker_now(self) -> None:
        _, rejected = receive(Log().state, arrival("r1"), Moment(NOW_NS, 0))
        assert isinstance(rejected, RequestRejected)
        assert (rejected.reason, rejected.retry_after_s) == ("no-worker", 5)

    def test_a_request_is_received_once(self) -> None:
        log = Log()
        log.fold(*pool_of(1))
        assign(log, "r1")
        assert receive(log.state, arrival("r1"), Moment(NOW_NS, 0)) == []

    def test_decode_ranks_share_by_reserved_output(self) -> None:
        log = Log()
        log.fold(*pool_of(8, decode_ranks=2))
        chosen = []
        for number, max_tokens in enumerate((100, 10, 10, 100)):
            facts = receive(log.state, arrival(f"r{number}", max_tokens=max_tokens), Moment(NOW_NS, log.seq))
            log.fold(*facts, source=ME)
            assert isinstance(facts[-1], RequestAssigned)
            chosen.append(facts[-1].decode_worker)
        assert chosen == ["n0/decode/0", "n0/decode/1", "n0/decode/1", "n0/decode/1"]

    def test_no_decode_rank_lives(self) -> None:
        log = Log()
        log.fold(*pool_of(8, decode_ranks=0))
        assert assign(log, "r1").decode_worker is None
