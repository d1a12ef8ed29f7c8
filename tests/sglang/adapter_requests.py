"""What the adapter's tests share: its settings, and requests as an agent sends them to a worker of one rank."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import ItemResult, PrefillItem, PrefillStep, Sampling, StepResult
from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.settings import DecodeAddress, ServerAddress, SglangSettings
from shared.contracts.ids import RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import Group
from tests.support.adapter_servers import CAPACITY_TOKENS, PAGE_TOKENS, Running, python

CONTEXT_TOKENS = 4_096
ON_REAL_SERVERS = [
    pytest.mark.sglang,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(python() is None, reason="`make sglang-cpu` has not been run"),
]
BLOCKS = CAPACITY_TOKENS // PAGE_TOKENS
WORKER = Group(0, 1)


def settings_for(
    model: Path, running: Running, units: int = 1, decode: Sequence[Running] = (), blocks: int = BLOCKS
) -> SglangSettings:
    """Of one server, and decode servers if there are any. Everybody is patient on a busy machine."""
    return SglangSettings(
        model_dir=model,
        servers=(
            ServerAddress(url=running.url, degree=units, bootstrap_port=running.bootstrap_port if decode else None),
        ),
        decode=tuple(DecodeAddress(url=each.url) for each in decode),
        adaptive=units > 1,
        block_tokens=PAGE_TOKENS,
        blocks_per_rank=blocks,
        context_tokens_max=CONTEXT_TOKENS,
        silence_s=600.0,
        start_limit_s=60.0,
        drain_s=60.0,
        vote_s=30.0,
    )


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
