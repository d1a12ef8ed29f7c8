"""The kernel against a plain simulation of one lane, and its scores by hand."""

import asyncio
import os
import signal
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller.forecast import PPM, Question, Replayed, Rule
from services.controller.forecaster import ProcessScorer
from services.controller.replaying import RATES_PERCENT, WAITING_MAX, replayed, scores
from shared.model.cost import Coefficients, load_coefficients
from shared.model.parameters import LOAD_PPM_MAX, LOAD_WINDOW_S

COEFFICIENTS = load_coefficients("qwen3_30b_a3b_h20")


@dataclass
class Worker:
    until_us: int = 0
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    """(number, arrival, service) of each, in order of arrival."""

    def serve(self, now_us: int, shortest_first: bool) -> list[tuple[int, int]]:
        """(number, TTFT) of what has begun before now."""
        begun = []
        while self.waiting and self.until_us <= now_us:
            first = min(self.waiting, key=lambda each: each[2] if shortest_first else 0)
            self.waiting.remove(first)
            number, came_us, service_us = first
            self.until_us = max(self.until_us, came_us) + service_us
            begun.append((number, self.until_us - came_us))
        return begun

    def queue_us(self, service_us: int, now_us: int, ordered: bool) -> int:
        """What a newcomer waits for, and his service for each whom he delays."""
        waits = [each[2] for each in self.waiting]
        ahead = [each for each in waits if each <= service_us] if ordered else waits
        return max(0, self.until_us - now_us) + sum(ahead) + (len(waits) - len(ahead)) * service_us


def plain(question: Question, pool: tuple[int, ...], percent: int) -> list[int]:
    """TTFT of each arrival in one lane."""
    rule, workers = question.rule, [Worker() for _ in pool]
    given: list[tuple[int, int]] = []
    ended: list[tuple[int, int]] = []
    for number, each in enumerate(question.arrivals):
        now_us = each.time_us * 100 // percent
        for worker in workers:
            ended += worker.serve(now_us, rule.shortest_first)
        service = {c: question.coefficients.prefill_us(c, each.uncached_tokens, each.cached_tokens) for c in set(pool)}
        least_us = min(pool) * service[min(pool)]
        second = now_us // PPM
        assigned_us = sum(us for at_us, us in given if second - LOAD_WINDOW_S <= at_us // PPM < second)
        load_ppm = assigned_us // min(max(second, 1), LOAD_WINDOW_S) // len(pool)
        beta = PPM / (PPM - min(load_ppm, LOAD_PPM_MAX)) if rule.adaptive else rule.beta

        def price(
            index: int, now_us: int = now_us, service=service, least_us: int = least_us, beta: float = beta
        ) -> tuple[int, int]:
            own_us = service[pool[index]]
            queue_us = workers[index].queue_us(own_us, now_us, rule.ordered)
            return queue_us + round(beta * own_us) + round(rule.lam * (pool[index] * own_us - least_us)), index

        index = min(map(price, range(len(workers))))[1]
        best, own_us = workers[index], service[pool[index]]
        best.waiting.append((number, now_us, own_us))
        given.append((now_us, own_us))
        ended += best.serve(now_us, rule.shortest_first)
    for worker in workers:
        ended += worker.serve(2**60, rule.shortest_first)
    return [ttft_us for _, ttft_us in sorted(ended)]


ARRIVALS = st.lists(
    st.builds(Replayed, st.integers(0, 20_000_000), st.integers(1, 60_000), st.integers(0, 20_000)),
    min_size=1,
    max_size=WAITING_MAX,
).map(lambda found: tuple(sorted(found)))
POOLS = st.lists(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5).map(lambda pool: tuple(sorted(pool, reverse=True))),
    min_size=1,
    max_size=4,
).map(tuple)


RULES = st.builds(
    Rule, st.sampled_from([1.0, 3.0]), st.sampled_from([0.0, 0.1]), st.booleans(), st.booleans(), st.booleans()
)


@settings(deadline=None, max_examples=100)
@given(ARRIVALS, POOLS, RULES)
def test_every_lane_is_the_plain_simulation_of_it(arrivals, pools, rule: Rule) -> None:
    question = Question(arrivals, pools, COEFFICIENTS, rule)
    found_ARP = replayed(question)
    for rate, percent in enumerate(RATES_PERCENT):
        for pool, degrees in enumerate(pools):
            assert found_ARP[:, rate, pool].tolist() == plain(question, degrees, percent)


ONE_SECOND = Coefficients(version="one second a prompt at degree 1", d=0, a=0, b=0, c=0.001, alpha=0)
BY_WORK = Rule(beta=3.0, lam=0.0, shortest_first=True)


def test_scores_by_hand() -> None:
    """Prompts of 1,000 tokens take 1 s at degree 1 and half of it at degree 2, and come long after each other."""
    alone = tuple(Replayed(n * 10_000_000, 1_000, 0) for n in range(20))
    question = Question(alone, ((1, 1), (2,), (2, 1)), ONE_SECOND, BY_WORK)
    assert scores(question).ppm == (2_000_000, 1_000_000, 1_000_000)


def test_a_score_is_three_at_most() -> None:
    alone = tuple(Replayed(n * 100_000_000, 8_000, 0) for n in range(20))
    assert scores(Question(alone, ((1,), (8,)), ONE_SECOND, BY_WORK)).ppm == (3_000_000, 1_000_000)


def test_more_than_a_worker_can_hold_still_counts() -> None:
    burst = tuple(Replayed(0, 1_000, 0) for _ in range(8 * WAITING_MAX))
    one, two = scores(Question(burst, ((1,), (1, 1)), ONE_SECOND, BY_WORK)).ppm
    assert one > two == 1_000_000


def test_what_every_part_says_is_certain_and_what_one_part_says_is_not() -> None:
    """Half of every TTFT is gained. Where one prompt of 99 s has a third of all TTFT, its part of ten gains .42 of a mean of
    1 and the others .065 each, so the error is √(10/9 · (9 · .035² + .319²)) = .35."""
    alike = tuple(Replayed(n * 1_000_000_000, 1_000, 0) for n in range(200))
    pools = ((1, 1), (2,))
    assert scores(Question(alike, pools, ONE_SECOND, BY_WORK)) == ((2_000_000, 1_000_000), (0, 0))
    lone = tuple(each._replace(uncached_tokens=100_000) if n == 150 else each for n, each in enumerate(alike))
    found = scores(Question(lone, pools, ONE_SECOND, BY_WORK))
    assert found.ppm == (2_000_000, 1_000_000)
    assert found.errors_ppm == (0, pytest.approx(354_700, rel=0.001))


FEW = Question(tuple(Replayed(n * 1_000, 1_000, 0) for n in range(9)), ((1,), (2,)), ONE_SECOND, BY_WORK)


async def test_the_process_answers_as_this_one_would_and_is_replaced_when_it_dies() -> None:
    with closing(ProcessScorer()) as scorer:
        assert await scorer.scores(FEW) == scores(FEW)
        os.kill(scorer._child.process.pid, signal.SIGKILL)
        assert await scorer.scores(FEW) is None
        assert await scorer.scores(FEW) == scores(FEW)


async def test_a_process_that_stands_still_gives_no_answer_and_does_not_outlive_its_end() -> None:
    with closing(ProcessScorer()) as scorer:
        assert await scorer.scores(FEW) == scores(FEW)
        scorer._limit_s = 0.2
        process = scorer._child.process
        os.kill(process.pid, signal.SIGSTOP)
        assert await scorer.scores(FEW) is None
        assert process.exitcode == -signal.SIGKILL
    scorer = ProcessScorer()
    asking = asyncio.ensure_future(scorer.scores(FEW))
    await asyncio.sleep(0)
    process = scorer._child.process
    os.kill(process.pid, signal.SIGSTOP)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert process.exitcode == -signal.SIGKILL
    scorer.close()


@pytest.mark.parametrize("shortest_first", [False, True])
def test_the_order_is_the_live_one(shortest_first: bool) -> None:
    """Three at once: 8 s runs, then 4 s and 1 s wait, in that order of arrival."""
    arrivals = (Replayed(0, 8_000, 0), Replayed(1, 4_000, 0), Replayed(2, 1_000, 0))
    question = Question(arrivals, ((1,),), ONE_SECOND, Rule(1.0, 0.0, shortest_first))
    waited_s = (8 + 9 + 13) if shortest_first else (8 + 12 + 13)
    assert replayed(question)[:, 1, 0].sum() == pytest.approx(waited_s * 1e6, abs=10)
