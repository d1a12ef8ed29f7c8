"""What each embedded service is told, and who wins: options over the user's variables over the engine's defaults."""

from pathlib import Path

import pytest

from cli.embedded.data_dir import DataDir
from cli.embedded.environment import Servers, SystemChoices, service_environment, services_limit_s
from cli.embedded.processes import StartFailed
from cli.embedded.supervisor import READY_LIMIT_S

SERVERS = Servers("nats://127.0.0.1:1", "postgresql+asyncpg://127.0.0.1:2/x")


def told(tmp_path: Path, name: str, engine: str = "torch", **settings: str) -> dict[str, str]:
    home = DataDir(tmp_path)
    return service_environment(name, SystemChoices(engine, None, (1, 1, 2, 4), 0, {"worker": settings}), SERVERS, home)


def test_engines_come_with_what_they_need_here(tmp_path: Path) -> None:
    assert told(tmp_path, "router")["VERTUMNUS_COEFFICIENTS"] == "smollm2_135m_cpu"
    assert told(tmp_path, "worker")["VERTUMNUS_BLOCK_TOKENS"] == "16"
    assert told(tmp_path, "worker")["VERTUMNUS_PREFILL_RANKS"] == "8"
    modelled = told(tmp_path, "worker", "modelled")
    assert modelled["VERTUMNUS_COEFFICIENTS"] == "qwen3_30b_a3b_h20"
    assert "VERTUMNUS_BLOCK_TOKENS" not in modelled


def test_the_users_variables_win_over_defaults_and_lose_to_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_BLOCK_TOKENS", "32")
    monkeypatch.setenv("VERTUMNUS_NATS_URL", "nats://elsewhere:4222")
    assert told(tmp_path, "worker")["VERTUMNUS_BLOCK_TOKENS"] == "32"
    assert told(tmp_path, "worker")["VERTUMNUS_NATS_URL"] == SERVERS.nats_url
    assert told(tmp_path, "worker", block_tokens="8")["VERTUMNUS_BLOCK_TOKENS"] == "8"
    assert told(tmp_path, "router", block_tokens="8")["VERTUMNUS_BLOCK_TOKENS"] == "32", "it is the worker's setting"


def test_the_record_s_password_is_the_ledger_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERTUMNUS_DATABASE_URL", raising=False)
    assert "VERTUMNUS_DATABASE_URL" not in told(tmp_path, "router")
    assert told(tmp_path, "ledger")["VERTUMNUS_DATABASE_URL"] == SERVERS.database_url


def test_sglang_servers_may_take_what_their_worker_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = SystemChoices("sglang", tmp_path, (1,), 0)
    with pytest.raises(StartFailed, match=r"^worker: sglang_servers: 0 servers; a node has 1 to 64$"):
        services_limit_s(sglang)
    monkeypatch.setenv("VERTUMNUS_SGLANG_SERVERS", '[{"url": "http://127.0.0.1:9", "degree": 1}]')
    monkeypatch.setenv("VERTUMNUS_BLOCKS_PER_RANK", "300")
    assert services_limit_s(sglang) == READY_LIMIT_S + 900
    monkeypatch.setenv("VERTUMNUS_SGLANG_START_S", "1800")
    assert services_limit_s(sglang) == READY_LIMIT_S + 1800
    assert services_limit_s(SystemChoices("torch", tmp_path, (1,), 0)) == READY_LIMIT_S
    monkeypatch.setenv("VERTUMNUS_SGLANG_START_S", "0")
    with pytest.raises(StartFailed, match=r"^worker: sglang_start_s: .* greater than 0$"):
        services_limit_s(sglang)
