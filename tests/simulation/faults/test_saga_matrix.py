"""One reconfiguration under load with a fault in one of its steps. All of them: `python -m simulation.faults.sagas`."""

import pytest

from simulation.faults.sagas import NAMES, Calm, calm, disturbed


@pytest.fixture(scope="module")
def undisturbed() -> Calm:
    return calm(0)


def test_every_step_takes_its_time(undisturbed: Calm) -> None:
    assert list(undisturbed.begins_s) == sorted(set(undisturbed.begins_s))
    assert len(undisturbed.begins_s) == len(NAMES) + 1
    assert undisturbed.leader in ("controller-a", "controller-b")


def test_a_dead_agent_costs_each_request_one_attempt() -> None:
    """In this run three had asked all four workers of it when nobody had declared it lost yet."""
    ran = disturbed("the agent dies, reconciling", 2, calm(2))
    assert ran.verdict.violations == ()
    assert ran.verdict.outcomes == {"served": 14}


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("the agent dies, draining", "aborted, draining: node-lost"),
        ("the leading controller dies, reconciling", "committed"),
    ],
)
def test_a_fault_in_a_step_ends_the_plan_and_no_request(fault: str, end: str, undisturbed: Calm) -> None:
    ran = disturbed(fault, 0, undisturbed)
    assert ran.verdict.violations == ()
    assert ran.end == end
    assert ran.verdict.outcomes == {"served": 14}, "twelve, and a probe for each router"
