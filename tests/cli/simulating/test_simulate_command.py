"""`vertumnus simulate` as a user types it, on a made-up trace, and how a pool is written down."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.simulating.asking import parse_nodes, parse_parameters, parse_stragglers

SMALL = ["simulate", "--phase", "20:4:tool-agent", "--node", "4,4", "--node", "8"]


def simulate(*options: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [*SMALL, *options, "--json"])
    assert result.exit_code == 0, result.output
    runs: list[dict[str, object]] = json.loads(result.stdout)
    return runs


def test_policies_are_compared_on_equal_requests() -> None:
    runs = simulate("--policy", "paper", "--policy", "round-robin", "--seeds", "2", "--warmup-s", "2")
    assert [(run["policy"], run["seed"]) for run in runs] == [
        ("paper", 1), ("round-robin", 1), ("paper", 2), ("round-robin", 2),
    ]  # fmt: skip
    paper, round_robin = (run["ttft"] for run in runs[:2])
    assert isinstance(paper, dict)
    assert isinstance(round_robin, dict)
    assert paper["requests"] == round_robin["requests"] > 40
    assert paper["mean_s"] < round_robin["mean_s"]


def test_a_parameter_is_set_for_every_policy() -> None:
    plain, priced = simulate("--policy", "paper"), simulate("--policy", "paper", "--set", "lam=10")
    # At ten times the price of a GPU-second nothing goes to eight GPUs that fits on four.
    assert priced[0]["by_degree"] != plain[0]["by_degree"]


def test_a_parameter_that_none_of_the_policies_reads_is_named() -> None:
    options = [*SMALL, "--set", "lam_vertumnus=1", "--set", "lam=1", "--policy", "paper", "--policy", "round-robin"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "lam_vertumnus: nothing reads it now; it is read with placement_policy=vertumnus" in result.output
    assert "lam: nothing reads it" not in result.output, "one of them does"


def test_pictures_and_rows(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SMALL, "--policy", "paper", "--policy", "least-work", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "on 16 GPUs" in result.stdout
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "ttft.svg").read_text()
    header, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert header == "policy,seed,arrival_us,prompt_tokens,cached_tokens,slo_us,ttft_us,queue_us,degree"
    assert {row.split(",")[0] for row in rows} == {"paper", "least-work"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "magic"], "'magic' is not one of"),
        (["--set", "lam"], "name=value"),
        (["--set", "lam=-1"], "lam"),
        (["--node", "3,5"], "degree"),
        (["--gpus", "17"], "--gpus 17"),
        (["--coefficients", "none"], "coefficients"),
        (["--warmup-s", "1000"], "no request arrived"),
        (["--warmup-s", "inf"], "Invalid value for '--warmup-s'"),
        (["--view-age-s", "nan"], "Invalid value for '--view-age-s'"),
        (["--straggler", "n0=nan"], "--straggler n0=nan: the factor is outside [0.1, 100.0]"),
        (["--phase", "inf:4:tool-agent"], "both must be above 0, and end"),
    ],
)
def test_what_cannot_be_is_named(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, [*SMALL, *options])
    assert result.exit_code == 2
    assert named in result.output


def test_nodes_are_repeated_up_to_a_number_of_gpus() -> None:
    assert parse_nodes(["2x4,4", "8"], None) == ((4, 4), (4, 4), (8,))
    assert parse_nodes(["4,4", "8"], 40) == ((4, 4), (8,), (4, 4), (8,), (4, 4))
    for wrong in ("0x8", "yx8"):
        with pytest.raises(ValueError, match="no number of nodes"):
            parse_nodes([wrong], None)


def test_values_have_their_types() -> None:
    assert parse_parameters(["lam=0", "worker_order=fcfs"]) == {"lam": 0.0, "worker_order": "fcfs"}
    assert parse_stragglers(["n0=2"]) == {"n0": 2.0}
    with pytest.raises(ValueError, match="node=factor"):
        parse_stragglers(["n0"])
