"""What to begin with, by a trace: the table, the reason, and the value to set."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app


def written(path: Path, long_tokens: int) -> Path:
    """Ten prompts in one window, nine of 2,000 tokens and a long one, which is the P90."""
    lengths = [2_000] * 9 + [long_tokens]
    rows = [
        {
            "timestamp": 1_000 * number,
            "input_length": each,
            "output_length": 1,
            "hash_ids": list(range(-(-each // 512))),
        }
        for number, each in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "small.jsonl", 20_000)


def planned(trace: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(trace), *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_candidates_are_weighed_and_the_choice_is_given_its_reason(trace: Path) -> None:
    said = planned(trace, "--by", "paper")
    assert "P90 20,000 tokens" in said
    assert "10 prompts in the busiest window" in said
    assert "1CP8: most workers of large degrees of the" in said
    assert "that carry this within τ; by qwen3_30b_a3b_h20-1" in said
    assert """VERTUMNUS_COMPOSITIONS='{"n0":"8"}'""" in said


def test_a_replay_decides_and_says_what_the_papers_rule_takes(trace: Path, tmp_path: Path) -> None:
    assert "1CP8: the least mean TTFT of" in (said := planned(trace)), "a prompt a second waits for nobody"
    assert "the paper's rule takes the same" in said
    crowded = tmp_path / "crowded.jsonl"
    crowded.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": each // 8 * 1_000,
                    "input_length": 4_000,
                    "output_length": 1,
                    "hash_ids": [*range(each * 8, each * 8 + 8)],
                }
            )
            + "\n"
            for each in range(400)
        )
    )
    said = planned(crowded)
    assert re.search(r"8CP1: the least .* the paper's rule takes 1CP2 6CP1, \+\d+%", " ".join(said.split()))
    assert """VERTUMNUS_COMPOSITIONS='{"n0":"1,1,1,1,1,1,1,1"}'""" in said
    said = " ".join(planned(crowded, "--hit-rate", "0.99").split())
    assert "the paper's rule takes 1CP8, +" in said, "cached, they hardly take time, and still come eight at once"


def test_little_memory_leaves_small_workers_out(trace: Path) -> None:
    assert "1CP1" not in planned(trace, "--rank-tokens", "9000", "--nodes", "1", "--step-tokens", "16000")
    result = CliRunner().invoke(app, ["plan", str(trace), "--rank-tokens", "1000"])
    assert result.exit_code == 2
    assert "longest prompt has 20000" in " ".join(result.output.split())


def test_little_capacity_and_no_fitting_degree_have_reasons_of_their_own(trace: Path, tmp_path: Path) -> None:
    assert "none carries the busiest window; this has the largest capacity" in planned(
        trace, "--by", "paper", "--up", "0.01"
    )
    assert "no degree serves the P90 length within its objective" in planned(
        written(tmp_path / "long.jsonl", 128_000), "--by", "paper", "--degrees", "1"
    )


def test_it_can_be_read_by_programs(trace: Path) -> None:
    found = json.loads(planned(trace, "--nodes", "2", "--json"))
    assert found["compositions"] == {"n0": "8", "n1": "8"}
    assert found["suitable"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(("--degrees", "3"), "degree"), (("--ranks", "3", "--degrees", "2"), "3 ranks cannot be divided")],
)
def test_what_cannot_be_planned_is_refused(trace: Path, options: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(trace), *options])
    assert result.exit_code == 2
    assert complaint in result.output
