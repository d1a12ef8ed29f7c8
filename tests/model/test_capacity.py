"""κ_C as a set has it."""

import json
from pathlib import Path

import pytest

from shared.model.capacity import Capacities, load_capacities

COSTS = {"version": "mine-1", "d": 0, "a": 0, "b": 0, "c": 0, "alpha": 0}


def test_a_set_that_nobody_has_profiled_has_none() -> None:
    assert load_capacities("qwen3_30b_a3b_h20") == Capacities(version="qwen3_30b_a3b_h20-1")


def test_a_profiled_set_has_them_by_degree(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**COSTS, "capacity_shares": {"1": 0.6, "4": 1.1}}))
    assert load_capacities(str(file)) == Capacities(version="mine-1", capacity_shares={1: 0.6, 4: 1.1})


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"3": 0.5}, r"capacity_shares\.3\.\[key\]: .*should be 1, 2, 4 or 8"),
        ({"1": -0.5}, r"capacity_shares\.1: .* greater than or equal to 0"),
        ({"1": 5}, r"capacity_shares\.1: .* less than or equal to 4"),
    ],
)
def test_a_share_out_of_bounds_is_named(tmp_path: Path, shares: dict[str, float], message: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**COSTS, "capacity_shares": shares}))
    with pytest.raises(ValueError, match=message):
        load_capacities(str(file))
