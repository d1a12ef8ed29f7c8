"""Loads by part, one run told by them, and what counts as going back."""

import pytest

from shared.contracts.envelope import Stored
from shared.model.cost import load_coefficients
from shared.model.lattice import Composition
from simulation.policies.adapting import in_phases, of_a_day, reversals, run
from simulation.policies.setup import Setup
from simulation.workloads.mixtures import Stretch
from tests.support.story import Story, committed

S = 10**9


def at(seconds: float, node: str, epoch: int, composition: Composition) -> Stored:
    story = Story()
    story.wait(seconds)
    story.tell(committed(node, epoch, composition))
    return story.events[0]


def test_a_node_goes_back_if_it_does_so_soon_and_to_where_it_was() -> None:
    log = [
        at(0, "n0", 1, (4, 4)),
        at(0, "n1", 1, (8,)),
        at(100, "n0", 2, (8,)),
        at(139, "n0", 3, (4, 4)),
        at(150, "n1", 2, (4, 4)),
        at(160, "n1", 3, (2, 2, 2, 2)),
    ]
    assert reversals(log, 40 * S) == 1, "n0 within 39 s; n1 went on and not back"
    assert reversals(log, 39 * S) == 0


def test_the_parts_of_a_load_follow_each_other_after_their_grace() -> None:
    phases = in_phases([Stretch(100, 5, 0.5), Stretch(50, 1, 0)], grace_s=10)
    assert phases.parts == [("5/s, 50.0% long", 10, 100), ("1/s, 0.0% long", 110, 150)]
    parts = of_a_day(0.5).parts
    assert (parts[0], parts[-1]) == (("0 to 4 h", 0, 300), ("20 to 24 h", 1_500, 1_800))


def test_a_run_is_told_by_its_parts() -> None:
    setup = Setup(((4, 4), (8,)), load_coefficients("qwen3_30b_a3b_h20"))
    load = in_phases([Stretch(40, 2, 0), Stretch(20, 1, 0)], grace_s=0)
    found = run(setup, load)
    assert found == run(setup, load), "it is a function of the setup and the load"
    asked = list(load.rows(setup.seed))
    first = sum(row.arrival_ms < 40_000 for row in asked) / len(asked)
    assert found.whole.mean_s == pytest.approx(
        first * found.parts[0].mean_s + (1 - first) * found.parts[1].mean_s, rel=1e-6
    )
    assert (found.switches, found.reversed) == (0, 0)
    assert 0 < found.whole.attainment <= 1
