"""The benches of policies on a small trace: they run, they compare, and slices have the rate they were asked for."""

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from bench.policies.__main__ import SETUP, app
from bench.policies.scale import measured
from bench.policies.workloads import source
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.rows import write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    with path.open("wb") as file:
        write(generated([Phase(200, 1, SHAPES["conversation"])], Random(1)), file)
    return path


def test_routing_compares_on_equal_slices(trace: Path, tmp_path: Path) -> None:
    options = ["--policy", "paper", "--policy", "round-robin", "--rate", "4", "--slices", "2", "--warmup-s", "1"]
    result = CliRunner().invoke(app, ["routing", str(trace), *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "small at 4 requests/s on 40 GPUs" in result.stdout
    cell = json.loads((tmp_path / "routing.json").read_text())["small"]["4.0"]
    assert cell["paper"]["mean_s"][0] < cell["round-robin"]["mean_s"][0]
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "routing_mean.svg", "routing_p90.svg", "routing_attainment.svg", "routing_hit_rate.svg",
    }  # fmt: skip


def test_a_slice_has_its_rate_and_its_part(trace: Path) -> None:
    found = source(str(trace))
    parts = [list(found.slice(number, 2, rate=5, limit=1_000, seed=1)) for number in range(2)]
    assert sum(map(len, parts)) == len(found.rows)
    for part in parts:
        assert len(part) / (part[-1].at_ns / 1e9) == pytest.approx(5, rel=0.1)
    assert parts[0] != parts[1]


def test_a_larger_pool_has_more_workers_and_more_load() -> None:
    cost = measured(80, "paper", SETUP, requests=20)
    assert (cost.gpus, cost.workers) == (80, 14)
    assert cost.decision_us > 0


def test_tenants_are_compared_with_and_without_shares(tmp_path: Path) -> None:
    options = ["--policy", "paper", "--seconds", "10", "--seeds", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["tenants", *options])
    assert result.exit_code == 0, result.output
    assert "a flood from 6 to 30" in result.stdout
    found = json.loads((tmp_path / "tenants.json").read_text())["paper"]
    assert found["none"][0][1][-1] > found["by weight"][0][1][-1], "the other tenant's P90 in the flood"
