"""The forecasting policy's rules, by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.arrivals import Arrival, Change
from services.controller.forecast import (
    ARRIVALS_MAX,
    POOLS_MAX,
    Rule,
    Scores,
    Target,
    choose,
    rule,
    sampled,
    shapes,
    stationary,
    targets,
)
from services.controller.steps import NodeSight, WorkerSight
from shared.contracts.ids import NodeId, RequestId
from shared.model.lattice import Composition, groups_of
from shared.model.parameters import Parameters

S = 10**9
NOW = 1_000 * S


def arrivals(begin_s: float, end_s: float, per_s: float, long_every: int = 0) -> list[Arrival]:
    """Evenly spaced, `begin_s` to `end_s` before NOW."""
    number = round((begin_s - end_s) * per_s)
    return [
        Arrival(
            NOW - round((begin_s - (n + 0.5) / per_s) * S),
            RequestId(f"{begin_s}-{n}"),
            20_000 if long_every and not n % long_every else 1_000,
            0,
        )
        for n in range(number)
    ]


def test_all_that_is_alike_is_taken_and_two_minutes_at_most() -> None:
    steady = arrivals(120, 0, 5)
    assert stationary(steady, NOW) == steady
    assert len(stationary(arrivals(60, 0, 5), NOW)) == 300


def test_another_rate_ends_the_stretch() -> None:
    busy = arrivals(45, 0, 10)
    assert stationary(arrivals(120, 45, 5) + busy, NOW) == busy
    assert stationary(arrivals(120, 45, 9) + busy, NOW) != busy, "9 and 10 a second are chance"
    late = arrivals(15, 0, 10)
    assert stationary(arrivals(120, 15, 6.4) + late, NOW) != late, (
        "3.4 standard deviations, of arrivals that depend on none"
    )


def test_another_share_of_long_prompts_ends_the_stretch() -> None:
    late = arrivals(45, 0, 10, long_every=4)
    assert stationary(arrivals(120, 45, 10) + late, NOW) == late


def test_a_quarter_of_a_minute_is_taken_whatever_came_before() -> None:
    assert stationary(arrivals(120, 10, 10), NOW) == [
        each for each in arrivals(120, 10, 10) if each.time_ns > NOW - 15 * S
    ]
    assert stationary([], NOW) == []


def test_few_arrivals_are_replayed_as_they_came() -> None:
    few = arrivals(30, 0, 5)
    replayed = sampled(few)
    assert [each.time_us for each in replayed] == [(each.time_ns - few[0].time_ns) // 1_000 for each in few]


def test_many_are_thinned_at_the_same_rate_and_the_choice_is_by_request() -> None:
    many = arrivals(100, 0, 20)
    replayed = sampled(many)
    assert len(replayed) == ARRIVALS_MAX
    span_s = (replayed[-1].time_us - replayed[0].time_us) / 1e6
    assert ARRIVALS_MAX / span_s == pytest.approx(20, rel=0.02)
    shuffled = random.Random(1).sample(many, len(many))
    assert sampled(shuffled) == replayed


def node(name: str, composition: Composition, drain_s: float = 0, **more) -> NodeSight:
    workers = tuple(WorkerSight(group, 1, round(drain_s * 1e6)) for group in groups_of(composition))
    return NodeSight(NodeId(name), composition, more.pop("degrees", (2, 4, 8)), workers, **more)


def test_a_small_pool_mixes_degrees_and_a_large_one_has_uniform_nodes() -> None:
    assert shapes(node("n0", (8,)), mixed=False) == [(4, 4), (2, 2, 2, 2)]
    assert shapes(node("n0", (4, 2, 2)), mixed=True) == [(8,), (4, 4), (2, 2, 2, 2)]
    assert shapes(node("n0", (2, 2), degrees=(1, 2)), mixed=True) == [(2, 1, 1), (1, 1, 1, 1)]


def test_five_nodes_of_three_degrees_reach_21_pools_the_nearest_first() -> None:
    found = targets([node(f"n{n}", (4, 4)) for n in range(5)])
    assert len(found) == 21
    assert found[0] == Target(((4, 4),) * 5, 0)
    assert [each.moves for each in found] == sorted(each.moves for each in found)
    assert sum(each.moves == 1 for each in found) == 2
    assert len({each.degrees for each in found}) == 21


def test_many_nodes_reach_no_more_than_64_pools() -> None:
    found = targets([node(f"n{n}", (4, 4) if n % 2 else (8,), degrees=(1, 2, 4, 8)) for n in range(40)])
    assert len(found) == POOLS_MAX
    assert max(each.moves for each in found) <= 4


def test_nodes_that_may_not_move_stay_and_the_longest_prompts_keep_their_room() -> None:
    held = node("n0", (8,), movable=False)
    assert {each.compositions[0] for each in targets([held, node("n1", (8,))])} == {(8,)}
    room = {"rank_tokens": 10, "prompt_tokens_max": 80}
    found = targets([node("n0", (8,), **room), node("n1", (8,), **room)])
    assert all(8 in each.degrees for each in found)


TWO = [node("n0", (4, 4), drain_s=3), node("n1", (4, 4), drain_s=1)]
REACH = [Target(((4, 4), (4, 4)), 0), Target(((8,), (4, 4)), 1), Target(((8,), (8,)), 2)]


def chosen(
    scores: list[int],
    errors: list[int] | None = None,
    changes: dict | None = None,
    nodes=TWO,
    reach=REACH,
    stretch_s=80,
):
    found = Scores(tuple(scores), None if errors is None else tuple(errors))
    parameters = Parameters(forecast_gain=0.03, window_s=20)
    return choose(nodes, reach, found, stretch_s * 1_000_000, parameters, changes or {}, NOW)


def test_the_best_score_moves_if_it_gains_enough() -> None:
    choice = chosen([1_100_000, 1_000_000, 1_050_000])
    assert choice is not None
    assert choice.gain == pytest.approx(1 - 1 / 1.1)
    assert choice.target == REACH[1]
    assert chosen([1_030_000, 1_000_000, 1_050_000]) is None, "2.9 %"
    assert chosen([1_000_000, 1_000_000, 1_000_000]) is None


def test_each_node_that_moves_costs_one_percent() -> None:
    assert chosen([1_200_000, 1_000_000, 991_000]).target == REACH[1]
    assert chosen([1_200_000, 1_000_000, 980_000]).target == REACH[2]


def test_of_equal_nodes_the_one_goes_that_is_free_first() -> None:
    assert chosen([1_100_000, 1_000_000, 1_050_000]).moves == (("n1", (8,)),)


def test_at_most_two_nodes_go_at_once() -> None:
    nodes = [node(f"n{n}", (4, 4), drain_s=5 - n) for n in range(4)]
    reach = [Target(((4, 4),) * 4, 0), Target(((8,),) * 4, 4)]
    assert chosen([1_500_000, 1_000_000], nodes=nodes, reach=reach).moves == (("n3", (8,)), ("n2", (8,)))


def test_a_gain_is_believed_at_twice_its_error() -> None:
    """Of a stretch of 80 s."""
    assert chosen([1_100_000, 1_000_000, 1_050_000], errors=[0, 51_000, 90_000]) is None
    assert chosen([1_100_000, 1_000_000, 1_050_000], errors=[0, 50_000, 90_000]).target == REACH[1]
    assert chosen([1_100_000, 1_000_000, 1_020_000], errors=[0, 51_000, 40_000]).target == REACH[2], "less, but sure"


def test_the_longer_nothing_is_new_the_surer_a_gain_has_to_be() -> None:
    """A tenth of gain: right after a change of load at once its error, after two minutes at three times that."""
    gains = [1_100_000, 1_000_000, 1_050_000]
    for stretch_s, most in ((15, 100_000), (40, 100_000), (60, 66_666), (80, 50_000), (120, 33_333)):
        assert chosen(gains, errors=[0, most + 1, 90_000], stretch_s=stretch_s) is None
        assert chosen(gains, errors=[0, most, 90_000], stretch_s=stretch_s).target == REACH[1]


BACK = Change.of((8,), (4, 4))
"""What a move from (4, 4) to (8,) undoes."""


def test_going_back_within_three_minutes_needs_twice_the_gain_on_whichever_node() -> None:
    lately, long_ago = ({BACK: NOW - age * S} for age in (179, 180))
    assert chosen([1_050_000, 1_000_000, 1_050_000], changes=lately) is None
    assert chosen([1_050_000, 1_000_000, 1_050_000], changes=long_ago) is not None
    assert chosen([1_070_000, 1_000_000, 1_050_000], changes=lately) is not None
    onwards = {Change.of((4, 4), (8,)): NOW - 60 * S}
    assert chosen([1_050_000, 1_000_000, 1_050_000], changes=onwards) is not None, "that goes on, and not back"


def test_nothing_is_undone_within_two_windows() -> None:
    assert chosen([2_000_000, 1_000_000, 1_050_000], changes={BACK: NOW - 39 * S}) is None
    assert chosen([2_000_000, 1_000_000, 1_050_000], changes={BACK: NOW - 40 * S}) is not None


def test_the_rule_is_that_of_the_placement_policy_in_force() -> None:
    assert rule(Parameters(placement_policy="paper", worker_order="fcfs")) == Rule(3.0, 0.1, shortest_first=False)
    assert rule(Parameters(placement_policy="vertumnus")) == Rule(3.0, 0.05, True, adaptive=True, ordered=True)
    fixed = Parameters(placement_policy="vertumnus", adaptive_beta=False, worker_order="fcfs", beta=2)
    assert rule(fixed) == Rule(2.0, 0.05, shortest_first=False), "who comes first is served first: nobody is overtaken"
    assert rule(Parameters(placement_policy="least-work")) == Rule(0.0, 0.0, shortest_first=True)


@given(st.lists(st.sampled_from([(8,), (4, 4), (2, 2, 2, 2)]), min_size=1, max_size=6), st.integers(0, 9_999))
def test_moves_lead_towards_the_target_and_each_from_a_node_that_is_elsewhere(compositions, pick: int) -> None:
    nodes = [node(f"n{n}", each, drain_s=n * 7 % 5) for n, each in enumerate(compositions)]
    reach = targets(nodes)
    best = pick % len(reach)
    choice = chosen([2_000_000 if n != best else 1_000_000 for n in range(len(reach))], nodes=nodes, reach=reach)
    assert (choice is None) == (best == 0)
    if choice is not None:
        by_name = {each.node: each for each in nodes}
        assert len(choice.moves) == min(2, reach[best].moves)
        assert all(by_name[name].composition != to for name, to in choice.moves)
        for name, to in choice.moves:
            by_name[name] = node(name, to)
        assert next(t for t in targets(list(by_name.values())) if t.degrees == reach[best].degrees).moves == max(
            0, reach[best].moves - 2
        )
