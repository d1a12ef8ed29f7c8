"""Requests as the adapter's tests send them, one worker of one rank."""

import numpy as np

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import ItemResult, PrefillItem, PrefillStep, Sampling, StepResult
from services.worker.engine.sglang.engine import SglangEngine
from shared.contracts.ids import RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import Group
from tests.support.sglang_servers import CAPACITY_TOKENS, PAGE_TOKENS

BLOCKS = CAPACITY_TOKENS // PAGE_TOKENS
WORKER = Group(0, 1)


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
