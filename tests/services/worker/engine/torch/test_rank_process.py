"""What the frontend and one rank say to each other, where that goes wrong."""

import os
import select
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch import messages
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.messages import Begin, Failed, Loading, frame, receive
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import Node, first_token, prompt
from tests.support.tiny_models import write_tiny_model


@pytest.fixture
async def node(tiny_llama: Path, zygote: Zygote) -> AsyncIterator[Node]:
    engine = TorchEngine(TorchSettings(tiny_llama, prefill_ranks=2, block_tokens=8, blocks_per_rank=40), zygote)
    await engine.start()
    yield Node(engine)
    await engine.close()


async def test_a_message_that_is_too_large_is_refused_and_nobody_is_taken_for_hung(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = await node.adopt(2)
    item = node.item(prompt(20))
    first = first_token(await node.prefill(group, item))
    await node.engine.hand_off(item.request)
    monkeypatch.setattr(messages, "FRAME_BYTES_MAX", 500)
    with pytest.raises(EngineError, match=r"prefill: a message of .* at most 500"):
        await node.prefill(group, node.item(prompt(300)))
    with pytest.raises(EngineError, match=r"decode: a message of .* at most 500"):
        await node.decode(item.request, first, 3, stop=frozenset(range(200)))
    monkeypatch.undo()
    ranks = node.engine._ranks  # type: ignore[attr-defined]
    assert not any(rank.owed for rank in ranks.prefill), "they would be given up as hung"
    assert not any(rank._streams for rank in ranks.decode), "and so would the one that decodes"
    assert len(await node.serve(group, prompt(300), 3)) == 3


def test_a_rank_prints_no_trace_back_for_what_has_a_name_nor_when_nobody_is_there_to_hear(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_model(tmp_path, "llama", intermediate_size=200)
    (other / "config.json").write_text((tiny_llama / "config.json").read_text())
    zygote = Zygote()
    for model in (other, tiny_llama):
        ours, theirs = socket.socketpair()
        _, pidfd = zygote.spawn(theirs, [])
        theirs.close()
        ours.sendall(
            frame(Begin(1, 0, 1, str(model), block_tokens=8, blocks_per_rank=8, context_tokens=64, sequences=1))
        )
        if model == other:
            said = [receive(ours)]
            while isinstance(said[-1], Loading):
                said.append(receive(ours))
            assert isinstance(said[-1], Failed)
            assert said[-1].reason.startswith("weights: model.layers.0.mlp.gate_proj.weight is torch.float32 (200, 96)")
        ours.close()
        select.select([pidfd], [], [])
        os.close(pidfd)
    zygote.close()
    assert capfd.readouterr().err == ""
