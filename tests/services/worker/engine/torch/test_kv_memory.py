"""Pools that several mappings share: what one writes the others read, unless it is not what they were promised."""

import os
from collections.abc import Iterator

import pytest
import torch

from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.kv_memory import KvMemory, StaleSlot, plan_of

LAYOUT = KvLayout("float32", layers=2, kv_heads=3, head_dim=4, block_tokens=4, blocks=5)


@pytest.fixture(params=["slots-in-the-files", "slots-apart"])
def memories(request: pytest.FixtureRequest) -> Iterator[tuple[KvMemory, KvMemory]]:
    """The same two ranks' pools, mapped twice, as two processes would. `slots-apart` is how it is with GPUs: the slots are in
    memory that is handed in, and the files have the generations alone."""
    apart = [torch.zeros(LAYOUT.slots_bytes, dtype=torch.uint8) for _ in range(2)]
    pools = apart if request.param == "slots-apart" else []
    files = [os.memfd_create("test") for _ in range(2)]
    for file in files:
        os.ftruncate(file, LAYOUT.slots_offset if pools else LAYOUT.file_bytes)
    yield KvMemory(LAYOUT, files, pools), KvMemory(LAYOUT, files, pools)
    for file in files:
        os.close(file)


def write(memory: KvMemory, blocks: list[tuple[int, SlotRef]], context_L2SGD: torch.Tensor) -> None:
    plan = plan_of(blocks)
    memory.begin_write(plan)
    for layer in range(LAYOUT.layers):
        memory.write_layer(plan, layer, context_L2SGD[layer])
    memory.finish_write(plan)


def test_a_reader_sees_what_the_writer_wrote(memories: tuple[KvMemory, KvMemory]) -> None:
    writer, reader = memories
    slots = [SlotRef(1, 4, 7), SlotRef(0, 0, 1), SlotRef(1, 2, 3)]
    context_L2SGD = torch.randn(2, 2, 14, 3, 4)  # two tokens more than whole blocks
    write(writer, list(enumerate(slots)), context_L2SGD)
    copied = torch.cat([reader.block(slot) for slot in slots], dim=2)
    assert torch.equal(copied, context_L2SGD[:, :, :12])
    reader.check(plan_of(enumerate(slots)))
    layer = torch.zeros(2, 12, 3, 4)
    reader.read_layer(plan_of(enumerate(slots)), 1, layer)
    assert torch.equal(layer, context_L2SGD[1, :, :12])


def test_a_slot_that_was_written_again_is_stale(memories: tuple[KvMemory, KvMemory]) -> None:
    writer, reader = memories
    context_L2SGD = torch.randn(2, 2, 4, 3, 4)
    write(writer, [(0, SlotRef(0, 3, 1))], context_L2SGD)
    reader.check(plan_of([(0, SlotRef(0, 3, 1))]))
    write(writer, [(0, SlotRef(0, 3, 2))], context_L2SGD)
    with pytest.raises(StaleSlot, match=r"rank 0: slots \[3\] are at \[2\]"):
        reader.check(plan_of([(0, SlotRef(0, 3, 1))]))


def test_a_slot_that_is_being_written_is_stale(memories: tuple[KvMemory, KvMemory]) -> None:
    writer, reader = memories
    before, after = plan_of([(0, SlotRef(1, 0, 5))]), plan_of([(0, SlotRef(1, 0, 6))])
    write(writer, [(0, SlotRef(1, 0, 5))], torch.randn(2, 2, 4, 3, 4))
    reader.check(before)
    writer.begin_write(after)
    for plan in (before, after):
        with pytest.raises(StaleSlot):
            reader.check(plan)
    writer.finish_write(after)
    reader.check(after)
