"""The KV pools of a node's ranks, each mapped by every rank process: any rank reads any other's slots one-sidedly.

A reader names (rank, slot, generation). The writer sets a slot's generation to 0 before it writes and to the new value
after, so a reader that finds the generation it was promised once it has read everything has read the right content.

With GPUs the slots are in the memory of the GPU of the rank that owns them (`kv_device`), and the generations stay in shared
host memory. The order holds across both, because each side waits for its streams where the order matters. The writer stores 0
before it launches the first copy into the slot, and waits until its streams are done, and so the data are there for everybody,
before it stores the new generation. The reader waits until its own copies are done before it looks at the generation. If it
has read anything of a later content, the launch of that copy, and so the 0 before it, came first: it finds no old generation.

Within a node KV gets from one process to another by these mappings alone; between nodes the same slots are read over NIXL
(`wire`), by the mover, which has mapped them too.

Shapes: B slots · L layers · 2 (K, V) · T tokens of a block · S tokens of a context · G key/value heads · D head dim.
"""

import mmap
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.devices import upload
from services.worker.engine.torch.kv_layout import GENERATION_BYTES, KvLayout
from services.worker.engine.torch.weights import DTYPES

WRITING = 0
CPU = torch.device("cpu")


class StaleSlot(Exception):
    """A slot holds another content than the plan says. What was read is to be discarded."""


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """The part of a plan that lies on one rank: which depths of the prompt, in which slots, of which generation.

    All of it is in host memory but for `depths`, which a context is indexed by, and `places`, which are the slots once more
    and index the pool: both lie where what they index does (`KvMemory.plan`)."""

    rank: int
    depths: Tensor
    slots: Tensor
    generations: Tensor
    places: Tensor


Plan = tuple[RankBlocks, ...]


def checksum(block_L2TGD: Tensor) -> int:
    """CRC-32 of a block's bytes, wherever it lies."""
    return zlib.crc32(block_L2TGD.contiguous().cpu().view(torch.uint8).numpy().data)


class Base(NamedTuple):
    """An address, and the GPU whose memory it is in: 0 for host memory."""

    address: int
    device: int

    def after(self, offset_bytes: int) -> "Base":
        return Base(self.address + offset_bytes, self.device)


def plan_of(blocks: Iterable[tuple[int, SlotRef]]) -> Plan:
    """(depth, slot) pairs, sorted by rank so that each rank's part is one indexed copy."""
    by_rank: dict[int, list[tuple[int, SlotRef]]] = defaultdict(list)
    for depth, ref in blocks:
        by_rank[ref.rank].append((depth, ref))
    return tuple(_rank_blocks(rank, part) for rank, part in by_rank.items())


def _rank_blocks(rank: int, part: Sequence[tuple[int, SlotRef]]) -> RankBlocks:
    depths, slots, generations = torch.tensor(
        [(depth, ref.index, ref.generation) for depth, ref in part], dtype=torch.int64, device="cpu"
    ).T.contiguous()
    return RankBlocks(rank, depths, slots, generations, slots)


class KvMemory:
    """All pools of the node, as one rank process sees them."""

    def __init__(
        self, layout: KvLayout, files: Sequence[int], pools: Sequence[Tensor] = (), device: torch.device = CPU
    ) -> None:
        """`files` are descriptors of the pools in rank order; this process maps them and keeps the mappings for ever. `pools`
        are the bytes of the slots where these are not in the files. Contexts are on `device`."""
        self.layout, self.device = layout, device
        shape = (layout.blocks, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        maps = [mmap.mmap(file, 0) for file in files]
        self._generations = [torch.frombuffer(m, dtype=torch.int64, count=layout.blocks) for m in maps]
        assert self._generations[0].element_size() == GENERATION_BYTES, "the header holds 8-byte generations"
        slots = pools or [torch.frombuffer(m, dtype=torch.uint8, offset=layout.slots_offset) for m in maps]
        self._pools_BL2TGD = [each.view(DTYPES[layout.dtype]).view(shape) for each in slots]

    def plan(self, blocks: Iterable[tuple[int, SlotRef]]) -> Plan:
        """As `plan_of`, for `read_layer` and `write_layer`: what they index by is where they need it, once for all layers."""
        return tuple(
            replace(
                part,
                depths=upload(part.depths, self.device),
                places=upload(part.slots, self._pools_BL2TGD[part.rank].device),
            )
            for part in plan_of(blocks)
        )

    def check(self, plan: Plan) -> None:
        """StaleSlot unless every slot of the plan still has the content the plan means, whatever was read of it until now."""
        self._settle(plan)
        for part in plan:
            found = self._generations[part.rank][part.slots]
            if not torch.equal(found, part.generations):
                raise StaleSlot(f"rank {part.rank}: slots {part.slots.tolist()} are at {found.tolist()}")

    def _settle(self, plan: Plan) -> None:
        """Wait for every copy between the plan's pools and this process's memory that was launched until now."""
        devices = {self.device, *(self._pools_BL2TGD[part.rank].device for part in plan)}
        for device in devices:
            self.settle(device)

    @property
    def generation_bases(self) -> tuple[int, ...]:
        """Where each rank's generations lie in this process."""
        return tuple(generations.data_ptr() for generations in self._generations)

    @property
    def slot_bases(self) -> tuple[Base, ...]:
        """Where each rank's first slot lies in this process."""
        return tuple(Base(pool.data_ptr(), pool.device.index or 0) for pool in self._pools_BL2TGD)

    @property
    def on_gpus(self) -> bool:
        """Whether the slots are in GPU memory."""
        return self._pools_BL2TGD[0].device.type == "cuda"

    def block(self, ref: SlotRef) -> Tensor:
        """(L, 2, T, G, D): what is in the slot. Written to between `begin_write` and `finish_write`; who reads it checks the
        slot afterwards."""
        return self._pools_BL2TGD[ref.rank][ref.index]

    def settle(self, device: torch.device) -> None:
        """Wait for every copy to or from the memory of `device` that this process has launched until now."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def read_layer(self, plan: Plan, layer: int, context_2SGD: Tensor) -> None:
        """Copy one layer of the plan's blocks to their places in a context, which starts at depth 0."""
        context_2BTGD = self._in_blocks(context_2SGD)
        for part in plan:
            blocks_B2TGD = self._pools_BL2TGD[part.rank][part.places, layer]
            context_2BTGD[:, part.depths] = blocks_B2TGD.transpose(0, 1).to(self.device)

    def write_layer(self, plan: Plan, layer: int, context_2SGD: Tensor) -> None:
        """The reverse of `read_layer`, between `begin_write` and `finish_write`."""
        context_2BTGD = self._in_blocks(context_2SGD)
        for part in plan:
            pool_BL2TGD = self._pools_BL2TGD[part.rank]
            pool_BL2TGD[part.places, layer] = context_2BTGD[:, part.depths].transpose(0, 1).to(pool_BL2TGD.device)

    def begin_write(self, plan: Plan) -> None:
        """From here on readers of these slots are told that they are stale."""
        for part in plan:
            self._generations[part.rank][part.slots] = WRITING

    def finish_write(self, plan: Plan) -> None:
        """Every layer is written: from here on readers find it."""
        self._settle(plan)
        for part in plan:
            self._generations[part.rank][part.slots] = part.generations

    def _in_blocks(self, context_2SGD: Tensor) -> Tensor:
        layout, blocks = self.layout, context_2SGD.shape[1] // self.layout.block_tokens
        whole_2SGD = context_2SGD[:, : blocks * layout.block_tokens]
        return whole_2SGD.view(2, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim)
