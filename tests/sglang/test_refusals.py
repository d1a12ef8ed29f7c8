"""What cannot work is refused when the server starts, by name."""

import os
import subprocess
from pathlib import Path

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.support.adapter_servers import command_of, environment_of, free_ports, switching_arguments
from tests.support.tiny_models import write_tiny_model

pytestmark = ON_REAL_SERVERS


def refusal(model: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """The log of a server that ends while it starts."""
    command = command_of(model, free_ports(200), *switching_arguments(2), *arguments)
    with log.open("wb") as output:
        ended = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_of(2) | (environment or {}),
            timeout=3600,
            check=False,
        )
    assert ended.returncode != os.EX_OK
    return log.read_text(errors="replace")


def test_settings_are_refused_all_at_once(model: Path, tmp_path: Path) -> None:
    log = refusal(
        model,
        tmp_path / "log",
        *("--disable-radix-cache", "--enable-prefill-delayer"),
        environment={"SGLANG_SCHEDULER_SKIP_ALL_GATHER": "0"},
    )
    for name in ("disable_radix_cache", "enable_prefill_delayer", "SGLANG_SCHEDULER_SKIP_ALL_GATHER"):
        assert f"{name} is" in log


def test_a_variable_that_says_neither_yes_nor_no_is_refused(model: Path, tmp_path: Path) -> None:
    log = refusal(model, tmp_path / "log", environment={"VERTUMNUS_SGLANG": "yes"})
    assert "VERTUMNUS_SGLANG: 'yes' is neither 0 nor 1" in log


def test_a_model_that_is_not_proven_is_refused(tmp_path: Path) -> None:
    log = refusal(write_tiny_model(tmp_path / "llama", "llama"), tmp_path / "log")
    assert "LlamaForCausalLM cannot change its degree while it runs" in log
