"""The bytes of both variants by hand, where the choice turns, and what ranks really send."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.protocol import PrefillItem, PrefillStep
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.movement import key_bytes, moves_queries, query_bytes, suffix_bytes
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.blocks import block_chain
from shared.model.lattice import Group

LAYOUT = KvLayout("bfloat16", layers=2, kv_heads=2, head_dim=8, block_tokens=16, blocks=4)


def test_keys_are_the_prefix_that_lies_elsewhere() -> None:
    assert key_bytes(LAYOUT, 4, 64) == 48 * 2 * 2 * 8 * 2


def test_queries_are_there_and_back_with_padding() -> None:
    assert query_bytes(LAYOUT, 6, 4, 9) == 12 * 6 * (2 * 8 * 2 + 4)


def test_the_suffix_is_gathered_with_padding() -> None:
    assert suffix_bytes(LAYOUT, 4, 9) == 12 * 2 * 2 * 8 * 2
    assert suffix_bytes(LAYOUT, 4, 7) == suffix_bytes(LAYOUT, 1, 100) == 0


@pytest.mark.parametrize(
    ("prefix_tokens", "cost", "moved"), [(32, 1, False), (64, 1, True), (64, 4, False), (0, 0, False)]
)
def test_the_cheaper_one_moves(prefix_tokens: int, cost: float, moved: bool) -> None:
    """16 queries of 6 heads are 3,456 bytes and a token of the prefix is 64: they turn at 54 tokens."""
    assert moves_queries(LAYOUT, 6, 2, prefix_tokens, 16, cost) is moved


@pytest.mark.parametrize(("degree", "suffix_tokens"), [(1, 100), (2, 3), (8, 15)])
def test_nothing_moves_for_a_suffix_on_one_rank(degree: int, suffix_tokens: int) -> None:
    assert not moves_queries(LAYOUT, 6, degree, 4096, suffix_tokens, 0)


BLOCK, PREFIX, SUFFIX, RANKS = 16, 64, 100, 4
FRAMING_BYTES_MAX = 4_096
"""Of gloo's, per layer and rank: a few dozen for each message."""


@asynccontextmanager
async def started(model_dir: Path, zygote: Zygote, collective_byte_cost: float) -> AsyncIterator[TorchEngine]:
    cost = collective_byte_cost
    engine = TorchEngine(
        TorchSettings(model_dir, RANKS, 0, BLOCK, 64, switch_timeout_s=30, hung_s=60, collective_byte_cost=cost), zygote
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def sent_bytes(engine: TorchEngine) -> np.ndarray:
    """By rank: gloo writes to sockets, and nothing else of a rank does in a step."""
    found = [Path(f"/proc/{rank.pid}/io").read_text().splitlines() for rank in engine._ranks.prefill]
    return np.array([int(line.split()[1]) for lines in found for line in lines if line.startswith("wchar:")])


async def sent_per_layer(engine: TorchEngine, degree: int, name: str, prefix: int, suffix: int) -> np.ndarray:
    """By rank of the first worker, in one step."""
    tokens = np.random.default_rng(prefix).integers(0, 256, prefix + suffix).astype(np.uint32)
    item = PrefillItem(RequestId(name), tokens, tuple(block_chain(tokens[:prefix], BLOCK, b"k" * 32)))
    before = sent_bytes(engine)
    await engine.prefill(PrefillStep(degree, Group(0, degree), (item,)))
    engine.release(item.request)
    sent: np.ndarray = sent_bytes(engine) - before
    return sent[:degree] / engine._parts.layout.layers


@pytest.mark.parametrize("moved", ["keys", "queries"])
async def test_ranks_send_what_the_formula_says(tiny_llama: Path, zygote: Zygote, moved: str) -> None:
    """A cold prompt, which fills the cache, and one behind it, with keys or with queries moving."""
    async with started(tiny_llama, zygote, 0.0 if moved == "queries" else 1e6) as engine:
        layout, q_heads = engine._parts.layout, engine._parts.q_heads
        for degree in (2, 4):
            await engine.adopt(degree, (degree,) * (RANKS // degree))
            cold = await sent_per_layer(engine, degree, f"cold {degree}", 0, SUFFIX)
            prefix = degree * PREFIX
            await sent_per_layer(engine, degree, f"prefix {degree}", prefix, 1)
            warm = await sent_per_layer(engine, degree, f"warm {degree}", prefix, SUFFIX)
            expected = suffix_bytes(layout, degree, SUFFIX)
            queries = query_bytes(layout, q_heads, degree, SUFFIX) if moved == "queries" else 0.0
            for sent, formula in ((cold, expected), (warm, expected + queries)):
                assert ((sent >= formula) & (sent < formula + FRAMING_BYTES_MAX)).all(), (sent, formula)
