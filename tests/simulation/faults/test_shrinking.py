"""What is left of a scenario that fails, by what a failure is said to need; nothing is run."""

from hypothesis import given
from hypothesis import strategies as st

from simulation.faults.running import Parts
from simulation.faults.scenario import Scenario, draw
from simulation.faults.shrinking import RUNS_MAX, shrink

SCENARIO = draw(19)
ALL = (SCENARIO.faults, SCENARIO.requests, SCENARIO.asks)
CULPRITS = st.tuples(*(st.sets(st.sampled_from(range(len(each)))) if each else st.just(set()) for each in ALL))


@given(CULPRITS)
def test_what_a_failure_needs_is_left_and_nothing_else(culprits: tuple[set[int], ...]) -> None:
    needed = [{each[number] for number in numbers} for each, numbers in zip(ALL, culprits, strict=True)]
    asked = 0

    def fails(scenario: Scenario) -> bool:
        nonlocal asked
        asked += 1
        has = (scenario.faults, scenario.requests, scenario.asks)
        return all(need <= {*each} for need, each in zip(needed, has, strict=True))

    assert shrink(SCENARIO, fails) == Parts(*(tuple(sorted(numbers)) for numbers in culprits))
    assert asked <= RUNS_MAX


def test_a_failure_that_is_never_seen_again_is_left_whole() -> None:
    assert shrink(SCENARIO, lambda _: False).of(SCENARIO) == SCENARIO


def test_the_command_names_what_is_left() -> None:
    command = Parts((0, 2), (), None).command(7)
    assert command == "python -m simulation.faults --seeds 7 --faults 0,2 --requests none"
