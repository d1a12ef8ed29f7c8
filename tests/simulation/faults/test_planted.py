"""A bug that is planted into production code is caught: by the seed that caught it before, or by another one."""

import pytest

from simulation.faults.planted import PLANTS, Plant, caught_by

KNOWN = {
    "a redirected request keeps its reservation": 12,
    "a redirected request is assigned under the attempt it had": 12,
    "a request may end twice": 12,
    "an agent takes what is meant for an older epoch": 28,
    "what is queued at a retiring worker is not given back": 28,
    "a repeated assignment is queued again": 43,
    "a leader's append is not fenced": 6,
    "an append is repeated without a look at the log": 2,
    "a command goes out before its decision is stored": 19,
    "a gap between two frames is not noticed": 16,
    "a repeated frame is given to the client again": 43,
    "a lost worker keeps its credit": 3,
    "a finished request keeps its pins": 7,
    "an ended request's prompt is kept": 0,
    "a row of the record says nothing of those before it": 0,
    "the record keeps runs of blocks that are gone": 0,
}
SEEDS = 100


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.bug)
def test_it_is_caught(plant: Plant) -> None:
    assert caught_by(plant, [KNOWN[plant.bug], *range(SEEDS)]) is not None


def test_nothing_stays_planted() -> None:
    before = [getattr(plant.where, plant.name) for plant in PLANTS]
    caught_by(PLANTS[0], range(1))
    assert [getattr(plant.where, plant.name) for plant in PLANTS] == before
