"""Rules against decisions computed by hand from their published definitions."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.ids import RequestId, WorkerId
from simulation.baselines.dynamo import KvCost, cost_tokens
from simulation.baselines.llmd import LengthBuckets, PreciseScorers
from simulation.baselines.rule import Rule, WorkerView
from simulation.baselines.rules import RULES
from simulation.baselines.simple import CentralQueue, LeastTokens, PowerOfTwo, RoundRobin
from tests.simulation.baselines.views import BLOCK_TOKENS, prompt, worker


def chosen(rule: Rule, workers: list[WorkerView], tokens: int = 1_000) -> WorkerId | None:
    return rule.choose(prompt(tokens), workers)


def test_turns_go_round_whoever_is_busy() -> None:
    rule = RoundRobin()
    three = [worker("a", queued=9), worker("b"), worker("c")]
    assert [chosen(rule, three) for _ in range(4)] == ["a", "b", "c", "a"]
    # The fifth turn of two.
    assert chosen(rule, three[:2]) == "a"


def test_the_fewest_tokens_ahead() -> None:
    workers = [worker("a", uncached=500), worker("b", queued=3, uncached=400), worker("c", uncached=400)]
    assert chosen(LeastTokens(), workers) == "b"


def test_the_less_busy_of_two() -> None:
    rule = PowerOfTwo(Random(1))
    workers = [worker("a"), worker("b", running=1), worker("c", queued=1, running=1)]
    drawn = Counter(chosen(rule, workers) for _ in range(3_000))
    # "c" never wins; "b" wins where it meets "c", in one of three pairs.
    assert drawn["c"] == 0
    assert drawn["b"] == pytest.approx(1_000, rel=0.1)
    assert chosen(rule, workers[2:]) == "c"


def test_a_central_queue_gives_to_the_idle_alone() -> None:
    rule = CentralQueue()
    busy = worker("a", 8, cached=9, running=1)
    assert chosen(rule, [busy]) is None
    assert chosen(rule, [busy, worker("b"), worker("c", 8), worker("d", 2, cached=1)]) == "d"
    assert chosen(rule, [busy, worker("b"), worker("c", 8)]) == "c"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, "2"), (8_191, "2"), (8_192, "4"), (32_767, "4"), (32_768, "8"), (200_000, "8")],
)
def test_a_length_has_its_degree(tokens: int, expected: str) -> None:
    # Nobody serves degree 1, so what begins at 0 falls to the smallest.
    workers = [worker("4", 4, queued=50), worker("8", 8), worker("2", 2, cached=80)]
    assert chosen(LengthBuckets(Random(1)), workers, tokens) == expected


def test_within_a_length_the_shortest_queue() -> None:
    rule = LengthBuckets(Random(1))
    workers = [worker("a", queued=1), worker("b", running=9), worker("c", running=5), worker("d", 8)]
    assert {chosen(rule, workers) for _ in range(50)} == {"b", "c"}
    # Beyond 128 one queue is like another.
    assert {chosen(rule, [worker("a", queued=128), worker("b", queued=500)]) for _ in range(50)} == {"a", "b"}


def test_dynamo_counts_what_is_to_be_computed() -> None:
    rule = KvCost(Random(1))
    # A prompt of 10 blocks: (500 + 1,000) / 100 - 8 = 7, (0 + 1,000) / 100 - 2 = 8, (650 + 1,000) / 100 - 9 = 7.5.
    workers = [worker("a", uncached=500, cached=8), worker("b", cached=2), worker("c", uncached=650, cached=9)]
    assert [cost_tokens(prompt(1_000), each) / BLOCK_TOKENS for each in workers] == [7, 8, 7.5]
    assert chosen(rule, workers) == "a"
    assert chosen(rule, [*workers[1:], worker("d", uncached=750, cached=10)]) in ("c", "d")
    # Equals are drawn from; a degree and a queue of requests say nothing.
    equal = [worker("a", 8, cached=5, uncached=100), worker("b", 2, cached=4, queued=7)]
    assert {chosen(rule, equal) for _ in range(50)} == {"a", "b"}


def test_llm_d_adds_its_scores() -> None:
    rule = PreciseScorers(Random(1))
    # Prefix, room, queue: 2·.5 + 1 + (4 - 4)/4 = 2; 2·0 + .9 + (4 - 0)/4 = 1.9; 2·.3 + 1 + (4 - 3)/4 = 1.85.
    workers = [worker("a", cached=5, queued=4), worker("b", running_blocks=10), worker("c", cached=3, queued=3)]
    assert chosen(rule, workers) == "a"
    # 2·.4 + 1 + 0 = 1.8 is no longer enough.
    assert chosen(rule, [worker("a", cached=4, queued=4), *workers[1:]]) == "b"
    # Equal queues count 1 each, and equal sums are drawn from.
    assert {chosen(rule, [worker("a", queued=3), worker("b", queued=3)]) for _ in range(50)} == {"a", "b"}
    # A prompt of less than a block has no prefix.
    assert chosen(rule, [worker("a", queued=1), worker("b")], tokens=50) == "b"


@st.composite
def pools(draw: st.DrawFn) -> list[WorkerView]:
    few = st.integers(0, 3)
    return [
        worker(
            f"n0/1/{index}",
            draw(st.sampled_from([1, 2, 4, 8])),
            cached=draw(few),
            queued=draw(few),
            running=draw(few),
            uncached=100 * draw(few),
            running_blocks=draw(few),
        )
        for index in range(draw(st.integers(1, 5)))
    ]


@pytest.mark.parametrize("name", sorted(RULES))
@settings(max_examples=20)
@given(steps=st.lists(st.tuples(pools(), st.integers(1, 900), st.integers(0, 3)), min_size=1, max_size=12))
def test_every_rule_takes_one_of_the_workers_and_repeats_with_its_seed(
    name: str, steps: list[tuple[list[WorkerView], int, int]]
) -> None:
    """Workers come and go between the steps, and what is placed is told."""
    runs = []
    for _ in range(2):
        rule, run = RULES[name](Random(7)), []
        for number, (workers, tokens, salt) in enumerate(steps):
            asked = prompt(tokens, salt, shared=min(2, tokens // BLOCK_TOKENS), at_s=30.0 * number)
            choice = rule.choose(asked, workers)
            run.append(choice)
            if choice is None:
                assert all(each.outstanding_requests for each in workers)
            else:
                assert choice in [each.worker for each in workers]
                rule.placed(RequestId(str(number)), asked, choice)
                rule.ended(RequestId(str(number)), choice)
        runs.append(run)
    assert runs[0] == runs[1]
    assert rule.name == name
