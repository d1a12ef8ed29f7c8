"""A version that ends in a digest belongs to its numbers, wherever they are loaded."""

import json
from pathlib import Path

import pytest

from shared.model.capacity import load_capacities
from shared.model.cost import load_coefficients
from shared.model.set_version import named

VALUES = {"d": 0.01, "a": 1e-5, "b": 2e-6, "c": 6e-5, "alpha": 5e-9, "g": 0.0}
SHARES = {1: 0.5, 4: 0.25}


def written(path: Path, **changed: object) -> str:
    version = named("Rack 7", VALUES, SHARES)
    path.write_text(json.dumps({"version": version, **VALUES, "capacity_shares": SHARES, **changed}))
    return str(path)


def test_a_set_is_loaded_under_the_version_that_it_was_given(tmp_path: Path) -> None:
    name = written(tmp_path / "mine.json", evidence={"of": "no interest"})
    assert load_coefficients(name).version == load_capacities(name).version == named("rack_7", VALUES, SHARES)


@pytest.mark.parametrize("changed", [{"a": 2e-5}, {"g": 0.1}, {"capacity_shares": {1: 0.5, 4: 0.3}}])
def test_numbers_that_were_changed_by_hand_are_refused_with_what_to_do(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    name = written(tmp_path / "mine.json", **changed)
    for load in (load_coefficients, load_capacities):
        with pytest.raises(ValueError, match=r"mine\.json: version: 'rack_7-[0-9a-f]{8}' is not of these .* Fit again"):
            load(name)


def test_a_version_without_a_digest_is_its_owners_affair(tmp_path: Path) -> None:
    assert load_coefficients(written(tmp_path / "mine.json", version="mine-2", a=1.0)).a == 1.0
