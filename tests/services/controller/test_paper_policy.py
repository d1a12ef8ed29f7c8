"""Each rule of the paper's policy and each conflict of two of them, by hand."""

import pytest
from controller_world import SECOND_US
from hypothesis import given
from hypothesis import strategies as st

from services.controller.paper_policy import propose
from services.controller.steps import NodeSight, Sight, Step, WorkerSight, ranked, steps
from shared.contracts.events import WindowClosed
from shared.contracts.ids import NodeId
from shared.model.lattice import Composition, Group, groups_of
from shared.model.parameters import Parameters, changed

CAPACITY_S = {1: 5, 2: 8, 4: 13, 8: 20}
"""κ_C: a split adds capacity, as two small workers carry more than one of twice the size."""

PARAMETERS = Parameters()


def node(name: str, composition: Composition, drains_s: dict[int, float] | None = None, **more) -> NodeSight:
    """`drains_s` by first rank."""
    workers = tuple(
        WorkerSight(
            group,
            CAPACITY_S[group.degree] * SECOND_US,
            round((drains_s or {}).get(group.first_rank, 0) * SECOND_US),
            more.get("reused", {}).get(group.first_rank, 0),
        )
        for group in groups_of(composition)
    )
    more.pop("reused", None)
    return NodeSight(NodeId(name), composition, more.pop("degrees", (1, 2, 4, 8)), workers, **more)


def sight(
    *nodes: NodeSight,
    persistence: dict[str, int] | None = None,
    demand_s: float = 20,
    recent_s: tuple[float, ...] | None = None,
    moving: int = 0,
    parameters: Parameters = PARAMETERS,
) -> Sight:
    demand = tuple(round(each / 20 * SECOND_US) for each in recent_s or (demand_s,) * 3)
    window = WindowClosed(
        k=9,
        from_seq=0,
        to_seq=1,
        length_us=20 * SECOND_US,
        requests=100,
        completed=100,
        prompt_tokens=1,
        demand_us=round(demand_s * SECOND_US),
        long_tokens=32_768,
        long_request_share=0.1,
        long_token_share=0.5,
        capacity_us=sum(worker.capacity_us for each in nodes for worker in each.workers),
        persistence=persistence or {},
        recent_demand=demand,
    )
    capacities_us = {degree: each * SECOND_US for degree, each in CAPACITY_S.items()}
    return Sight(window, parameters, nodes, capacities_us, moving)


def taken(seen: Sight) -> tuple[str, Composition] | None:
    proposal = propose(seen)
    return (proposal.signal, proposal.steps[0].composition) if proposal else None


PAIR = node("n0", (4, 4))


@pytest.mark.parametrize(
    ("persistence", "outcome"),
    [
        ({}, None),
        ({"overload": 2}, None),
        ({"overload": 3}, ("overload", (2, 2, 4))),
        ({"underload": 2}, None),
        ({"underload": 3}, ("underload", (8,))),
        ({"more-long": 2}, None),
        ({"more-long": 3}, ("more-long", (8,))),
        ({"fewer-long": 3}, ("fewer-long", (2, 2, 4))),
    ],
)
def test_a_sustained_signal_calls_for_its_step(persistence: dict[str, int], outcome: object) -> None:
    assert taken(sight(PAIR, persistence=persistence, demand_s=10)) == outcome


def test_persistence_is_a_parameter() -> None:
    parameters = changed(PARAMETERS, {"persistence": 5})
    recent = (10.0,) * 5
    four, five = ({"overload": 4}, {"overload": 5})
    assert taken(sight(PAIR, persistence=four, recent_s=recent, parameters=parameters)) is None
    assert taken(sight(PAIR, persistence=five, recent_s=recent, parameters=parameters)) is not None


@pytest.mark.parametrize(
    ("persistence", "outcome"),
    [
        ({"overload": 3, "more-long": 9}, ("overload", (2, 2, 4))),
        ({"underload": 3, "fewer-long": 9}, ("underload", (8,))),
        ({"overload": 1, "fewer-long": 3}, ("fewer-long", (2, 2, 4))),
    ],
)
def test_capacity_wins_a_conflict_with_the_mix(persistence: dict[str, int], outcome: object) -> None:
    assert taken(sight(PAIR, persistence=persistence, demand_s=10)) == outcome


def test_the_mix_does_not_step_in_where_capacity_has_no_step() -> None:
    smallest = node("n0", (1, 1))
    assert taken(sight(smallest, persistence={"overload": 3, "more-long": 3}, demand_s=5)) is None


def test_the_mix_counts_only_while_demand_is_stable() -> None:
    steady, moving = (10.0, 9.0, 9.5), (10.0, 8.5, 9.5)
    assert taken(sight(PAIR, persistence={"more-long": 3}, recent_s=steady)) is not None
    assert taken(sight(PAIR, persistence={"more-long": 3}, recent_s=moving)) is None
    assert taken(sight(PAIR, persistence={"overload": 3}, recent_s=moving)) is not None, "capacity counts always"


@pytest.mark.parametrize("signal", ["underload", "more-long"])
def test_a_merge_must_leave_capacity_for_the_peak_of_the_persistence(signal: str) -> None:
    # One degree-8 worker carries 20 s, and .75 of that are 15 s.
    persistence = {signal: 3}
    assert taken(sight(PAIR, persistence=persistence, recent_s=(15.0, 14.0, 14.0))) == (signal, (8,))
    assert taken(sight(PAIR, persistence=persistence, recent_s=(15.1, 14.0, 14.0))) is None
    assert taken(sight(PAIR, persistence=persistence, recent_s=(99.0, 15.0, 14.0, 14.0))) is not None, "long ago"


def test_a_split_under_overload_must_add_capacity() -> None:
    seen = sight(node("n0", (4, 4)), persistence={"overload": 3})
    no_gain = {**seen.capacities_us, 2: CAPACITY_S[4] * SECOND_US // 2}
    assert taken(seen) is not None
    assert taken(seen._replace(capacities_us=no_gain)) is None


def test_no_split_takes_the_only_room_for_the_longest_prompts() -> None:
    room = {"rank_tokens": 10_000, "prompt_tokens_max": 100_000}
    overload = {"overload": 3}
    assert taken(sight(node("n0", (4,), **room), persistence=overload)) is None
    assert taken(sight(node("n0", (4, 4), **room), persistence=overload)) == ("overload", (2, 2, 4))
    assert taken(sight(node("n0", (4,), **room), node("n1", (8,), **room), persistence=overload)) is not None
    small = {"rank_tokens": 10_000, "prompt_tokens_max": 20_000}
    assert taken(sight(node("n0", (4,), **small), persistence=overload)) is not None, "half of it holds every prompt"
    replicated = {**room, "cyclic": False}
    assert taken(sight(node("n0", (4,), **replicated), persistence=overload)) is not None, "each rank holds all anyway"


def test_one_step_at_a_time_and_only_where_a_node_may_move() -> None:
    overload = {"overload": 3}
    assert taken(sight(PAIR, persistence=overload, moving=1)) is None
    assert taken(sight(PAIR._replace(movable=False), persistence=overload)) is None
    proposal = propose(sight(PAIR._replace(movable=False), node("n1", (8,)), persistence=overload))
    assert proposal is not None
    assert {each.node for each in proposal.steps} == {"n1"}


def test_degrees_that_the_model_does_not_fit_are_no_steps() -> None:
    assert taken(sight(node("n0", (2, 2), degrees=(2, 4)), persistence={"overload": 3}, demand_s=15)) is None
    assert taken(sight(node("n0", (4, 4), degrees=(2, 4)), persistence={"underload": 3}, demand_s=5)) is None


def test_nodes_of_different_sizes_step_each_within_itself() -> None:
    seen = sight(node("n0", (2,)), node("n1", (1, 1, 2)), node("n2", (8,)))
    assert [(each.node, each.composition) for each in steps(seen, "split")] == [
        ("n0", (1, 1)),
        ("n1", (1, 1, 1, 1)),
        ("n2", (4, 4)),
    ]
    assert [(each.node, each.composition) for each in steps(seen, "merge")] == [("n1", (2, 2))]


def test_only_buddies_merge() -> None:
    assert [each.composition for each in steps(sight(node("n0", (1, 1, 1, 1, 2, 2))), "merge")] == [
        (2, 1, 1, 2, 2),
        (1, 1, 2, 2, 2),
        (1, 1, 1, 1, 4),
    ]
    assert next(steps(sight(node("n0", (2, 2, 1, 1, 1, 1))), "merge")).composition == (4, 1, 1, 1, 1)


def test_the_shortest_drain_is_taken() -> None:
    proposal = propose(sight(node("n0", (4, 4), drains_s={0: 0.9, 4: 0.5}), persistence={"overload": 3}))
    assert proposal is not None
    assert [(each.composition, each.drain_us) for each in proposal.steps] == [
        ((4, 2, 2), 500_000),
        ((2, 2, 4), 900_000),
    ]


def test_a_merge_drains_as_long_as_the_slower_sibling() -> None:
    [merge] = steps(sight(node("n0", (4, 4), drains_s={0: 0.9, 4: 0.5})), "merge")
    assert merge.drain_us == 900_000


def test_drains_within_100_ms_are_equal_and_then_traffic_decides() -> None:
    reused = {"reused": {0: 40, 4: 600}}
    near = node("n0", (4, 4), drains_s={0: 0.6, 4: 0.5}, **reused)
    far = node("n0", (4, 4), drains_s={0: 0.601, 4: 0.5}, **reused)
    assert taken(sight(near, persistence={"overload": 3})) == ("overload", (2, 2, 4))
    assert taken(sight(far, persistence={"overload": 3})) == ("overload", (4, 2, 2))


@pytest.mark.parametrize(("cyclic", "split", "merge"), [(True, 20, 0), (False, 0, 100)])
def test_what_a_step_lacks_depends_on_the_layout(cyclic: bool, split: int, merge: int) -> None:
    seen = sight(node("n0", (4, 4), cyclic=cyclic, reused={0: 40, 4: 60}))
    assert next(steps(seen, "split")).missing_blocks == split
    assert next(steps(seen, "merge")).missing_blocks == merge


def test_equals_are_taken_in_order() -> None:
    proposal = propose(sight(node("n0", (4, 4)), node("n1", (8,)), persistence={"overload": 3}))
    assert proposal is not None
    assert [(each.node, each.composition) for each in proposal.steps] == [
        ("n0", (2, 2, 4)),
        ("n0", (4, 2, 2)),
        ("n1", (4, 4)),
    ]


def test_the_capacity_after_a_step_by_hand() -> None:
    [first, *_] = steps(sight(node("n0", (4, 4)), node("n1", (8,))), "split")
    assert first.capacity_us == (2 * 13 + 20 - 13 + 2 * 8) * SECOND_US


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([NodeId("n0"), NodeId("n1")]),
        st.sampled_from([(1, 1), (2,), (4,)]),
        st.integers(0, 400_000),
        st.integers(0, 3),
        st.just(0),
        st.just(0),
    ),
    max_size=8,
)


@given(STEPS)
def test_the_best_step_is_within_100_ms_of_the_least_and_none_such_has_less_traffic(found: list[Step]) -> None:
    order = ranked(found)
    assert sorted(order) == sorted(found)
    if found:
        near = [each for each in found if each.drain_us - min(e.drain_us for e in found) <= 100_000]
        assert order[0] in near
        assert order[0].missing_blocks == min(each.missing_blocks for each in near)
        assert order[: len(near)] == sorted(near, key=lambda each: (each.missing_blocks, each.node, each.composition))


def test_groups_of_a_sight_are_those_of_its_composition() -> None:
    assert [each.group for each in PAIR.workers] == [Group(0, 4), Group(4, 4)]
