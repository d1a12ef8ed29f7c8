"""How KV lies in memory. Torch-free.

A prefill rank's pool: the slots' generations in a shared file, and the slots behind them or, with GPUs, in the memory of the
rank's GPU. A decode rank's contexts, one for each sequence: in a shared file of their own, or in the memory of its GPU.
"""

from dataclasses import dataclass

from services.worker.engine.torch.model_config import DTYPE_BYTES, ModelConfig

PAGE_BYTES = 4096
GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A slot is contiguous, so that copying a block is one read: (layers, 2 for K and V, block_tokens, kv_heads, head_dim)."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    blocks: int

    @classmethod
    def of(cls, config: ModelConfig, block_tokens: int, blocks: int) -> "KvLayout":
        return cls(config.dtype, config.layers, config.kv_heads, config.head_dim, block_tokens, blocks)

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self.block_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def slot_offset(self, index: int) -> int:
        """Where a slot's content begins, from the first slot on."""
        return index * self.block_bytes

    @property
    def slots_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def slots_offset(self) -> int:
        """Where the slots begin: the generations, rounded up to a page."""
        return -(-self.blocks * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.slots_offset + self.slots_bytes


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """A context is what attention reads: (layers, 2 for K and V, tokens, kv_heads, head_dim). A block of `kv` is spread over it
    in `pieces`. Whole blocks are written, so `tokens` is a multiple of the block size."""

    kv: KvLayout
    sequences: int
    tokens: int

    @classmethod
    def of(cls, kv: KvLayout, context_tokens: int, sequences: int) -> "ContextLayout":
        return cls(kv, sequences, -(-context_tokens // kv.block_tokens) * kv.block_tokens)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.kv.layers, 2, self.tokens, self.kv.kv_heads, self.kv.head_dim

    @property
    def pieces(self) -> int:
        """Of a block: it has one for the keys and one for the values of every layer."""
        return 2 * self.kv.layers

    @property
    def piece_bytes(self) -> int:
        return self.kv.block_bytes // self.pieces

    @property
    def context_bytes(self) -> int:
        """From one sequence to the next: whole pages, so that a short sequence touches none of its neighbour's."""
        size = self.kv.block_bytes * (self.tokens // self.kv.block_tokens)
        return -(-size // PAGE_BYTES) * PAGE_BYTES

    def piece_offset(self, sequence: int, depth: int, piece: int) -> int:
        """Where a piece of the block at `depth` begins, from the first context on."""
        layer_bytes = self.tokens // self.kv.block_tokens * self.piece_bytes
        return sequence * self.context_bytes + piece * layer_bytes + depth * self.piece_bytes

    @property
    def file_bytes(self) -> int:
        return self.sequences * self.context_bytes
