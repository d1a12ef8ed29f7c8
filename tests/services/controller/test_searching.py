"""Planning by replay: which pools are tried, and what of a long trace is replayed."""

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from services.controller.forecast import Degrees, Replayed, Rule
from services.controller.planning import Candidate, Hardware, Load, plan
from services.controller.searching import STRETCH_US, replay, search, stretches
from shared.model.cost import load_coefficients

FORMS = ((8,), (4, 4), (2, 2, 2, 2))
ANY_RULE = Rule(beta=1.0, lam=0.0, shortest_first=True, adaptive=True, ordered=True)


def pools(nodes: int) -> list[Candidate]:
    return [Candidate(each, True, 1, 1, 1) for each in combinations_with_replacement(FORMS, nodes)]


class Costs:
    """A pool's TTFT by how far its numbers of CP8, CP4 and CP2 nodes are from the best ones, and who was asked for."""

    def __init__(self, best: Mapping[int, int]) -> None:
        self.best = best
        self.asked: list[Degrees] = []

    def __call__(self, degrees: Sequence[Degrees]) -> list[int]:
        self.asked += degrees
        return [100 + sum((each.count(d) * d // 8 - n) ** 2 for d, n in self.best.items()) for each in degrees]


@given(nodes=st.integers(1, 24), eights=st.integers(0, 24), fours=st.integers(0, 24), start=st.integers(0, 10**6))
def test_where_one_valley_is_its_bottom_is_found_and_no_pool_is_replayed_twice(
    nodes: int, eights: int, fours: int, start: int
) -> None:
    eights = min(eights, nodes)
    fours = min(fours, nodes - eights)
    found = pools(nodes)
    first = start % len(found)
    costs = Costs({8: eights, 4: fours, 2: nodes - eights - fours})
    tried = search([found[first], *found[:first], *found[first + 1 :]], costs)
    assert tried[0].ttft_us == 100
    assert tried[0].candidate.degrees == (8,) * eights + (4, 4) * fours + (2, 2, 2, 2) * (nodes - eights - fours)
    assert [each.ttft_us for each in tried] == sorted(each.ttft_us for each in tried)
    assert len(set(costs.asked)) == len(costs.asked) == len(tried)
    assert any(each.candidate == found[first] for each in tried), "where it began can be compared"


def test_large_pools_are_searched_and_not_counted_out() -> None:
    costs = Costs({8: 11, 4: 30, 2: 23})
    found = pools(64)
    assert search(found, costs)[0].ttft_us == 100
    assert len(costs.asked) < 200 < len(found) == 2_145


def test_only_what_is_planned_for_is_tried() -> None:
    """Without the pools that the trace's longest prompt does not fit into."""
    costs = Costs({8: 0, 4: 0, 2: 2})
    tried = search([each for each in pools(2) if 8 in each.degrees], costs)
    assert tried[0].candidate.degrees == (8, 2, 2, 2, 2)


def test_prompts_that_large_workers_alone_serve_well_take_large_workers() -> None:
    """The kernel behind the search: one node, a prompt of 64K tokens every ten seconds, or eight of 1K at a time."""
    model = load_coefficients("qwen3_30b_a3b_h20")
    found = plan(Load(1, 10**9, [1]), Hardware(1, 8, {1: 1, 8: 1}), lambda degree, tokens: 1, 1.0)

    def taken(arrivals: Sequence[Replayed]) -> Degrees:
        return search(found, replay(arrivals, model, ANY_RULE))[0].candidate.degrees

    assert taken([Replayed(10**7 * number, 65_536, 0) for number in range(20)]) == (8,)
    assert taken([Replayed(10**7 * (number // 8), 1_024, 0) for number in range(80)]) == (1,) * 8


@given(
    gaps_s=st.lists(st.integers(0, 100), min_size=1, max_size=200),
    most=st.integers(1, 50),
)
def test_a_long_trace_keeps_whole_stretches_in_order_at_their_rate(gaps_s: list[int], most: int) -> None:
    times_us, now_us = [], 0
    for gap_s in gaps_s:
        times_us.append(now_us)
        now_us += gap_s * 10**6
    kept = stretches([Replayed(each, number, 0) for number, each in enumerate(times_us)], most)
    numbers = [each.uncached_tokens for each in kept]
    assert 1 <= len(kept) <= most
    assert numbers == sorted(numbers)
    assert [each.time_us for each in kept] == sorted(each.time_us for each in kept)
    assert all(each.time_us % STRETCH_US == times_us[each.uncached_tokens] % STRETCH_US for each in kept)
    if len(gaps_s) <= most:
        assert [each.time_us for each in kept] == times_us, "a short one stays as it is"


def test_of_six_stretches_for_a_third_of_the_room_two_are_taken_one_behind_the_other() -> None:
    arrivals = [Replayed(each * STRETCH_US + 7, 1, 0) for each in range(6)]
    assert [each.time_us for each in stretches(arrivals, 2)] == [7, STRETCH_US + 7]
    crowded = [Replayed(each, 1, 0) for each in range(9)]
    assert stretches(crowded, 4) == tuple(crowded[:4]), "one stretch that is too much is cut off"
