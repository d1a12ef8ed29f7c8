"""The memory of sequences that are decoded: what it looks like to attention, to the mover, and to the operating system."""

import os
from collections.abc import Iterator

import pytest
import torch

from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout

KV = KvLayout("float32", layers=2, kv_heads=3, head_dim=4, block_tokens=8, blocks=1)
LAYOUT = ContextLayout.of(KV, context_tokens=1_001, sequences=3)


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("test")
    os.ftruncate(file, LAYOUT.file_bytes)
    yield file
    os.close(file)


def used_bytes(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def test_a_block_is_the_sum_of_its_pieces_wherever_it_lies(file: int) -> None:
    ours, theirs = Contexts(LAYOUT, file), Contexts(LAYOUT, file)
    assert ours.context(2).shape == (2, 2, 1_008, 3, 4)
    block = torch.randn(2, 2, 8, 3, 4)
    raw = block.view(torch.uint8).flatten().numpy().tobytes()
    for piece in range(LAYOUT.pieces):
        start, size = LAYOUT.piece_offset(2, 125, piece), LAYOUT.piece_bytes
        os.pwrite(file, raw[piece * size : (piece + 1) * size], start)
    assert torch.equal(ours.block(2, 125), block)
    assert torch.equal(theirs.context(2)[:, :, 1_000:], block)
    assert not ours.context(1).any()


def test_a_context_costs_what_its_longest_sequence_has_used(file: int) -> None:
    contexts = Contexts(LAYOUT, file)
    assert used_bytes(file) == 0
    contexts.context(0)[:, :, :8] = 1.0
    short, whole = LAYOUT.pieces * LAYOUT.piece_bytes, LAYOUT.context_bytes
    assert short <= used_bytes(file) < whole // 2
    contexts.context(1).fill_(2.0)
    longest = used_bytes(file)
    contexts.context(1)[:, :, :8] = 3.0
    assert used_bytes(file) == longest < 2 * whole
