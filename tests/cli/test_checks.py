import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.checks import Check, machine_checks, model_check, nats_checks, postgres_check, without_password
from cli.embedded.nats import EmbeddedNats
from cli.main import app

MODEL = {"model_type": "llama", "num_hidden_layers": 2}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def test_this_machine_is_fit(tmp_path: Path) -> None:
    checks = by_name(list(machine_checks(tmp_path / "not" / "there" / "yet")))
    assert set(checks) == {"Python", "disk", "clock"}
    assert all(check.ok for check in checks.values()), checks


def test_a_model_directory_is_read(model_dir: Path) -> None:
    check = model_check(model_dir)
    assert check.ok
    assert check.found.startswith("model: llama, 2 layers")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_directory_is_unfit(model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    check = model_check(model_dir)
    assert not check.ok
    assert missing.replace("model.", "*.") in check.found


def test_a_broken_model_configuration_is_unfit(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("{}")
    assert "model_type" in model_check(model_dir).found
    assert not model_check(model_dir).ok


async def test_the_pinned_servers_are_fit(nats_server: EmbeddedNats, database_url: str) -> None:
    checks = [*await nats_checks(nats_server.url), await postgres_check(database_url)]
    assert [check.name for check in checks] == ["NATS", "NATS atomic batches", "NATS clock", "Postgres"]
    assert all(check.ok for check in checks), checks


async def test_servers_that_are_away_are_named_without_their_password() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        (nats,) = await nats_checks(f"nats://user:secret@{address}")
        postgres = await postgres_check(f"postgresql+asyncpg://user:secret@{address}/d")
    for check in (nats, postgres):
        assert not check.ok
        assert f"no answer from {address}" in check.found
        assert "secret" not in check.found


def test_a_url_is_printed_without_credentials() -> None:
    assert without_password("nats://user:secret@host:1") == "host:1"
    assert without_password("nats://host:1") == "host:1"


def test_doctor_reports_json_and_fails_when_something_is_unfit(tmp_path: Path, model_dir: Path) -> None:
    arguments = ["doctor", "--json", "--data-dir", str(tmp_path)]
    fit = CliRunner().invoke(app, [*arguments, "--model", str(model_dir)])
    assert fit.exit_code == 0, fit.output
    assert {check["name"] for check in json.loads(fit.stdout)} >= {"NATS", "Postgres", "model"}
    unfit = CliRunner().invoke(app, arguments)
    assert unfit.exit_code == 1
    assert [check["name"] for check in json.loads(unfit.stdout) if not check["ok"]] == ["model"]


def test_doctor_prints_a_table(tmp_path: Path, model_dir: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path), "--model", str(model_dir)])
    assert result.exit_code == 0, result.output
    assert "unfit" not in result.stdout
    assert "needed" in result.stdout
