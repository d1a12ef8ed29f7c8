"""Hand-offs between real nodes, and what becomes of both sides when one fails in the middle."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine.copy_plan import HandOffPlan
from services.worker.engine.protocol import Cancelled, EngineError, HandedOff, PrefillItem
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from tests.services.worker.engine.contract import Node, first_token, prompt
from tests.services.worker.engine.copy_contract import offered
from tests.services.worker.engine.torch.test_copies import SLOW_BYTES_PER_S, Nodes, is_free, mover_pid

PROMPT_TOKENS = 100
GUEST = RequestId("guest")
SEQUENCES = 2


@pytest.fixture
async def nodes(tiny_llama: Path, zygote: Zygote) -> AsyncIterator[Nodes]:
    nodes = Nodes(tiny_llama, zygote)
    yield nodes
    for node in nodes.made:
        await node.engine.close()


async def pair(nodes: Nodes, **decoding: object) -> tuple[Node, Node, PrefillItem, int, HandOffPlan]:
    """A node that only prefills, one that decodes, a prompt that the first has done at degree 2 and its first token, and the
    plan to go on from it."""
    source, group = await nodes.new(2)
    node, _ = await nodes.new(1, decode_ranks=1, sequences_per_decode_rank=SEQUENCES, **decoding)
    item = source.item(prompt(PROMPT_TOKENS))
    first = first_token(await source.prefill(group, item))
    return source, node, item, first, await offered(source, item)


def free_sequences(node: Node) -> int:
    return sum(map(len, node.engine._decode_side._free))  # type: ignore[attr-defined]


async def is_as_before(node: Node) -> None:
    """Every sequence is free again, as soon as nobody writes to it."""
    while free_sequences(node) < SEQUENCES:  # noqa: ASYNC110 - the rank is to answer
        await asyncio.sleep(0.005)
    assert node.engine.health().ok


async def on_its_way(node: Node, hand_off: Coroutine[Any, Any, HandedOff]) -> "asyncio.Task[HandedOff]":
    """A hand-off of which the first block is there and the last is not."""
    handing = asyncio.create_task(hand_off)
    context = os.open(f"/proc/self/fd/{node.engine._ranks.files[-1]}", os.O_RDONLY)  # type: ignore[attr-defined]
    while not handing.done() and not any(os.pread(context, 4096, 0)):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.001)
    os.close(context)
    assert not handing.done(), handing
    return handing


async def test_the_tokens_are_those_of_transformers(nodes: Nodes, tiny_llama: Path) -> None:
    source, node, item, first, plan = await pair(nodes)
    await node.engine.hand_off(GUEST, plan)
    source.engine.release(item.request)
    assert is_free(source)
    said = [first, *await node.decode(GUEST, first, 20)]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    tokens = torch.tensor([*item.tokens.tolist(), *said[:-1]])[None]
    with torch.inference_mode():
        logits_TV = model(tokens).logits[0, PROMPT_TOKENS - 1 :]
    best_T2 = logits_TV.topk(2).values
    decided_T = best_T2[:, 0] - best_T2[:, 1] > 1e-3
    assert torch.equal(logits_TV.argmax(-1)[decided_T], torch.tensor(said)[decided_T])
    assert int(decided_T.sum()) > 15


async def test_a_node_becomes_reachable_before_anybody_reads(nodes: Nodes) -> None:
    """Its first read would take half a second longer than all others, and be believed."""
    node, _ = await nodes.new(1, decode_ranks=1, sequences_per_decode_rank=SEQUENCES)
    maps = Path(f"/proc/{mover_pid(node)}/maps")
    async with asyncio.timeout(30):
        while "nixl" not in maps.read_text():  # noqa: ASYNC110, ASYNC240 - the mover says nothing of it
            await asyncio.sleep(0.01)


async def test_a_source_that_dies_in_the_middle_leaves_nothing_and_can_be_asked_again(nodes: Nodes) -> None:
    source, node, item, first, plan = await pair(nodes, copy_bytes_per_s=SLOW_BYTES_PER_S)
    handing = await on_its_way(node, node.engine.hand_off(GUEST, plan))
    os.kill(mover_pid(source), signal.SIGKILL)
    with pytest.raises(EngineError, match="source-lost"):
        await handing
    await is_as_before(node)
    assert not is_free(source), "its pins stay until they are released"
    await node.engine.hand_off(GUEST, await offered(source, item))
    await source.engine.close()
    assert len(await node.decode(GUEST, first, 5)) == 5


async def test_a_reader_whose_mover_dies_frees_the_sequence_and_starts_another(nodes: Nodes) -> None:
    _, node, _, first, plan = await pair(nodes, copy_bytes_per_s=SLOW_BYTES_PER_S)
    handing = await on_its_way(node, node.engine.hand_off(GUEST, plan))
    os.kill(mover_pid(node), signal.SIGKILL)
    with pytest.raises(EngineError, match="the mover ended"):
        await handing
    await is_as_before(node)
    await node.engine.hand_off(GUEST, plan)
    assert len(await node.decode(GUEST, first, 5)) == 5


async def test_a_hand_off_within_the_node_is_tried_again_when_its_mover_dies(nodes: Nodes) -> None:
    node, group = await nodes.new(
        1, decode_ranks=1, sequences_per_decode_rank=SEQUENCES, copy_bytes_per_s=SLOW_BYTES_PER_S
    )
    item = node.item(prompt(PROMPT_TOKENS))
    first = first_token(await node.prefill(group, item))
    alone = await node.serve(group, prompt(PROMPT_TOKENS), 6)
    handing = await on_its_way(node, node.engine.hand_off(item.request))
    os.kill(mover_pid(node), signal.SIGKILL)
    await handing
    node.engine.release(item.request)
    assert [first, *await node.decode(item.request, first, 5)] == alone


@pytest.mark.parametrize("why", ["stale", "late", "wrong"])
async def test_what_is_not_what_was_offered_is_not_decoded(nodes: Nodes, why: str) -> None:
    """The source has other content there by now, the limit is over, or a checksum differs."""
    source, node, item, _, plan = await pair(nodes, copy_bytes_per_s=SLOW_BYTES_PER_S if why == "late" else 4e9)
    match why:
        case "stale":
            sources = (
                *plan.sources[:-1],
                replace(plan.sources[-1], slot=replace(plan.sources[-1].slot, generation=99)),
            )
            plan, expected = replace(plan, sources=sources), "stale-source"
        case "late":
            plan, expected = replace(plan, limit_s=0.2), "time-limit"
        case _:
            plan, expected = (
                replace(plan, sources=(replace(plan.sources[0], checksum=1), *plan.sources[1:])),
                "bad-checksum",
            )
    with pytest.raises(EngineError, match=expected):
        await node.engine.hand_off(GUEST, plan)
    await is_as_before(node)
    source.engine.release(item.request)
    assert is_free(source)


async def test_a_hand_off_that_is_called_off_frees_its_sequence_when_nothing_is_written(nodes: Nodes) -> None:
    _, node, _, _, plan = await pair(nodes, copy_bytes_per_s=SLOW_BYTES_PER_S)
    handing = await on_its_way(node, node.engine.hand_off(GUEST, plan))
    os.kill(mover_pid(node), signal.SIGSTOP)
    node.engine.cancel(GUEST)
    with pytest.raises(Cancelled):
        await handing
    assert free_sequences(node) == SEQUENCES - 1, "something may still be written to it"
    os.kill(mover_pid(node), signal.SIGCONT)
    await is_as_before(node)


async def test_hand_offs_beyond_the_sequences_wait_for_one_to_end(nodes: Nodes) -> None:
    _, node, _, first, plan = await pair(nodes)
    names = [RequestId(f"guest {number}") for number in range(SEQUENCES + 1)]
    for name in names[:-1]:
        await node.engine.hand_off(name, plan)
    waiting = asyncio.create_task(node.engine.hand_off(names[-1], plan))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert len(await node.decode(names[0], first, 3)) == 3
    await waiting
    assert len(await node.decode(names[-1], first, 3)) == 3


async def test_a_plan_that_does_not_fit_is_refused_by_name(nodes: Nodes) -> None:
    _, node, _, _, plan = await pair(nodes)
    with pytest.raises(EngineError, match=r"prompt_tokens: 1000000 is outside"):
        await node.engine.hand_off(GUEST, replace(plan, prompt_tokens=1_000_000))
    with pytest.raises(EngineError, match=r"sources: 12 for a prompt of 13 blocks"):
        await node.engine.hand_off(GUEST, replace(plan, sources=plan.sources[:-1]))
    with pytest.raises(ValueError, match="limit_s"):
        replace(plan, limit_s=0)
    assert free_sequences(node) == SEQUENCES
