"""The contexts of a decode rank's sequences, as the rank and the mover of its node see them.

In a shared file the operating system commits a page when it is first written, so a context costs what its longest sequence has
used; a new sequence gets the context that was freed last. Nothing is given back: the mover may have registered the file for
reads from other nodes, and an adapter would go on writing to a page that was taken out of it, where nobody reads (ADR 36). A
GPU's memory is taken whole, when the rank starts.

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
        if pool is None:
            pool = torch.frombuffer(mmap.mmap(file, layout.file_bytes), dtype=torch.uint8)
        self._bytes = pool

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
