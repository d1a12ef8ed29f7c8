"""The default model end to end: greedy text through every degree equals that of `transformers`."""

from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import Node

NEW_TOKENS = 8
PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nName three colours of the rainbow and one animal that lives in the sea.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker. Every morning he wound the "
    "clock of the church tower, and every evening he listened whether it struck the hour as it should. One day",
)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[np.ndarray]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return [np.array(tokenizer.encode(text).ids, dtype=np.uint32) for text in PROMPTS]


IsGreedy = Callable[[tuple[int, ...], tuple[int, ...]], bool]


@pytest.fixture(scope="module")
def is_greedy(smollm2: Path) -> IsGreedy:
    """Whether each token of a continuation is the first choice of `transformers` after all before it: one pass instead of
    one per token, and none for what has been asked before."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)

    @cache
    def check(tokens: tuple[int, ...], continuation: tuple[int, ...]) -> bool:
        with torch.inference_mode():
            choices = model(torch.tensor([tokens + continuation])).logits[0].argmax(-1).tolist()
        return tuple(choices[len(tokens) - 1 : -1]) == continuation

    return check


@pytest.fixture
async def node(smollm2: Path, zygote: Zygote) -> AsyncIterator[Node]:
    engine = TorchEngine(TorchSettings(smollm2, prefill_ranks=4, block_tokens=16, blocks_per_rank=16), zygote)
    await engine.start()
    yield Node(engine)
    await engine.close()


@pytest.mark.parametrize("degree", [1, 2, 4])
async def test_greedy_text_is_that_of_transformers(
    degree: int, node: Node, prompts: list[np.ndarray], smollm2: Path, is_greedy: IsGreedy
) -> None:
    group = (await node.adopt(*(4 // degree * (degree,))))[0]
    continuations = [await node.serve(group, tokens, NEW_TOKENS) for tokens in prompts]
    for tokens, continuation in zip(prompts, continuations, strict=True):
        assert is_greedy(tuple(tokens.tolist()), tuple(continuation))
        assert node.engine.cached_blocks(group, node.chain(tokens)) == len(tokens) // 16
        assert await node.serve(group, tokens, NEW_TOKENS) == continuation, "with its prefix cached"
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.decode(continuations[0]).startswith(" Paris")
