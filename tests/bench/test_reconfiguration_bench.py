"""What the bench asks of the pool: one split or merge after the other."""

from itertools import pairwise
from random import Random

from bench.reconfigurations import wanderings
from shared.model.lattice import DEGREES, merges, splits


def test_each_step_splits_one_worker_or_merges_two() -> None:
    begun = (1, 1, 2, 4)
    found = wanderings(begun, 50, Random(1))
    assert len(found) == 50
    for before, after in pairwise((begun, *found)):
        assert after in {*splits(before, DEGREES), *merges(before, DEGREES)}
    assert len(set(found)) > 10, "it comes far"
