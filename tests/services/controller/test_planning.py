"""The first composition by the paper's rule, by hand."""

import pytest

from services.controller.planning import Hardware, Load, plan

H = Hardware(nodes=1, ranks=4, capacities_us={1: 5, 2: 8, 4: 12})
"""4CP1 carry 20, CP2 and 2CP1 18, 2CP2 16, CP4 12."""


def prefill(degree: int, tokens: int) -> int:
    return tokens // degree


def best(load: Load, hardware: Hardware = H, up: float = 1.0) -> tuple[int, ...]:
    return plan(load, hardware, prefill, up)[0].degrees


def test_of_what_carries_the_load_the_largest_degrees_are_taken() -> None:
    assert best(Load(8, 8, [40])) == (4,), "10 of 12"
    assert best(Load(8, 8, [31])) == (4,)
    assert best(Load(8, 8, [31]), up=0.5) == (1, 1, 1, 1), "nothing is enough, and this carries most"


def test_a_length_that_small_degrees_are_too_slow_for_asks_for_a_large_one() -> None:
    assert best(Load(8, 2, [1000])) == (4,), "CP2 takes 4, and the objective is 2"
    assert best(Load(8, 4, [1000])) == (2, 1, 1), "one CP2 is enough for it, and capacity is short"


def test_where_no_degree_is_fast_enough_capacity_decides() -> None:
    found = plan(Load(80, 1, [1]), H, prefill, 1.0)
    assert not any(each.suitable for each in found)
    assert found[0].degrees == (1, 1, 1, 1)


def test_large_pools_have_nodes_of_one_degree() -> None:
    found = plan(Load(1, 9, [1]), H._replace(nodes=3), prefill, 1.0)
    assert len(found) == 10
    assert all(len(set(each)) == 1 for candidate in found for each in candidate.nodes)


def test_ranks_that_no_degree_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot be divided into workers of"):
        plan(Load(1, 1, [1]), Hardware(3, 3, {2: 1}), prefill, 1.0)


def test_workers_that_do_not_hold_a_step_and_pools_that_do_not_hold_the_longest_prompt_are_left_out() -> None:
    load = Load(8, 8, [31], longest_tokens=30)
    assert {each.degrees for each in plan(load, H._replace(rank_tokens=10, step_tokens=8), prefill, 1.0)} == {(4,)}
    assert {each.degrees for each in plan(load, H._replace(rank_tokens=16, step_tokens=8), prefill, 1.0)} == {
        (4,),
        (2, 2),
        (2, 1, 1),
    }
    assert {each.degrees for each in plan(load, H._replace(rank_tokens=16, step_tokens=20), prefill, 1.0)} == {
        (4,),
        (2, 2),
    }
    assert (1, 1, 1, 1) in {each.degrees for each in plan(load, H._replace(rank_tokens=30), prefill, 1.0)}
    with pytest.raises(
        ValueError, match="rank_tokens: workers of degree 4 hold 28 tokens; the trace's longest prompt has 30"
    ):
        plan(load, H._replace(rank_tokens=7), prefill, 1.0)
