"""What moves between the ranks for a cached prefix: its keys and values to the queries, or the queries to them. Torch-free.

The suffix's own keys and values are gathered either way and do not count. Of the prefix a rank holds 1/C, cyclic placement
being even, so of everything that it takes (C - 1)/C comes from others. Both costs are a rank's, per layer, in bytes read from
other ranks' pools: the frontend compares them and tells all ranks, and they cannot disagree.
"""

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.model_config import DTYPE_BYTES
from services.worker.engine.torch.zigzag import runs_alone

LSE_BYTES = 4


def key_bytes(layout: KvLayout, degree: int, prefix_tokens: int) -> float:
    """Read of the others' pools: (C - 1)/C · P tokens of 2·G·D elements."""
    token_bytes = 2 * layout.kv_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]
    return (degree - 1) / degree * prefix_tokens * token_bytes


def query_bytes(layout: KvLayout, q_heads: int, degree: int, suffix_tokens: int) -> float:
    """Received in collectives: (C - 1)/C · T queries of H·D elements, and a partial output with H log-sum-exps for as many,
    where T is the suffix padded to a multiple of 2C."""
    padded_tokens = -(-suffix_tokens // (2 * degree)) * 2 * degree
    token_bytes = q_heads * (2 * layout.head_dim * DTYPE_BYTES[layout.dtype] + LSE_BYTES)
    return (degree - 1) / degree * padded_tokens * token_bytes


def moves_queries(
    layout: KvLayout, q_heads: int, degree: int, prefix_tokens: int, suffix_tokens: int, collective_byte_cost: float
) -> bool:
    """Whether moving the queries costs less. `collective_byte_cost` is what a byte in a collective costs in bytes read."""
    if runs_alone(suffix_tokens, degree) or not prefix_tokens:
        return False
    asked = collective_byte_cost * query_bytes(layout, q_heads, degree, suffix_tokens)
    return asked < key_bytes(layout, degree, prefix_tokens)
