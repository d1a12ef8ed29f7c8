"""The contexts of a decode rank's sequences, as the rank and the mover of its node see them.

In a shared file the operating system commits a page when it is first written, so a short sequence costs what it uses, and gives
it back at its end. A GPU's memory is taken whole, when the rank starts.

Shapes: L layers · 2 (K, V) · S tokens of a context · T tokens of a block · G key/value heads · D head dim.
"""

import mmap

import torch
from torch import Tensor

from services.worker.engine.torch.kv_layout import ContextLayout
from services.worker.engine.torch.kv_memory import Base
from services.worker.engine.torch.weights import DTYPES


class Contexts:
    """Of one decode rank. Nobody reads a context while it is filled: its sequence decodes from the end of its hand-off on."""

    def __init__(self, layout: ContextLayout, file: int, pool: Tensor | None = None) -> None:
        """`file` is the descriptor of the shared file, which this process maps for ever; `pool` are the bytes where they are in
        GPU memory instead."""
        self.layout = layout
        self._map = None if pool is not None else mmap.mmap(file, layout.file_bytes)
        self._bytes = pool if pool is not None else torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def base(self) -> Base:
        """Where the first context lies in this process."""
        return Base(self._bytes.data_ptr(), self._bytes.device.index or 0)

    def context(self, sequence: int) -> Tensor:
        """(L, 2, S, G, D)."""
        layout, start = self.layout, sequence * self.layout.context_bytes
        size = layout.kv.block_bytes * (layout.tokens // layout.kv.block_tokens)
        return self._bytes[start : start + size].view(DTYPES[layout.kv.dtype]).view(layout.shape)

    def block(self, sequence: int, depth: int) -> Tensor:
        """(L, 2, T, G, D): the tokens of one block."""
        block_tokens = self.layout.kv.block_tokens
        return self.context(sequence)[:, :, depth * block_tokens : (depth + 1) * block_tokens]

    def clear(self, sequence: int) -> None:
        """Give the pages back. What they held reads as zeros."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE, sequence * self.layout.context_bytes, self.layout.context_bytes)
