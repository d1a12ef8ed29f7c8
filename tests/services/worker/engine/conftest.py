"""Models and processes that the engine's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.engine.torch.zygote import Zygote
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process with torch loaded for the session: what it forks starts in milliseconds."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3-moe", "qwen3_moe")
