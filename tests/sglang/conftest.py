"""Everything here runs on real SGLang servers; without them it is skipped. One server at a time, shared by a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sglang_servers import Running, python, server
from tests.support.tiny_models import write_tiny_model

CONTEXT_TOKENS = 4_096


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    if python() is None:
        pytest.skip("`make sglang-cpu` has not been run")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, float32."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3", context=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def fixed_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An unmodified server of degree 1 that decodes what it prefills."""
    with server(model, tmp_path_factory.mktemp("logs") / "fixed.log") as running:
        yield running
