"""Continuous batching: every sequence advances in each step, and companions change nothing but the last bits."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from services.worker.engine.past import past_of
from services.worker.engine.protocol import Sampling, Token
from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.decode import DecodeRank
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout
from services.worker.engine.torch.messages import Decode
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.weights import Weights
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import Node, first_token, prompt
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


async def test_penalties_are_those_of_transformers_also_for_a_request_that_goes_on_elsewhere(
    tiny_llama: Path, zygote: Zygote
) -> None:
    """The first token is a prefill rank's choice, the others a decode rank's, and those behind the fifth come once more with
    the five at the end of the prompt."""
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, logit_bias=((7, -5.0),))
    node = Node(TorchEngine(TorchSettings(tiny_llama, prefill_ranks=2, block_tokens=8, blocks_per_rank=64), zygote))
    await node.engine.start()

    async def served(tokens: np.ndarray, generated: int, new_tokens: int) -> list[int]:
        item = replace(node.item(tokens, sampling), generated_tokens=generated)
        first = first_token(await node.prefill(group, item))
        await node.engine.hand_off(item.request)
        past = past_of(tokens, generated, sampling)
        rest = node.engine.decode(item.request, first, new_tokens - 1, frozenset(), sampling, past)
        return [first, *[token.token async for token in rest]]

    try:
        (group,) = await node.adopt(2)
        said = await served(prompt(40), 0, 12)
        so_far = np.concatenate([prompt(40), np.array(said[:5], dtype=np.uint32)])
        assert await served(so_far, 5, 7) == said[5:]
    finally:
        await node.engine.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    repeated = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    tokens = torch.tensor([[*prompt(40).tolist(), *said]])
    with torch.inference_mode():
        logits_TV = model(tokens).logits[0].double()
    for index, token in enumerate(said):
        left_V = repeated(tokens[:, : 40 + index], logits_TV[39 + index][None].clone())[0]
        times_V = torch.bincount(torch.tensor(said[:index], dtype=torch.int64), minlength=len(left_V))
        left_V -= sampling.frequency_penalty * times_V + sampling.presence_penalty * (times_V > 0)
        left_V[7] -= 5.0
        assert left_V.max() - left_V[token] <= DIFFERENCE_MAX


def rank_with(model_dir: Path, sequences: int) -> DecodeRank:
    """A decode rank in this process, with the KV of a prompt of eight tokens in the context of each sequence."""
    config = read_config(model_dir)
    layout = ContextLayout.of(KvLayout.of(config, 8, 1), 64, sequences)
    file = os.memfd_create("test")
    os.ftruncate(file, layout.file_bytes)
    contexts = Contexts(layout, file)
    os.close(file)
    generator = torch.Generator().manual_seed(1)
    for sequence in range(sequences):
        block = contexts.block(sequence, 0)
        block.copy_(torch.randn(block.shape, generator=generator))
    return DecodeRank(Model(config, Weights(model_dir, config.dtype, lambda *_: None), 64), contexts)


def start(number: int, new_tokens: int = 6) -> Decode:
    """Sequence and command have the same number."""
    return Decode(number, number, 8, 65, new_tokens, (), Sampling(temperature=1.0, seed=3))


@torch.inference_mode()
def test_a_step_makes_one_token_of_every_sequence_that_decodes(tiny_qwen3: Path) -> None:
    alone: dict[int, list[int]] = {}
    for number in range(3):
        rank = rank_with(tiny_qwen3, 3)
        rank.decode(start(number))
        alone[number] = [made.token.token for _ in range(6) for made in rank.step()]
        assert rank.idle
    rank = rank_with(tiny_qwen3, 3)
    together: dict[int, list[int]] = {0: [], 1: [], 2: []}
    steps = []
    for number in range(3):
        rank.decode(start(number))
        steps.append(rank.step())
    while not rank.idle:
        steps.append(rank.step())
        rank.end(0)  # leaves after four of its six tokens
    for made in (made for step in steps for made in step):
        together[made.n].append(made.token.token)
    assert [[made.n for made in step] for step in steps[:5]] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [1, 2]]
    assert together == {0: alone[0][:4], 1: alone[1], 2: alone[2]}
