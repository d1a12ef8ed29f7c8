"""What thresholds can mean in a window, and which of them is chosen."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from cli.main import app
from shared.contracts.ids import BlockId
from shared.model.cost import load_coefficients
from simulation.policies import calibrating
from simulation.policies.arrivals import requests_of
from simulation.policies.calibrating import Seen, calibrate, look, paper_steps, regret_steps, wanted_s
from simulation.policies.routers import Asked
from simulation.policies.setup import Setup
from simulation.workloads.drifting import Drift, drifting
from simulation.workloads.rows import write

SETUP = Setup(
    ((4, 4), (8,)), load_coefficients("qwen3_30b_a3b_h20"), parameters={"placement_policy": "paper", "beta": 1.0}
)
DRIFT = Drift(epochs=1, epoch_s=20, requests_per_s=10, prompts=4)


def asked(at_s: float, first: int) -> Asked:
    return Asked(round(at_s * 1e9), 1_000, (BlockId(first.to_bytes(16)),))


def test_a_prefix_stays_wanted_from_its_first_to_its_last_request() -> None:
    """The first for 9 s, the second for 3 s, the third was wanted twice only."""
    times = [(0, 1), (1, 2), (2, 2), (4, 2), (5, 1), (6, 3), (9, 1), (9.5, 3)]
    assert wanted_s([asked(*each) for each in times]) == 6.0
    assert wanted_s([asked(0, 1), asked(1, 1)]) is None


def test_thresholds_are_quantiles_of_what_was_seen() -> None:
    seen = Seen(accesses=[float(value) for value in range(1, 102)], missed_s=[0.5] * 10)
    intra, inter = paper_steps(seen)
    assert [each.parameters for each in intra] == [
        {"theta_intra": 51.0, "theta_reclaim": 7.6},
        {"theta_intra": 81.0, "theta_reclaim": 12.0},
        {"theta_intra": 96.0, "theta_reclaim": 14.0},
    ]
    assert [each.parameters for each in inter] == [{"theta_inter": 0.5}], "equal quantiles are tried once"
    assert list(paper_steps(Seen())) == []


def test_a_copy_is_priced_by_what_a_block_takes() -> None:
    """512 tokens of 98,304 bytes at 10 GB/s take 5 ms."""
    horizon, price = regret_steps(SETUP, 30.0)
    assert [each.parameters for each in horizon] == [{"regret_horizon_s": 30.0, "regret_fade_s": 15.0}]
    assert [each.parameters["copy_price_s"] for each in price] == [0.005, 0.02]
    assert len(list(regret_steps(SETUP, None))) == 1


def test_a_window_is_looked_at_without_a_policy_and_the_best_is_chosen_only_if_it_is_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = tuple(islice(requests_of(drifting(Random(1), DRIFT), 512), 100))
    seen = look(replace(SETUP, parameters={**SETUP.parameters, "cache_policy": "paper"}), requests, 0)
    assert seen.scans > 5
    assert seen.accesses
    monkeypatch.setattr(calibrating, "QUANTILES", (0.8,))
    found = calibrate(SETUP, requests, 0, [1])
    names = [each.trial.name.split()[0] for each in found.tried]
    assert names == ["in", "lru", *["paper"] * 2, *["regret"] * 4]
    assert found.tried[1].change.mean == 0.0, "caches left to themselves are what is in force"
    means = [each.outcomes[0].ttft.mean_s for each in found.tried]
    if found.chosen is None:
        assert min(means) > means[0] * (1 - calibrating.GAIN_MIN)
    else:
        assert found.chosen.outcomes[0].ttft.mean_s == min(means)
    monkeypatch.setattr(calibrating, "GAIN_MIN", 2.0)
    assert calibrate(SETUP, requests[:20], 0, [1]).chosen is None


def test_the_command_prints_what_it_would_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "QUANTILES", (0.8,))
    with (tmp_path / "window.jsonl").open("wb") as file:
        write(drifting(Random(1), DRIFT), file)
    options = ["calibrate-cache", str(tmp_path / "window.jsonl"), "--node", "4,4", "--limit", "60", "--seeds", "1"]
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["window"] == "60 requests of window.jsonl on 8 GPUs"
    assert all(each["why"] for each in said["tried"])
    chosen = [each for each in said["tried"] if each["parameters"] == said["set"]]
    assert chosen or not said["set"]
