"""The kernel against a plain simulation of one lane, and its scores by hand."""

import os
import signal
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller import replaying
from services.controller.forecast import Question, Replayed
from services.controller.forecaster import ProcessScorer
from services.controller.replaying import RATES_PERCENT, WAITING_MAX, WARM_SHARE, scores_ppm
from shared.model.cost import Coefficients, load_coefficients

COEFFICIENTS = load_coefficients("qwen3_30b_a3b_h20")


@dataclass
class Worker:
    degree: int
    until_us: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(arrival, service) of each, in order of arrival."""

    def serve(self, now_us: int, shortest_first: bool) -> list[tuple[int, int]]:
        """(arrival, TTFT) of what has begun before now."""
        begun = []
        while self.waiting and self.until_us <= now_us:
            came_us, service_us = min(self.waiting, key=lambda each: each[1] if shortest_first else 0)
            self.waiting.remove((came_us, service_us))
            self.until_us = max(self.until_us, came_us) + service_us
            begun.append((came_us, self.until_us - came_us))
        return begun


def plain(question: Question, pool: tuple[int, ...], percent: int) -> int:
    """Summed TTFT of one lane."""
    workers = [Worker(degree) for degree in pool]
    arrivals = question.arrivals
    cold_us = arrivals[len(arrivals) // WARM_SHARE].time_us * 100 // percent
    ended: list[tuple[int, int]] = []
    for each in arrivals:
        now_us = each.time_us * 100 // percent
        for worker in workers:
            ended += worker.serve(now_us, question.shortest_first)
        service = {c: question.coefficients.prefill_us(c, each.uncached_tokens, each.cached_tokens) for c in set(pool)}
        least_us = min(pool) * service[min(pool)]

        def price(index: int, now_us: int = now_us, service=service, least_us: int = least_us) -> tuple[int, int]:
            worker = workers[index]
            queue_us = max(0, worker.until_us - now_us) + sum(waits for _, waits in worker.waiting)
            own_us = round(question.beta * service[worker.degree])
            return queue_us + own_us + round(question.lam * (worker.degree * service[worker.degree] - least_us)), index

        best = workers[min(map(price, range(len(workers))))[1]]
        best.waiting.append((now_us, service[best.degree]))
        ended += best.serve(now_us, question.shortest_first)
    for worker in workers:
        ended += worker.serve(2**60, question.shortest_first)
    assert len(ended) == len(arrivals)
    return sum(ttft_us for came_us, ttft_us in ended if came_us >= cold_us)


ARRIVALS = st.lists(
    st.builds(Replayed, st.integers(0, 20_000_000), st.integers(1, 60_000), st.integers(0, 20_000)),
    min_size=1,
    max_size=30,
).map(lambda found: tuple(sorted(found)))
POOLS = st.lists(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5).map(lambda pool: tuple(sorted(pool, reverse=True))),
    min_size=1,
    max_size=4,
).map(tuple)


@settings(deadline=None, max_examples=60)
@given(ARRIVALS, POOLS, st.booleans(), st.sampled_from([1.0, 3.0]), st.sampled_from([0.0, 0.1]))
def test_every_lane_is_the_plain_simulation_of_it(
    arrivals, pools, shortest_first: bool, beta: float, lam: float
) -> None:
    question = Question(arrivals, pools, COEFFICIENTS, beta, lam, shortest_first)
    totals = replaying._Lanes(question).run().reshape(len(RATES_PERCENT), len(pools))
    assert totals.tolist() == [[plain(question, pool, percent) for pool in pools] for percent in RATES_PERCENT]


ONE_SECOND = Coefficients(version="one second a prompt at degree 1", d=0, a=0, b=0, c=0.001, alpha=0)


def test_scores_by_hand() -> None:
    """Prompts of 1,000 tokens take 1 s at degree 1 and half of it at degree 2, and come long after each other."""
    alone = tuple(Replayed(n * 10_000_000, 1_000, 0) for n in range(20))
    question = Question(alone, ((1, 1), (2,), (2, 1)), ONE_SECOND, 3.0, 0.0, True)
    assert scores_ppm(question) == (2_000_000, 1_000_000, 1_000_000)


def test_a_score_is_three_at_most() -> None:
    alone = tuple(Replayed(n * 100_000_000, 8_000, 0) for n in range(20))
    assert scores_ppm(Question(alone, ((1,), (8,)), ONE_SECOND, 3.0, 0.0, True)) == (3_000_000, 1_000_000)


def test_more_than_a_worker_can_hold_still_counts() -> None:
    burst = tuple(Replayed(0, 1_000, 0) for _ in range(4 * WAITING_MAX))
    one, two = scores_ppm(Question(burst, ((1,), (1, 1)), ONE_SECOND, 3.0, 0.0, True))
    assert one > two == 1_000_000


async def test_the_process_answers_as_this_one_would_and_is_replaced_when_it_dies() -> None:
    question = Question(
        tuple(Replayed(n * 1_000, 1_000, 0) for n in range(9)), ((1,), (2,)), ONE_SECOND, 3.0, 0.0, True
    )
    scorer = ProcessScorer()
    try:
        assert await scorer.scores_ppm(question) == scores_ppm(question)
        [pid] = scorer._process._processes
        os.kill(pid, signal.SIGKILL)
        assert await scorer.scores_ppm(question) == ()
        assert await scorer.scores_ppm(question) == scores_ppm(question)
    finally:
        scorer.close()


@pytest.mark.parametrize("shortest_first", [False, True])
def test_the_order_is_the_live_one(shortest_first: bool) -> None:
    """Three at once: 8 s runs, then 4 s and 1 s wait, in that order of arrival."""
    arrivals = (Replayed(0, 8_000, 0), Replayed(1, 4_000, 0), Replayed(2, 1_000, 0))
    question = Question(arrivals, ((1,),), ONE_SECOND, 1.0, 0.0, shortest_first)
    waited_s = (8 + 9 + 13) if shortest_first else (8 + 12 + 13)
    assert replaying._Lanes(question).run()[1] == pytest.approx(waited_s * 1e6, abs=10)
