"""Continuous batching: every sequence advances in each step, and companions change nothing but the last bits."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine.protocol import Sampling, Token
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.decode import DecodeRank
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.kv_memory import KvMemory, plan_of
from services.worker.engine.torch.messages import Decode, HandOff
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.weights import Weights
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import Node, prompt
from tests.support.tiny_models import VOCAB

DIFFERENCE_MAX = 1e-3
ALL = Sampling(logprobs=VOCAB - 1)
PROMPT_TOKENS = (1, 7, 40, 100, 250, 33)
NEW_TOKENS = (30, 12, 25, 4, 18, 9)


async def staggered(node: Node) -> list[list[Token]]:
    """Each sequence joins when the one before it has made three tokens, and leaves when its number is reached."""
    (group,) = await node.adopt(4)
    items = [node.item(prompt(length, seed), ALL) for seed, length in enumerate(PROMPT_TOKENS)]
    made = [[(await node.prefill(group, item)).first_token] for item in items]
    for item in items:
        await node.engine.hand_off(item.request)
    turns = [asyncio.Event() for _ in (*items, None)]
    turns[0].set()

    async def decode(index: int) -> None:
        await turns[index].wait()
        request, first = items[index].request, made[index][0].token
        async for token in node.engine.decode(request, first, NEW_TOKENS[index], frozenset(), ALL):
            made[index].append(token)
            if len(made[index]) == 4:
                turns[index + 1].set()

    await asyncio.gather(*map(decode, range(len(items))))
    return made


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
async def test_sequences_that_join_and_leave_are_those_of_transformers(
    family: str, request: pytest.FixtureRequest, zygote: Zygote
) -> None:
    model_dir = request.getfixturevalue(f"tiny_{family}")
    settings = TorchSettings(model_dir, prefill_ranks=4, block_tokens=8, blocks_per_rank=64)
    node = Node(TorchEngine(settings, zygote))
    await node.engine.start()
    try:
        made = await staggered(node)
    finally:
        await node.engine.close()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for seed, (length, tokens) in enumerate(zip(PROMPT_TOKENS, made, strict=True)):
        assert len(tokens) == NEW_TOKENS[seed] + 1
        said = np.concatenate([prompt(length, seed), [token.token for token in tokens]]).astype(np.int64)
        with torch.inference_mode():
            reference_TV = model(torch.from_numpy(said[:-1])[None]).logits[0, length - 1 :].double().log_softmax(-1)
        for token, reference_V in zip(tokens, reference_TV, strict=True):
            found_V = torch.tensor([logprob for _, logprob in sorted(token.logprobs)], dtype=torch.float64)
            assert (found_V - reference_V).abs().max() <= DIFFERENCE_MAX
            first, second = reference_V.topk(2).values
            if first - second > DIFFERENCE_MAX:
                assert token.token == reference_V.argmax()


def rank_with(model_dir: Path, requests: list[str]) -> DecodeRank:
    """A decode rank in this process, with a handed-off block of eight tokens for each request."""
    config = read_config(model_dir)
    layout = KvLayout.of(config, 8, len(requests))
    file = os.memfd_create("test")
    os.ftruncate(file, layout.file_bytes)
    memory = KvMemory(layout, [file])
    os.close(file)
    slots = [SlotRef(0, index, 1) for index in range(len(requests))]
    generator = torch.Generator().manual_seed(1)
    plan = plan_of(enumerate(slots))
    for layer in range(layout.layers):
        shape = (2, 8 * len(requests), layout.kv_heads, layout.head_dim)
        memory.write_layer(plan, layer, torch.randn(shape, generator=generator))
    memory.finish_write(plan)
    rank = DecodeRank(Model(config, Weights(model_dir, config.dtype, lambda *_: None), 64), memory, 64)
    for number, (request, slot) in enumerate(zip(requests, slots, strict=True)):
        rank.hand_off(HandOff(number, request, 8, (slot,)))
    return rank


@torch.inference_mode()
def test_a_step_makes_one_token_of_every_sequence_that_decodes(tiny_qwen3: Path) -> None:
    hot = Sampling(temperature=1.0, seed=3)
    requests = ["a", "b", "c"]
    alone: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        rank = rank_with(tiny_qwen3, requests)
        rank.decode(Decode(number, request, 65, 6, (), hot))
        alone[request] = [made.token.token for _ in range(6) for made in rank.step()]
        assert rank.idle
    rank = rank_with(tiny_qwen3, requests)
    together: dict[int, list[int]] = {0: [], 1: [], 2: []}
    steps = []
    for number, request in enumerate(requests):
        rank.decode(Decode(number, request, 65, 6, (), hot))
        steps.append(rank.step())
    while not rank.idle:
        steps.append(rank.step())
        rank.end("a")  # leaves after four of its six tokens
    for made in (made for step in steps for made in step):
        together[made.n].append(made.token.token)
    assert [[made.n for made in step] for step in steps[:5]] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [1, 2]]
    assert together == {0: alone["a"][:4], 1: alone["b"], 2: alone["c"]}
