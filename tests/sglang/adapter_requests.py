"""What the adapter's tests share: the model of their servers, and requests as an agent sends them to a worker of one rank."""

from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import ItemResult, PrefillItem, PrefillStep, Sampling, StepResult
from services.worker.engine.sglang.engine import SglangEngine
from shared.contracts.ids import RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import Group
from tests.support.adapter_servers import CAPACITY_TOKENS, PAGE_TOKENS, python
from tests.support.tiny_models import write_tiny_model

CONTEXT_TOKENS = 4_096
ON_REAL_SERVERS = [
    pytest.mark.sglang,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(python() is None, reason="`make sglang-cpu` has not been run"),
]
BLOCKS = CAPACITY_TOKENS // PAGE_TOKENS
WORKER = Group(0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in float32: bfloat16 would make near ties of its random logits."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3", context=CONTEXT_TOKENS)


def prompt(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 200, length).astype(np.uint32)


def item(name: str, tokens: Tokens, new_tokens: int = 0, key: bytes = b"k" * 32) -> PrefillItem:
    then = Continuation(new_tokens, frozenset(), 0) if new_tokens else None
    return PrefillItem(RequestId(name), tokens, tuple(block_chain(tokens, PAGE_TOKENS, key)), then=then)


async def prefill(engine: SglangEngine, *items: PrefillItem) -> StepResult:
    return await engine.prefill(PrefillStep(1, WORKER, items))


async def one(engine: SglangEngine, each: PrefillItem) -> ItemResult:
    return (await prefill(engine, each)).items[0]


async def generate(engine: SglangEngine, each: PrefillItem) -> list[int]:
    """The whole life of a request."""
    assert each.then is not None
    result = await one(engine, each)
    assert result.first_token is not None
    await engine.hand_off(each.request)
    engine.release(each.request)
    rest = engine.decode(
        each.request, result.first_token.token, each.then.new_tokens_max - 1, each.then.stop_tokens, Sampling()
    )
    return [result.first_token.token, *[token.token async for token in rest]]
