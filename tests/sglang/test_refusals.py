"""What cannot work is refused when the server starts, by name."""

from pathlib import Path

import pytest

from tests.support.sglang_servers import SglangServer
from tests.support.tiny_models import write_tiny_model


def refusal(server: SglangServer) -> str:
    server.launch()
    try:
        server.wait_ended(900.0)
    finally:
        server.stop()
    return server.log.read_text(errors="replace")


def test_settings_are_refused_all_at_once(qwen3: Path, tmp_path: Path) -> None:
    server = SglangServer(
        qwen3,
        tmp_path / "log",
        units=2,
        extra=("--disable-radix-cache", "--enable-prefill-delayer"),
        environment={"SGLANG_SCHEDULER_SKIP_ALL_GATHER": "0"},
    )
    log = refusal(server)
    for name in ("disable_radix_cache", "enable_prefill_delayer", "SGLANG_SCHEDULER_SKIP_ALL_GATHER"):
        assert f"{name} is" in log


@pytest.mark.parametrize("variable", ["yes"])
def test_a_variable_that_says_neither_yes_nor_no_is_refused(qwen3: Path, tmp_path: Path, variable: str) -> None:
    server = SglangServer(qwen3, tmp_path / "log", units=2, environment={"VERTUMNUS_SGLANG": variable})
    assert f"VERTUMNUS_SGLANG: '{variable}' is neither 0 nor 1" in refusal(server)


def test_a_model_that_is_not_proven_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "llama", "llama")
    server = SglangServer(model, tmp_path / "log", units=2, environment={"SGLANG_DISABLED_MODEL_ARCHS": ""})
    assert "LlamaForCausalLM cannot change its degree while it runs" in refusal(server)
