"""`vertumnus capacity` as a user runs it, and the controller that counts with what it wrote."""

import json
from pathlib import Path

import pytest

from services.controller.capacity import Capacity, capacity
from services.controller.settings import ControllerSettings
from services.worker.engine.modelled import ModelledEngine
from shared.model.capacity import load_capacities
from shared.model.cost import load_coefficients
from tests.cli.profiling.test_profile_commands import never_started, typed

QUICK = ("--engine", "modelled", "--degrees", "1,4", "--windows", "2", "--steps", "3")


def test_a_set_gets_capacities_that_the_controller_counts_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mine.json"
    done = typed("capacity", "qwen3_30b_a3b_h20", *QUICK, "-o", out)
    assert done.exit_code == 0, done.output
    before, after = load_coefficients("qwen3_30b_a3b_h20"), load_coefficients(str(out))
    assert after.model_dump(exclude={"version"}) == before.model_dump(exclude={"version"})
    assert after.version.startswith("qwen3_30b_a3b_h20_1-"), "other capacities, another version"
    monkeypatch.setenv("VERTUMNUS_COEFFICIENTS", str(out))
    settings = ControllerSettings()
    profiled = load_capacities(settings.coefficients)
    assert set(profiled.capacity_shares) == {1, 4}
    assert 0 < profiled.capacity_shares[1] <= profiled.capacity_shares[4] < 1
    share = profiled.capacity_shares[4]
    assert capacity(profiled, 0.7, 20_000_000, 4) == Capacity(round(share * 20_000_000), after.version)
    assert capacity(profiled, 0.7, 20_000_000, 8) == Capacity(14_000_000, None), "a degree that was not profiled"


def test_the_evidence_says_how_and_is_kept_through_another_ramp(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    typed("capacity", "qwen3_30b_a3b_h20", *QUICK, "-o", first)
    done = typed("capacity", first, *QUICK, "--attainment", "0.5", "-o", second, "--json")
    written = json.loads(second.read_text())
    assert json.loads(done.stdout) == written
    evidence = written["capacity"]
    assert (evidence["attainment"], evidence["window_s"], evidence["device"]) == (0.5, 20, "modelled")
    assert [each["degree"] for each in evidence["ramps"]] == [1, 4]
    assert all(len(each["trials"]) == 3 for each in evidence["ramps"])
    versions = {load_coefficients(str(each)).version for each in (first, second)}
    assert {each[:-8] for each in versions} == {"qwen3_30b_a3b_h20_1-"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "'nosuch' is not one of"),
        (("nowhere.json",), "coefficients: nowhere.json cannot be read"),
        (("qwen3_30b_a3b_h20", "--shape", "round"), "--shape round: must be one of"),
        (("qwen3_30b_a3b_h20", "--shrink", "0"), "factor: 0.0 is outside (0, 1]"),
        (("qwen3_30b_a3b_h20", "--degrees", "3"), "--degrees [3]: each must be one of 1, 2, 4, 8"),
        (("qwen3_30b_a3b_h20", "--degrees", "4,-1,1"), "--degrees [-1]: each must be one of 1, 2, 4, 8"),
        (("qwen3_30b_a3b_h20", "--windows", "1000", "--window-s", "3600"), "--windows, --window-s: more than 100000"),
    ],
)
def test_what_is_wrong_is_one_line_and_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(ModelledEngine, "start", never_started)
    done = typed("capacity", *words, "--engine", "modelled", "-o", tmp_path / "out.json")
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert not list(tmp_path.iterdir())
