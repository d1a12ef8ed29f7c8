"""`vertumnus trace …` as a user runs it."""

import os
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from cli.commands.trace import app
from cli.embedded.data_dir import DataDir, RunningService, RunningSystem

runner = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    result = runner.invoke(
        app, ["generate", "-o", str(path), "--phase", "30:5:tool-agent", "--phase", "30:2:conversation"]
    )
    assert result.exit_code == 0, result.output
    return path


def inspected(path: Path, *options: str) -> dict[str, object]:
    result = runner.invoke(app, ["inspect", str(path), "--json", *options])
    assert result.exit_code == 0, result.output
    return dict(orjson.loads(result.stdout))


def test_a_trace_is_generated_and_inspected(trace: Path) -> None:
    found = inspected(trace)
    assert found["requests"] == len(trace.read_bytes().splitlines())
    assert set(found["prompt_tokens"]) == {"mean", "p50", "p90", "p99", "max"}  # type: ignore[call-overload]
    shown = runner.invoke(app, ["inspect", str(trace)])
    assert "ideal hit rate" in shown.stdout
    assert "█" in shown.stdout


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_an_inspection_is_drawn(trace: Path, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"trace.{ending}"
    inspected(trace, "--plot", str(picture))
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert ending == "png" or b"ideal hit rate" in content


def test_a_picture_of_another_kind_is_refused(trace: Path) -> None:
    result = runner.invoke(app, ["inspect", str(trace), "--plot", "trace.gif"])
    assert result.exit_code == 2
    assert "--plot trace.gif: the name must end in one of png, svg" in result.stderr


def test_azures_lengths_become_a_trace(tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.csv", tmp_path / "out.jsonl"
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert inspected(lengths)["requests"] == 1
    assert runner.invoke(app, ["convert", str(lengths), "-o", str(out)]).exit_code == 0
    assert orjson.loads(out.read_bytes()) == {
        "timestamp": 0,
        "input_length": 374,
        "output_length": 44,
        "hash_ids": [0],
    }


def test_a_workload_is_made_by_its_name(tmp_path: Path) -> None:
    out = tmp_path / "drifting.jsonl"
    assert runner.invoke(app, ["generate", "-o", str(out), "--workload", "drifting"]).exit_code == 0
    assert inspected(out)["requests_per_s"] == pytest.approx(24, rel=0.05)
    refused = runner.invoke(app, ["generate", "-o", str(out), "--workload", "nothing"])
    assert refused.exit_code == 2
    assert "--workload nothing: must be one of conversation, tool-agent, drifting" in refused.stderr


def test_conversion_slices_shrinks_and_sets_the_rate(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.jsonl"
    options = ["--shrink", "0.0625", "--rate", "20", "--limit", "100", "--max-output", "8"]
    result = runner.invoke(app, ["convert", str(trace), "-o", str(out), *options])
    assert result.exit_code == 0, result.output
    assert "100 requests, 32 tokens to a block" in result.stderr
    found = inspected(out, "--block-tokens", "32")
    assert (found["requests"], found["block_tokens"]) == (100, 32)
    assert found["requests_per_s"] == pytest.approx(20, rel=0.01)
    assert not list(tmp_path.glob("*.partial"))


def test_a_bad_file_is_refused_with_its_line(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes() + b'{"timestamp": 90000}\n')
    result = runner.invoke(app, ["inspect", str(trace)])
    assert result.exit_code == 2
    assert "input_length: None is no whole number" in " ".join(result.stderr.split())


def test_a_bad_phase_is_refused(tmp_path: Path) -> None:
    result = runner.invoke(app, ["generate", "-o", str(tmp_path / "x"), "--phase", "60:4:nothing"])
    assert result.exit_code == 2
    assert "--phase 60:4:nothing" in result.stderr
    assert not (tmp_path / "x").exists()


def test_sending_to_nobody_fails_clearly(trace: Path) -> None:
    # Port 9 (discard) is not listened on.
    away = ["--url", "http://127.0.0.1:9"]
    result = runner.invoke(app, ["send", str(trace), *away])
    assert result.exit_code == 2
    assert "http://127.0.0.1:9/v1/models" in result.stderr
    result = runner.invoke(app, ["send", str(trace), *away, "--model", "m", "--limit", "3", "--speed", "100", "--json"])
    assert result.exit_code == 1
    found = orjson.loads(result.stdout)
    assert (found["failed"], found["problems"]["connect"]["requests"]) == (3, 3)


def test_without_an_address_the_running_system_is_meant(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = DataDir(tmp_path / "data")
    monkeypatch.setenv("VERTUMNUS_DATA_DIR", str(home.path))
    refused = runner.invoke(app, ["send", str(trace)])
    assert refused.exit_code == 2
    assert "nothing runs in" in refused.stderr
    assert "--url" in refused.stderr
    home.logs.mkdir(parents=True)
    services = {"router": RunningService(url="http://127.0.0.1:9", log=home.logs / "router.log")}
    home.announce(
        RunningSystem(
            pid=os.getpid(),
            nats_url="",
            database_url="",
            operator_key_file=tmp_path,
            tokenizer=False,
            services=services,
        )
    )
    assert "http://127.0.0.1:9/v1/models" in runner.invoke(app, ["send", str(trace)]).stderr
