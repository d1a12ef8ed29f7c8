"""The KV pools of a node's ranks, each a file that every rank process maps: any rank reads any other's slots one-sidedly.

A reader names (rank, slot, generation). The writer sets a slot's generation to 0 before it writes and to the new value
after, so a reader that finds the generation it was promised once it has read everything has read the right content.

Within a node KV gets from one process to another by these mappings alone; between nodes the same slots are read over NIXL
(`wire`), by the mover, which has mapped them too.

Shapes: B slots · L layers · 2 (K, V) · T tokens of a block · S tokens of a context · G key/value heads · D head dim.
"""

import mmap
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.kv_layout import GENERATION_BYTES, KvLayout
from services.worker.engine.torch.weights import DTYPES

WRITING = 0


class StaleSlot(Exception):
    """A slot holds another content than the plan says. What was read is to be discarded."""


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """The part of a plan that lies on one rank: which depths of the prompt, in which slots, of which generation."""

    rank: int
    depths: Tensor
    slots: Tensor
    generations: Tensor


Plan = tuple[RankBlocks, ...]


def plan_of(blocks: Iterable[tuple[int, SlotRef]]) -> Plan:
    """(depth, slot) pairs, sorted by rank so that each rank's part is one indexed copy."""
    by_rank: dict[int, list[tuple[int, SlotRef]]] = defaultdict(list)
    for depth, ref in blocks:
        by_rank[ref.rank].append((depth, ref))
    return tuple(
        RankBlocks(
            rank,
            torch.tensor([depth for depth, _ in part]),
            torch.tensor([ref.index for _, ref in part]),
            torch.tensor([ref.generation for _, ref in part]),
        )
        for rank, part in by_rank.items()
    )


class KvMemory:
    """All pools of the node, as one rank process sees them."""

    def __init__(self, layout: KvLayout, files: Sequence[int]) -> None:
        """`files` are descriptors of the pools in rank order; this process maps them and keeps the mappings for ever."""
        self.layout = layout
        shape = (layout.blocks, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        maps = [mmap.mmap(file, layout.file_bytes) for file in files]
        self._generations = [torch.frombuffer(m, dtype=torch.int64, count=layout.blocks) for m in maps]
        assert self._generations[0].element_size() == GENERATION_BYTES, "the header holds 8-byte generations"
        self._pools_BL2TGD = [
            torch.frombuffer(m, dtype=DTYPES[layout.dtype], offset=layout.slots_offset).view(shape) for m in maps
        ]

    def check(self, plan: Plan) -> None:
        """StaleSlot unless every slot of the plan still has the content the plan means."""
        for part in plan:
            found = self._generations[part.rank][part.slots]
            if not torch.equal(found, part.generations):
                raise StaleSlot(f"rank {part.rank}: slots {part.slots.tolist()} are at {found.tolist()}")

    @property
    def bases(self) -> tuple[int, ...]:
        """Where each rank's pool, generations first, lies in this process."""
        return tuple(generations.data_ptr() for generations in self._generations)

    def copy_block(self, source: SlotRef, to: SlotRef) -> None:
        """Between `begin_write` and `finish_write` of `to`; the reader checks `source` afterwards."""
        self._pools_BL2TGD[to.rank][to.index] = self._pools_BL2TGD[source.rank][source.index]

    def checksum(self, ref: SlotRef) -> int:
        """CRC-32 of what is in the slot."""
        return zlib.crc32(self._pools_BL2TGD[ref.rank][ref.index].view(torch.uint8).numpy().data)

    def read_layer(self, plan: Plan, layer: int, context_2SGD: Tensor) -> None:
        """Copy one layer of the plan's blocks to their places in a context, which starts at depth 0."""
        context_2BTGD = self._in_blocks(context_2SGD)
        for part in plan:
            blocks_B2TGD = self._pools_BL2TGD[part.rank][part.slots, layer]
            context_2BTGD[:, part.depths] = blocks_B2TGD.transpose(0, 1)

    def write_layer(self, plan: Plan, layer: int, context_2SGD: Tensor) -> None:
        """The reverse of `read_layer`, between `begin_write` and `finish_write`."""
        context_2BTGD = self._in_blocks(context_2SGD)
        for part in plan:
            self._pools_BL2TGD[part.rank][part.slots, layer] = context_2BTGD[:, part.depths].transpose(0, 1)

    def begin_write(self, plan: Plan) -> None:
        """From here on readers of these slots are told that they are stale."""
        for part in plan:
            self._generations[part.rank][part.slots] = WRITING

    def finish_write(self, plan: Plan) -> None:
        """Every layer is written."""
        for part in plan:
            self._generations[part.rank][part.slots] = part.generations

    def copy_out(self, slots: Sequence[SlotRef], context_L2SGD: Tensor) -> int:
        """Copy whole blocks, one after the other, to the start of a context of all layers. Returns bytes read.

        Errors: StaleSlot, noticed after the copy.
        """
        block_tokens = self.layout.block_tokens
        for depth, ref in enumerate(slots):
            start = depth * block_tokens
            context_L2SGD[:, :, start : start + block_tokens] = self._pools_BL2TGD[ref.rank][ref.index]
        self.check(plan_of(enumerate(slots)))
        return len(slots) * self.layout.block_bytes

    def _in_blocks(self, context_2SGD: Tensor) -> Tensor:
        layout, blocks = self.layout, context_2SGD.shape[1] // self.layout.block_tokens
        whole_2SGD = context_2SGD[:, : blocks * layout.block_tokens]
        return whole_2SGD.view(2, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim)
