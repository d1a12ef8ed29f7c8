"""What `vertumnus` adds, one addition at a time, against sums done by hand. `ROUND`: 1,000 uncached tokens take
1 s + 4 s / C, cached ones 0.1 s."""

import pytest
from router_world import ME, NOW_NS, SECOND_NS, Log, arrival, blocks, committed, pool_of, prefilled, started

from services.router.decider import Arrival, Moment, assign_again, receive, redirect, weigh
from services.router.outlook import weights
from services.router.placement import Question
from shared.contracts.copy_commands import FETCHES_PER_SOURCE_MAX
from shared.contracts.events import (
    BlockRun,
    BlocksStored,
    Frozen,
    ParametersChanged,
    PlacementReconciled,
    PrefillCompleted,
    PricedCandidate,
    RankAdoptedEpoch,
    ReconciledWorker,
    RequestAssigned,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId
from shared.model.parameters import Parameters

ADDITIONS = ("adaptive_beta", "in_flight_prefixes", "ordered_queue", "prefix_fetch", "stealing", "calibration")


def pool(*composition: int, only: str = "", worker_order: str = "shortest-first", **spec: object) -> Log:
    """A pool under `vertumnus` with one of the additions, with a β of 3 and no price of GPUs unless it is changed."""
    log = Log()
    switches = {name: name == only for name in ADDITIONS}
    changes = {"placement_policy": "vertumnus", "lam_vertumnus": 0, "worker_order": worker_order, **switches}
    log.fold(*pool_of(*composition, **spec), ParametersChanged(parameters_version=1, changes=changes, asked_by="t"))
    return log


def assign(log: Log, asked: Arrival, now_ns: int = NOW_NS) -> RequestAssigned:
    facts = receive(log.state, asked, Moment(now_ns, log.seq))
    log.fold(*facts, source=ME)
    assert isinstance(facts[-1], RequestAssigned)
    return facts[-1]


def at(assigned: RequestAssigned, worker: str) -> PricedCandidate:
    return next(each for each in assigned.candidates if each.worker == worker)


def store(log: Log, request: str, worker: str, number: int = 1, depth: int = 10) -> None:
    log.fold(
        BlocksStored(
            worker=WorkerId(worker), incarnation=1, number=number, cause="prefill", request=RequestId(request), blocks=depth
        )
    )  # fmt: skip


class TestWeights:
    @pytest.mark.parametrize(
        ("load_ppm", "beta"), [(0, 1.0), (500_000, 2.0), (800_000, 5.0), (900_000, 10.0), (3_000_000, 10.0)]
    )
    def test_beta_is_what_a_delay_costs_those_that_come_after(self, load_ppm: int, beta: float) -> None:
        parameters = Parameters(placement_policy="vertumnus")
        assert weights(parameters, load_ppm) == ("vertumnus", beta, 0.05, False)
        assert weights(parameters.model_copy(update={"adaptive_beta": False}), load_ppm).beta == 3.0

    def test_paper_and_least_work_have_the_configured_weights(self) -> None:
        assert weights(Parameters(), 900_000) == ("paper", 3.0, 0.1, False)
        frozen = Parameters(placement_policy="vertumnus", frozen=True)
        assert weights(frozen, 900_000).policy == "least-work"

    def test_a_ratio_that_is_not_looked_at_is_in_no_part_of_a_price(self) -> None:
        changes = {"placement_policy": "vertumnus", "ratio_in_own_time": True}
        assert weights(Parameters.model_validate(changes)).ratio_in_own_time
        assert not weights(Parameters.model_validate({**changes, "calibration": False})).ratio_in_own_time
        assert not weights(Parameters.model_validate({**changes, "placement_policy": "paper"})).ratio_in_own_time

    def test_the_load_of_the_pool_is_recorded_with_the_decision(self) -> None:
        """Two workers, 2 s of service each in the last ten seconds: 20 %, so β is 1.25."""
        log = pool(4, 4, only="adaptive_beta")
        first = assign(log, arrival("r1"))
        assert (first.load, first.beta) == (0.0, 1.0)
        assign(log, arrival("r2", salt=1))
        third = assign(log, arrival("r3", salt=2), NOW_NS + 5 * SECOND_NS)
        assert (third.policy, third.load, third.beta) == ("vertumnus", 0.2, 1.25)
        assert third.candidates[0].price_us == third.queue_us + 2_500_000

    def test_a_freeze_is_by_least_work(self) -> None:
        log = pool(4, 4)
        log.fold(Frozen(asked_by="ops"))
        assert (assigned := assign(log, arrival("r1"))).policy == "least-work"
        assert (assigned.load, assigned.beta) == (0.0, 0.0)


def test_without_its_additions_it_is_the_papers_rule_with_a_lambda_of_its_own() -> None:
    log = pool(1, 1, 2, 4)
    log.fold(ParametersChanged(parameters_version=2, changes={"lam_vertumnus": 0.05}, asked_by="t"))
    assert (assigned := assign(log, arrival("r1"))).lam == 0.05
    # s = 2 s, and λ prices 4·2 - 5 = 3 s.
    assert at(assigned, "n0/1/4").price_us == 6_000_000 + 150_000
    assert at(assigned, "n0/1/0").price_us == 15_000_000


def test_who_has_a_longer_prompt_waiting_has_something_to_do() -> None:
    """A newcomer of 0.2 s would be served before one of 2 s, and delay it."""
    log = pool(4, only="ordered_queue")
    waiting = assign(log, arrival("r1"))
    asked = Question(100, (), NOW_NS)
    assert (placed := weigh(log.state, asked)[0]) is not None
    assert placed.winner.queue_us == 0
    assert weigh(log.state, asked._replace(idle_only=True)) == (None, {waiting.worker: "share"})


class TestInFlight:
    def test_what_is_queued_there_will_be_reusable(self) -> None:
        log = pool(4, 4, only="in_flight_prefixes")
        first = assign(log, arrival("r1"))
        again = assign(log, arrival("r2"))
        # 900 of 1,000 tokens: 0.1 + 0.09 + 0.1 s. FCFS or not, all that is there is ahead: 2 s + 3·0.29 against 6.
        assert (again.worker, again.cached_tokens, again.service_us) == (first.worker, 900, 290_000)
        assert (again.candidates[0].in_flight_tokens, again.candidates[0].price_us) == (900, 2_870_000)
        assert at(again, "n0/1/4").in_flight_tokens == 0

    def test_of_what_is_held_already_only_the_rest_is_in_flight(self) -> None:
        log = pool(4, only="in_flight_prefixes")
        worker = assign(log, arrival("r1")).worker
        store(log, "r1", worker, depth=4)
        found = assign(log, arrival("r2")).candidates[0]
        assert (found.cached_tokens, found.in_flight_tokens) == (900, 500)

    def test_it_ends_with_the_prefill_and_only_what_is_stored_stays(self) -> None:
        log = pool(4, only="in_flight_prefixes")
        worker = assign(log, arrival("r1")).worker
        log.fold(prefilled("r1", worker))
        assert assign(log, arrival("r2", 900)).cached_tokens == 0
        log.fold(*redirect(log.state, RequestId("r2"), 1, "no-reply"), source=ME)
        assert not log.state.loads.in_flight

    def test_it_moves_with_the_request(self) -> None:
        log = pool(4, 4, only="in_flight_prefixes")
        first = assign(log, arrival("r1"))
        log.fold(*redirect(log.state, RequestId("r1"), 1, "no-reply"), source=ME)
        [second] = assign_again(log.state, RequestId("r1"), 0, Moment(NOW_NS, log.seq))
        log.fold(second, source=ME)
        assert isinstance(second, RequestAssigned)
        found = assign(log, arrival("r2"))
        assert found.worker == second.worker != first.worker
        assert {each.worker: each.in_flight_tokens for each in found.candidates} == {
            first.worker: 0,
            second.worker: 900,
        }

    def test_a_cache_that_is_not_known_gets_no_credit_for_it(self) -> None:
        log = pool(4, only="in_flight_prefixes")
        worker = assign(log, arrival("r1")).worker
        log.state.holders.workers[worker].trust = "blind"
        found = assign(log, arrival("r2")).candidates[0]
        assert (found.trust, found.cached_tokens, found.in_flight_tokens) == ("blind", 0, 0)


class TestOrderedQueue:
    def test_only_shorter_ones_are_ahead_and_longer_ones_are_delayed(self) -> None:
        log = pool(4, only="ordered_queue")
        for request, tokens in (("short", 100), ("long", 2_000), ("longer", 3_000)):
            assign(log, arrival(request, tokens, salt=tokens // 100))
        found = assign(log, arrival("r1", salt=99)).candidates[0]
        # s = 2 s: 0.2 s are ahead, 4 and 6 s come after it and wait 2 s more each.
        assert (found.queue_us, found.delayed_jobs, found.delay_us) == (200_000, 2, 4_000_000)
        assert found.price_us == 200_000 + 4_000_000 + 3 * 2_000_000

    def test_one_that_has_waited_half_a_minute_is_ahead(self) -> None:
        log = pool(4, only="ordered_queue")
        assign(log, arrival("long", 2_000, salt=1))
        found = assign(log, arrival("r1"), NOW_NS + 30 * SECOND_NS).candidates[0]
        assert (found.queue_us, found.delayed_jobs) == (4_000_000, 0)

    def test_what_runs_in_chunks_is_ahead_with_one_of_them(self) -> None:
        log = pool(4, only="ordered_queue", chunk_tokens=500)
        worker = assign(log, arrival("long", 2_000, salt=1)).worker
        log.fold(started("long", worker))
        # A chunk takes a quarter of 4 s.
        found = assign(log, arrival("r1")).candidates[0]
        assert (found.queue_us, found.delayed_jobs) == (1_000_000, 1)

    def test_by_arrival_all_is_ahead(self) -> None:
        log = pool(4, only="ordered_queue", worker_order="fcfs")
        assign(log, arrival("long", 2_000, salt=1))
        found = assign(log, arrival("r1")).candidates[0]
        assert (found.queue_us, found.delayed_jobs) == (4_000_000, 0)

    def test_a_request_comes_after_the_one_whose_prefix_it_reuses(self) -> None:
        log = pool(4, only="ordered_queue")
        log.fold(ParametersChanged(parameters_version=2, changes={"in_flight_prefixes": True}, asked_by="t"))
        assign(log, arrival("first"))
        assign(log, arrival("longer", 3_000, salt=9))
        found = assign(log, arrival("again")).candidates[0]
        # 0.29 s behind the 2 s of the first, before the 6 s of the other; without reuse it would be 2 s and wait as long.
        assert (found.in_flight_tokens, found.queue_us, found.delayed_jobs) == (900, 2_000_000, 1)

    def test_it_is_computed_anew_where_waiting_for_the_other_is_dearer(self) -> None:
        log = pool(4, only="ordered_queue")
        changes = {"in_flight_prefixes": True, "beta": 1}
        log.fold(ParametersChanged(parameters_version=2, changes=changes, asked_by="t"))
        shared = blocks(9)
        long = replace_chain(arrival("long", 9_000), (*shared, *blocks(81, salt=1)))
        assign(log, long)
        # 18 s of waiting for 1.8 s less of work.
        found = assign(log, replace_chain(arrival("r1"), (*shared, *blocks(1, salt=2)))).candidates[0]
        assert (found.in_flight_tokens, found.queue_us, found.service_us) == (0, 0, 2_000_000)


def replace_chain(asked: Arrival, chain: tuple[bytes, ...]) -> Arrival:
    return asked._replace(chain=chain)  # type: ignore[arg-type]


class TestFetch:
    def fetching(self, *composition: int, **spec: object) -> tuple[Log, WorkerId]:
        """A worker holds a prompt and is busy; reading it takes 5 ms and 1 us per byte of 100 per token."""
        log = pool(*composition, only="prefix_fetch", fetches=True, kv_bytes_per_token=100, **spec)
        log.fold(ParametersChanged(parameters_version=2, changes={"fetch_mb_per_s": 1}, asked_by="t"))
        source = assign(log, arrival("r1")).worker
        log.fold(prefilled("r1", source))
        store(log, "r1", source)
        assign(log, arrival("busy", 10_000, salt=1))
        return log, source

    def test_what_another_worker_holds_is_read_where_that_is_cheaper(self) -> None:
        log, source = self.fetching(4, 4)
        found = assign(log, arrival("r2"))
        # 0.29 s and 95 ms for 900 tokens, at the idle worker.
        assert found.worker != source
        assert (found.fetch_from, found.fetch_blocks, found.cached_tokens) == (source, 9, 900)
        winner = found.candidates[0]
        assert (winner.fetched_tokens, winner.fetch_us, winner.service_us) == (900, 95_000, 385_000)
        assert at(found, source).fetch_from is None

    def test_it_is_computed_where_that_is_cheaper(self) -> None:
        log, source = self.fetching(4, 4)
        log.fold(ParametersChanged(parameters_version=3, changes={"fetch_mb_per_s": 1}, asked_by="t"))
        [node] = log.state.pool.nodes.values()
        assert node.spec is not None
        node.spec = node.spec.model_copy(update={"kv_bytes_per_token": 10_000})
        log.state.board.forget()
        found = assign(log, arrival("r2"))
        assert (found.worker != source, found.fetch_from, found.service_us) == (True, None, 2_000_000)

    def test_the_baseline_of_lambda_has_the_fetch_in_it_too(self) -> None:
        log, source = self.fetching(4, 4)
        log.fold(ParametersChanged(parameters_version=3, changes={"lam_vertumnus": 1}, asked_by="t"))
        assert assign(log, arrival("r2")).candidates[0].occupancy_us == 0
        assert source

    def test_a_node_serves_two_at_a_time(self) -> None:
        log, source = self.fetching(4, 4, 4, 4)
        found = [assign(log, arrival(f"r{number}", 1_000)) for number in range(2, 5)]
        assert [each.fetch_from for each in found] == [source, source, None]
        log.fold(prefilled("r2", found[0].worker))
        assert assign(log, arrival("r9")).fetch_from == source
        log.state.loads.check()

    def test_who_is_too_busy_to_serve_can_be_read_from(self) -> None:
        """1,000 tokens take 2 s to compute and 0.39 s with 900 of them fetched, by a worker that has nothing to do."""
        log, source = self.fetching(4, 4)
        placed, excluded = weigh(
            log.state, Question(1_000, arrival("r9").chain, NOW_NS, within_us=1_000_000, idle_only=True)
        )
        assert excluded == {source: "share"}
        assert placed is not None
        assert (placed.winner.fetch_from, placed.winner.service_us) == (source, 385_000)

    def test_a_node_that_cannot_fetch_is_asked_to_compute(self) -> None:
        log, _ = self.fetching(4, 4)
        log.state.loads.specs.update(
            {node: spec.model_copy(update={"fetches": False}) for node, spec in log.state.loads.specs.items()}
        )
        log.state.board.forget()
        assert assign(log, arrival("r2")).fetch_from is None

    def test_a_measured_source_is_priced_by_its_own_bandwidth(self) -> None:
        log, source = self.fetching(4, 4)
        done = prefilled("x", source).model_copy(
            update={"cached_fetched_tokens": 1_000, "fetched_from": source, "fetch_us": 15_000}
        )
        log.fold(done)
        # 100,000 bytes in 10 ms.
        assert assign(log, arrival("r2")).candidates[0].fetch_us == 5_000 + 9_000

    def test_a_source_that_was_slow_once_is_read_from_again(self) -> None:
        """100,000 bytes in 1,000 s, and 95 ms are configured for what is wanted. A request saves 1.71 s with it, so it is worth
        it from 10 half-lives on: 900 s >> 10 are 879 ms more."""
        log, source = self.fetching(4, 4)
        done = prefilled("x", source).model_copy(
            update={"cached_fetched_tokens": 1_000, "fetched_from": source, "fetch_us": 1_000_000_000}
        )
        log.fold(done)

        def read_from() -> list[WorkerId | None]:
            questions = [
                Question(1_000, arrival("r9").chain, NOW_NS + minutes * 60 * SECOND_NS) for minutes in (0, 9, 10)
            ]
            return [placed and placed.winner.fetch_from for placed, _ in (weigh(log.state, each) for each in questions)]

        assert read_from() == [None, None, None], "it is never forgotten"
        log.fold(ParametersChanged(parameters_version=3, changes={"fetch_half_life_s": 60}, asked_by="t"))
        assert read_from() == [None, None, source]


class TestCalibration:
    def test_a_slow_worker_costs_what_it_takes(self) -> None:
        log = pool(4, 4, only="calibration")
        for number in range(10):
            done = prefilled(f"x{number}", WorkerId("n0/1/0"))
            log.fold(done.model_copy(update={"prefill_us": 1_600_000, "predicted_us": 1_000_000}))
        found = assign(log, arrival("r1"))
        assert (found.worker, found.ratio) == ("n0/1/4", 1.0)
        slow = at(found, "n0/1/0")
        assert slow.ratio == pytest.approx(1.6, rel=1e-3)
        assert slow.service_us == round(slow.ratio * 1e6) * 2_000_000 // 1_000_000
        assert slow.price_us == 3 * slow.service_us

    def test_in_its_own_time_alone_it_is_no_part_of_what_others_pay(self) -> None:
        """The larger worker takes 1.5 times what is predicted. β is 3 and λ 0.1."""
        log = pool(4, 2, only="calibration")
        log.fold(*[slow(f"x{number}", "n0/1/0") for number in range(10)])
        shares = {"lam_vertumnus": 0.1, "ratio_in_own_time": True}
        log.fold(ParametersChanged(parameters_version=2, changes=shares, asked_by="t"))
        question = Question(1_000, (), NOW_NS)
        found, _ = weigh(log.state, question)
        assert found is not None
        large, small = found.candidates
        assert (large.worker, found.ratio_in_own_time, large.ratio) == ("n0/1/0", True, 1.5)
        # 1.5 x 2 s are its own; (3 - 1) x 2 s and 0.1 x (4 x 2 - 2 x 3) s are not slower than any worker's.
        assert (large.service_us, large.occupancy_us) == (3_000_000, 200_000)
        assert large.price_us == 3_000_000 + 4_000_000 + 200_000
        assert small.price_us == 3 * 3_000_000
        log.fold(ParametersChanged(parameters_version=3, changes={"ratio_in_own_time": False}, asked_by="t"))
        again, _ = weigh(log.state, question)
        assert again is not None
        # 3 x 3 s, and 0.1 x (4 x 3 - 2 x 4.5) s.
        assert (again.winner.worker, again.candidates[1].price_us) == ("n0/1/4", 9_300_000)
        assert not assign(log, arrival("r1")).ratio_in_own_time
        log.fold(ParametersChanged(parameters_version=4, changes=shares, asked_by="t"))
        assert assign(log, arrival("r2")).ratio_in_own_time

    def test_whom_it_delays_waits_as_long_as_it_really_takes(self) -> None:
        log = pool(4, only="calibration")
        log.fold(*[slow(f"x{number}", "n0/1/0") for number in range(10)])
        both = {"ordered_queue": True, "ratio_in_own_time": True}
        log.fold(ParametersChanged(parameters_version=2, changes=both, asked_by="t"))
        assign(log, arrival("long", 2_000, salt=1))
        found = assign(log, arrival("r1")).candidates[0]
        # 6 s wait, and 3 s more for this one; what others pay is 2 x 2 s.
        assert (found.service_us, found.delayed_jobs, found.delay_us) == (3_000_000, 1, 3_000_000)
        assert found.price_us == 3_000_000 + 3_000_000 + 4_000_000

    def test_a_fetch_takes_what_it_takes(self) -> None:
        log, source = TestFetch().fetching(4, 4)
        reader = next(worker for worker in ("n0/1/0", "n0/1/4") if worker != source)
        log.fold(*[slow(f"x{number}", reader) for number in range(10)])
        changes = {"calibration": True, "ratio_in_own_time": True, "lam_vertumnus": 1}
        log.fold(ParametersChanged(parameters_version=3, changes=changes, asked_by="t"))
        found = at(assign(log, arrival("r2")), reader)
        # 95 ms of fetch, and 0.29 s that take 0.435.
        assert (found.fetch_us, found.service_us) == (95_000, 95_000 + 435_000)
        assert found.price_us == 530_000 + 2 * (95_000 + 290_000)

    def test_paper_does_not_look_at_it(self) -> None:
        log = pool(4, 4, only="calibration")
        for number in range(10):
            log.fold(
                prefilled(f"x{number}", WorkerId("n0/1/0")).model_copy(update={"prefill_us": 9, "predicted_us": 1})
            )
        log.fold(ParametersChanged(parameters_version=2, changes={"placement_policy": "paper"}, asked_by="t"))
        assert {each.ratio for each in assign(log, arrival("r1")).candidates} == {1.0}


def slow(request: str, worker: str) -> PrefillCompleted:
    """Half as long again as predicted, in numbers that have no remainder when they fade."""
    done = prefilled(request, WorkerId(worker))
    return done.model_copy(update={"prefill_us": 3 * 2**39, "predicted_us": 2**40})


class TestPending:
    """n0 was split: of a prompt of ten blocks nothing is held, and all of it is pending at the first worker."""

    @staticmethod
    def split(log: Log, **changes: object) -> Log:
        run = BlockRun(block_ids=b"".join(blocks(10)))
        child = ReconciledWorker(worker=WorkerId("n0/2/0"), pending=(run,))
        log.fold(
            PlacementReconciled(node=NodeId("n0"), epoch=2, workers=(child,)),
            *(RankAdoptedEpoch(node=NodeId("n0"), incarnation=1, rank=rank, epoch=2, switch_us=1) for rank in range(4)),
            committed((2, 2), epoch=2),
            ParametersChanged(parameters_version=2, changes={"lam": 0, "beta": 1, **changes}, asked_by="t"),
        )
        return log

    @pytest.mark.parametrize("policy", ["paper", "vertumnus"])
    def test_it_is_priced_as_a_fetch_from_its_own_node(self, policy: str) -> None:
        log = self.split(pool(4, fetches=True, kv_bytes_per_token=1_000_000), placement_policy=policy)
        assigned = assign(log, arrival("r1"))
        # 900 MB at 10 GB/s, and 100 of 1,000 tokens at degree 2: 0.1 + 0.2 + 0.09 s.
        assert (assigned.worker, assigned.cached_tokens, assigned.fetch_from) == ("n0/2/0", 900, "n0/2/0")
        assert (assigned.fetch_blocks, assigned.service_us) == (9, 390_000 + 95_000)
        assert at(assigned, "n0/2/2").cached_tokens == 0

    @pytest.mark.parametrize("policy", ["paper", "vertumnus"])
    def test_it_is_computed_where_that_is_cheaper(self, policy: str) -> None:
        log = self.split(pool(4, fetches=True, kv_bytes_per_token=50_000_000), placement_policy=policy)
        assert (assigned := assign(log, arrival("r1"))).fetch_from is None
        assert assigned.cached_tokens == 0

    def test_a_node_that_cannot_fetch_gets_no_credit_for_it(self) -> None:
        log = self.split(pool(4), placement_policy="vertumnus")
        assert assign(log, arrival("r1")).cached_tokens == 0

    def test_no_more_are_read_at_a_time_than_a_node_serves(self) -> None:
        log = self.split(pool(4, fetches=True, kv_bytes_per_token=1), placement_policy="paper")
        found = [assign(log, arrival(f"r{number}")) for number in range(FETCHES_PER_SOURCE_MAX + 1)]
        assert [each.fetch_from is not None for each in found] == [True] * FETCHES_PER_SOURCE_MAX + [False]
