"""What a clumsy operator sets: each ends in an error that names the variable, and shows no secret."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.cachemgr.settings import CacheManagerSettings
from services.controller.settings import ControllerSettings
from services.ledger.settings import LedgerSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import ServiceSettings

SERVICES = {
    "router": RouterSettings,
    "ledger": LedgerSettings,
    "controller": ControllerSettings,
    "cachemgr": CacheManagerSettings,
    "worker": WorkerSettings,
}
BAD_SERVERS = ["", "x", "nats://", "nats://h:port", "nats://h:99999", "http://h:1", "nats://:s3cret@", "nats://h:1,,"]
BAD_DATABASES = ["", "x", "mysql://h/x", "postgresql://u:s3cret@h:port/x", "postgresql://u:s3cret@h:99999/x"]
BAD_FILES = ["nowhere", "folder", "empty", "binary"]
NOT_NUMBERS = ["", "x", "nan", "inf", "-1"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Good and bad ones, and an environment in which every service starts."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_bytes(b" \n")
    (tmp_path / "binary").write_bytes(b"s3cret\xff\xfe" * 8)
    (tmp_path / "key").write_bytes(b"k" * 32)
    for name, value in {
        "BLOCK_KEY_FILE": tmp_path / "key",
        "DATABASE_URL": "postgresql://u:p@h:5432/x",
        "ENGINE": "modelled",
        "API_KEY_FILE": tmp_path / "key",
        "OPERATOR_KEY_FILE": tmp_path / "key",
        "NATS_PASSWORD_FILE": tmp_path / "key",
    }.items():
        monkeypatch.setenv(f"VERTUMNUS_{name}", str(value))
    return tmp_path


def refused(monkeypatch: pytest.MonkeyPatch, settings: type[ServiceSettings], field: str, value: str) -> str:
    settings()
    monkeypatch.setenv(f"VERTUMNUS_{field.upper()}", value)
    with pytest.raises(ValidationError) as refusal:
        settings()
    [error] = refusal.value.errors(include_url=False, include_input=False)
    assert error["loc"][0] == field
    assert "s3cret" not in error["msg"]
    return error["msg"]


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("value", BAD_SERVERS)
def test_where_nats_is(monkeypatch: pytest.MonkeyPatch, files: Path, name: str, value: str) -> None:
    assert "nats://HOST:PORT is needed" in refused(monkeypatch, SERVICES[name], "nats_url", value)


@pytest.mark.parametrize("value", BAD_DATABASES)
def test_where_the_record_is(monkeypatch: pytest.MonkeyPatch, files: Path, value: str) -> None:
    assert "postgresql://" in refused(monkeypatch, LedgerSettings, "database_url", value)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("router", "block_key_file"),
        ("router", "api_key_file"),
        ("controller", "operator_key_file"),
        ("ledger", "operator_key_file"),
        ("cachemgr", "nats_password_file"),
    ],
)
@pytest.mark.parametrize("file", BAD_FILES)
def test_files_of_keys(monkeypatch: pytest.MonkeyPatch, files: Path, name: str, field: str, file: str) -> None:
    if (field, file) == ("block_key_file", "binary"):
        pytest.skip("a block key may be any bytes")
    refused(monkeypatch, SERVICES[name], field, str(files / file))


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    for name, field in (("router", "block_key_file"), ("router", "api_key_file"), ("worker", "nats_password_file")):
        with monkeypatch.context() as patched:
            broken = "/proc/self/mem"  # a file whose first byte cannot be read, for root neither
            assert "cannot be read" in refused(patched, SERVICES[name], field, broken)


@pytest.mark.parametrize("name", ["router", "cachemgr", "controller", "worker"])
@pytest.mark.parametrize("value", ["", "unknown", "../cost", "x" * 5_000])
def test_coefficients(monkeypatch: pytest.MonkeyPatch, files: Path, name: str, value: str) -> None:
    message = refused(monkeypatch, SERVICES[name], "coefficients", value)
    assert "is not one of" in message
    assert len(message) < 500


@pytest.mark.parametrize("name", ["router", "cachemgr", "controller", "worker"])
@pytest.mark.parametrize("file", BAD_FILES)
def test_files_of_coefficients(monkeypatch: pytest.MonkeyPatch, files: Path, name: str, file: str) -> None:
    if (bad := files / file).exists():
        bad = bad.rename(files / f"{file}.json")
    message = refused(monkeypatch, SERVICES[name], "coefficients", str(bad.with_suffix(".json")))
    assert f"{file}.json" in message


@pytest.mark.parametrize("value", ["x", "{", "[]", '{"n0": "3"}', '{"n0": [3]}', '{"n0": [2, 1, 2]}', '{"a b": "8"}'])
def test_compositions_by_node(monkeypatch: pytest.MonkeyPatch, files: Path, value: str) -> None:
    assert refused(monkeypatch, ControllerSettings, "compositions", value)


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, str(2**63 - 1), str(2**70)])
def test_numbers(monkeypatch: pytest.MonkeyPatch, files: Path, name: str, value: str) -> None:
    """Every number of every service has two bounds, and "nan" is within none."""
    settings = SERVICES[name]
    for field, info in settings.model_fields.items():
        if info.annotation in (int, float) and field != "seed":
            with monkeypatch.context() as patched:
                refused(patched, settings, field, value)
