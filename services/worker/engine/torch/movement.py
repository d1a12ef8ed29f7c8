"""What moves between the ranks of a worker in a prefill step, per layer and as one rank receives it. Torch-free.

The suffix's keys and values are gathered in any case. For a cached prefix either its keys and values go to the queries or the
queries to them: the frontend compares both in bytes and tells all ranks, and they cannot disagree. Of the prefix a rank holds
1/C, cyclic placement being even, and of a suffix it computes 1/C, so of everything that it takes (C - 1)/C comes from others.
"""

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.model_config import DTYPE_BYTES
from services.worker.engine.torch.zigzag import runs_alone

LSE_BYTES = 4


def suffix_bytes(layout: KvLayout, degree: int, suffix_tokens: int) -> float:
    """Received in the all-gather: (C - 1)/C · T tokens of 2·G·D elements, with T as in `query_bytes`; 0 for a suffix that
    runs alone."""
    if runs_alone(suffix_tokens, degree):
        return 0.0
    return (degree - 1) / degree * _padded(suffix_tokens, degree) * _kv_bytes(layout)


def key_bytes(layout: KvLayout, degree: int, prefix_tokens: int) -> float:
    """Read of the others' pools: (C - 1)/C · P tokens of 2·G·D elements."""
    return (degree - 1) / degree * prefix_tokens * _kv_bytes(layout)


def query_bytes(layout: KvLayout, q_heads: int, degree: int, suffix_tokens: int) -> float:
    """Received in collectives: (C - 1)/C · T queries of H·D elements, and a partial output with H log-sum-exps for as many,
    where T is the suffix padded to a multiple of 2C."""
    token_bytes = q_heads * (2 * layout.head_dim * DTYPE_BYTES[layout.dtype] + LSE_BYTES)
    return (degree - 1) / degree * _padded(suffix_tokens, degree) * token_bytes


def moves_queries(
    layout: KvLayout, q_heads: int, degree: int, prefix_tokens: int, suffix_tokens: int, collective_byte_cost: float
) -> bool:
    """Whether moving the queries costs less. `collective_byte_cost` is what a byte in a collective costs in bytes read."""
    if runs_alone(suffix_tokens, degree) or not prefix_tokens:
        return False
    asked = collective_byte_cost * query_bytes(layout, q_heads, degree, suffix_tokens)
    return asked < key_bytes(layout, degree, prefix_tokens)


def _kv_bytes(layout: KvLayout) -> int:
    """Of one token in one layer."""
    return 2 * layout.kv_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]


def _padded(suffix_tokens: int, degree: int) -> int:
    """2C chunks of equal length, as collectives want them."""
    return -(-suffix_tokens // (2 * degree)) * 2 * degree
