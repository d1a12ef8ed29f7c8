"""What several modules compare with. In 32-bit floats: bfloat16 rounds two logits to one, and any change of order takes the
other."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.sglang.adapter_requests import CONTEXT_TOKENS
from tests.support.adapter_servers import Running, has_ended, server
from tests.support.tiny_models import write_tiny_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""On a CPU, SGLang pads heads that cannot be divided among all its ranks, though they are not divided here."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3", context=CONTEXT_TOKENS, **HEADS)


class Kept:
    """A server that modules share, because a start takes longer than most of their tests: another one for whoever comes after
    a test that has ended it."""

    def __init__(self, stack: ExitStack, start: Callable[[], AbstractContextManager[Running]]) -> None:
        self._stack, self._start = stack, start
        self._running: Running | None = None

    def get(self) -> Running:
        if self._running is None or has_ended(self._running):
            self._running = self._stack.enter_context(self._start())
        return self._running


@pytest.fixture(scope="session")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def fixed_server(model: Path, stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """One unit, without the plug-in."""
    return stack.enter_context(server(model, tmp_path_factory.mktemp("fixed") / "log"))


@pytest.fixture(scope="session")
def kept_two(model: Path, stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(stack, lambda: server(model, tmp_path_factory.mktemp("two") / "log", units=2))


@pytest.fixture(scope="module")
def two_units(kept_two: Kept) -> Running:
    """The smallest server that can split and merge."""
    return kept_two.get()


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where faults are made in `four_units`."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def kept_four(model: Path, faults: Path, stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    more = {"VERTUMNUS_SGLANG_FAULTS": str(faults)}
    return Kept(stack, lambda: server(model, tmp_path_factory.mktemp("four") / "log", units=4, environment=more))


@pytest.fixture(scope="module")
def four_units(kept_four: Kept) -> Running:
    """A server of every composition, mixed ones too."""
    return kept_four.get()
