"""What several modules compare with. In 32-bit floats: bfloat16 rounds two logits to one, and any change of order takes the
other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.adapter_requests import CONTEXT_TOKENS
from tests.support.adapter_servers import Running, server
from tests.support.tiny_models import write_tiny_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""On a CPU, SGLang pads heads that cannot be divided among all its ranks, though they are not divided here."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3", context=CONTEXT_TOKENS, **HEADS)


@pytest.fixture(scope="module")
def fixed_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One unit, without the plug-in."""
    with server(model, tmp_path_factory.mktemp("fixed") / "log") as running:
        yield running
