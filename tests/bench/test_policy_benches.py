"""The benches of policies on a small trace: they run, they compare, and slices have the rate they were asked for."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from bench.policies.__main__ import SETUP, app
from bench.policies.adapting import PLANNED, REPLAYED, Runs
from bench.policies.adapting import table as adapting_table
from bench.policies.comparing import Side
from bench.policies.scale import measured
from bench.policies.sensitivity import THRESHOLDS, VARIED, variants
from bench.policies.workloads import source
from services.router.outlook import weights
from shared.model.calibration import PPM
from shared.model.parameters import Parameters, changed
from simulation.baselines.rules import RULES
from simulation.policies.setup import Setup
from simulation.policies.studies import OWN, policy
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.rows import write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    with path.open("wb") as file:
        write(generated([Phase(200, 1, SHAPES["conversation"])], Random(1)), file)
    return path


def test_routing_compares_on_equal_slices(trace: Path, tmp_path: Path) -> None:
    """Twice: the second time only what the cut file lacks is run again, and the table is the same."""
    options = ["--policy", "round-robin", "--beta", "3", "--lam", "0.1", "--slices", "2", "--warmup-s", "1"]
    options += ["--kept", str(tmp_path), "--out", str(tmp_path / "out")]
    first = CliRunner().invoke(app, ["routing", f"{trace}@4", *options])
    assert first.exit_code == 0, first.output
    kept = tmp_path / "routing.jsonl"
    kept.write_text(kept.read_text()[:-9])
    assert CliRunner().invoke(app, ["routing", f"{trace}@4", *options]).stdout == first.stdout
    lines = kept.read_text().strip().splitlines()
    assert (len(lines), lines[-1][:-9]) == (5, lines[-2])
    assert "at 4 requests/s, 40 GPUs, 2 slices" in first.stdout
    means = {line.split(" | ")[0]: float(line.split(" | ")[1]) for line in first.stdout.splitlines()[-2:]}
    assert means["| paper, tuned per load: β 3, λ 0.1"] < means["| round-robin"]
    assert {path.name for path in (tmp_path / "out").glob("*.svg")} == {
        "routing_mean.svg", "routing_p90.svg", "routing_attainment.svg", "routing_hit_rate.svg",
    }  # fmt: skip


def test_one_thing_is_varied_at_a_time() -> None:
    base, *sides = variants(policy("paper").of(SETUP), list(VARIED))
    assert len({side.name for side in sides}) == len({repr(side.setup) for side in sides}) == len(sides)
    assert base.setup not in [side.setup for side in sides]
    changed = {name for side in sides for name in side.setup.parameters.items() - base.setup.parameters.items()}
    assert {name for name, _ in changed} >= {"beta", "lam", "worker_order", "window_s", *THRESHOLDS}
    wrong = [each for _, each in sides if each.truth is not None and each.coefficients.alpha != each.truth.alpha]
    beliefs = {round(each.coefficients.alpha / each.truth.alpha, 2) for each in wrong if each.truth is not None}
    assert beliefs == {0.6, 1.4, 1.67, 0.71}, "alpha believed 40 % off, and steps that take 40 % less or more"


@pytest.mark.parametrize("name", [*OWN, *RULES])
def test_every_parameter_that_is_varied_counts_under_the_policy(name: str) -> None:
    """Under `vertumnus` β and λ are not those of the paper's formula: to vary these would be to run the same thing again."""

    def counts(setup: Setup) -> tuple[object, ...]:
        found = changed(Parameters(), setup.parameters)
        priced = found.placement_policy != "least-work" and setup.rule is None
        return found.worker_order, weights(found, PPM // 2) if priced else None

    base, *sides = [counts(side.setup) for side in variants(policy(name).of(SETUP), ["parameters"])]
    assert len({base, *sides}) == 1 + len(sides)


def test_what_is_varied_is_compared_and_drawn(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIED, "predictions", lambda base: [Side("no noise", replace(base, noise_sd=0))])
    options = ["--vary", "predictions", "--slices", "2", "--warmup-s", "1"]
    options += ["--kept", str(tmp_path), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["sensitivity", f"{trace}@4", *options])
    assert result.exit_code == 0, result.output
    assert [line.split(" | ")[0] for line in result.stdout.splitlines()[-2:]] == ["| as it is", "| no noise"]
    assert {path.suffix for path in tmp_path.glob("sensitivity_paper_small.*")} == {".png", ".svg"}


def test_what_adapts_is_compared_with_the_best_in_hindsight(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: two phases, two seeds; the best of each phase is another composition, and of all is the second."""

    def runs(name: str, *phases: tuple[float, float]) -> Runs:
        found = [
            {"parts": [[a, 1.0], [b, b / 10]], "whole": [(a + b) / 2, 0.95], "switches": 3, "reversed": 1}
            for a, b in phases
        ]
        return Runs(name, tuple(found))

    fixed = [
        runs("10 CP4", (1.0, 5.0), (1.0, 5.0)),
        runs("5 CP8", (2.0, 2.0), (2.0, 2.0)),
        runs(PLANNED, (4.0, 4.0), (4.0, 4.0)),
        runs(REPLAYED, (2.0, 2.0), (2.0, 2.0)),
    ]
    adapting_table(["one", "other"], [*fixed, runs("`forecast`", (1.1, 2.1), (1.3, 2.3))])
    printed = capsys.readouterr().out.splitlines()
    assert "| 5 CP8 | 2.000 | 2.000 | 2.0000 | best | -50.0% ±0.0 | +0.0% ±0.0 | 3.0, 2 |" in printed
    assert "| `forecast` | 1.200 | 2.200 | 1.7000 | -15.0% ±7.1 | -57.5% ±3.5 | -15.0% ±7.1 | 3.0, 2 |" in printed
    assert "| `forecast`: against the best of each | +20.0% | +10.0% |  |  |  |  |  |" in printed
    assert "| `forecast` | 100.0% | 22.0% | 95.0% |" in printed, "2.1 and 2.3 in the other phase"
    assert runs("`forecast`", (1.1, 2.1), (1.3, 2.3)).by_part(2)[2].mean == pytest.approx(2.2)


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
