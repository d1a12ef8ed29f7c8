"""How a rank's KV pool lies in memory: the slots' generations in a shared file, and the slots behind them or, with GPUs, in
the memory of the rank's GPU. Torch-free."""

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
