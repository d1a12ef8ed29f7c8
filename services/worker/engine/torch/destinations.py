"""Where a move's blocks go: into slots of a worker, or into the context of a sequence that is to be decoded.

To the mover both are the same: pieces of memory that it fills, marks as filled, and can sum up. What differs is in here. A slot
is one piece, and told by its generation to readers anywhere; a context is what attention reads, a piece per layer for keys and
for values, and nobody reads it before its hand-off has ended.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.kv_memory import Base, KvMemory, plan_of
from services.worker.engine.torch.move_messages import BlockMove, ContextRef


class Part(NamedTuple):
    """Of a block: `bytes` of it from `offset` on belong at `here`."""

    here: Base
    offset: int
    bytes: int


class Destination(Protocol):
    """Of one move, chunk by chunk: `begin`, fill all parts of it, `finish`."""

    def begin(self, chunk: Sequence[BlockMove]) -> None:
        """Something is written from here on."""

    def finish(self, chunk: Sequence[BlockMove]) -> None:
        """All of it is there, for every process."""

    def parts(self, move: BlockMove) -> Iterator[Part]:
        """All of a block."""

    def block(self, move: BlockMove) -> Tensor:
        """(L, 2, T, G, D): the same as a tensor."""


class IntoSlots:
    """See `KvMemory` for when readers find what."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def begin(self, chunk: Sequence[BlockMove]) -> None:
        self._memory.begin_write(plan_of(enumerate(map(_slot, chunk))))

    def finish(self, chunk: Sequence[BlockMove]) -> None:
        self._memory.finish_write(plan_of(enumerate(map(_slot, chunk))))

    def parts(self, move: BlockMove) -> Iterator[Part]:
        layout, ref = self._memory.layout, _slot(move)
        yield Part(self._memory.slot_bases[ref.rank].after(layout.slot_offset(ref.index)), 0, layout.block_bytes)

    def block(self, move: BlockMove) -> Tensor:
        return self._memory.block(_slot(move))


class IntoContext:
    """`contexts` are those of all decode ranks."""

    def __init__(self, memory: KvMemory, contexts: Sequence[Contexts]) -> None:
        self._memory, self._contexts = memory, contexts

    def begin(self, chunk: Sequence[BlockMove]) -> None:
        """Nobody reads it yet."""

    def finish(self, chunk: Sequence[BlockMove]) -> None:
        for move in chunk:
            self._memory.settle(self.block(move).device)

    def parts(self, move: BlockMove) -> Iterator[Part]:
        to = _context(move)
        layout, base = self._contexts[to.decode_rank].layout, self._contexts[to.decode_rank].base
        for piece in range(layout.pieces):
            here = base.after(layout.piece_offset(to.sequence, to.depth, piece))
            yield Part(here, piece * layout.piece_bytes, layout.piece_bytes)

    def block(self, move: BlockMove) -> Tensor:
        to = _context(move)
        return self._contexts[to.decode_rank].block(to.sequence, to.depth)


def _slot(move: BlockMove) -> SlotRef:
    assert isinstance(move.to, SlotRef), f"{move.to}: a move into slots goes into slots alone"
    return move.to


def _context(move: BlockMove) -> ContextRef:
    assert isinstance(move.to, ContextRef), f"{move.to}: a move into a context goes there alone"
    return move.to
