"""What the torch engine's processes need in memory, as a formula. Torch-free; `bench/switching.py` holds it against the kernel.

    node = weights + Σ pools + ranks · (process + rope tables) + Σ steps + Σ decoded sequences

Weights and pools are mapped by every rank and exist once. A switch is in no term: it changes which ranks take a step together.
With GPUs this is the host's part, less the pools' slots: each rank has its pool and a copy of the weights on its GPU.
"""

from typing import NamedTuple

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.model_config import DTYPE_BYTES, ModelConfig

ROWS = 512
"""Tokens that go through all of a layer but attention at a time (`model`), on a CPU and where a token has no experts. The
fastest of 128 to 1,024 for a gated MLP of 576 by 1,536: in 0.93 to 0.82 of the time of all at once, 1,024 to 8,191 tokens."""


class StepBytes(NamedTuple):
    """What one prefill step of one prompt takes on a rank, at its peak, beside weights, pools and tables."""

    context: int
    """One layer's keys and values of the cached prefix and the suffix."""
    exchange: int
    """What the rank sends to its group, and what it gets from it."""
    activations: int
    """Of the tokens that the rank computes."""

    @property
    def total(self) -> int:
        return sum(self)


def step_bytes(config: ModelConfig, prefix_tokens: int, suffix_tokens: int, degree: int) -> StepBytes:
    """A rank of a group of `degree` computes its share of `suffix_tokens` behind `prefix_tokens` that are cached."""
    size = DTYPE_BYTES[config.dtype]
    token_kv_bytes = 2 * config.kv_heads * config.head_dim * size
    chunk_tokens = -(-suffix_tokens // (2 * degree))
    local_tokens = 2 * chunk_tokens
    keys = prefix_tokens + degree * local_tokens
    exchanged_tokens = (degree + 1) * local_tokens if degree > 1 else 0
    return StepBytes(
        context=keys * token_kv_bytes,
        exchange=exchanged_tokens * token_kv_bytes,
        activations=_activations(config, local_tokens) * size,
    )


def _activations(config: ModelConfig, tokens: int) -> int:
    """Numbers. The residual, queries, keys and values of every token, and where a layer is widest beside them: two parts of
    attention and what they are merged to, or what attention gave and, for the rows that are computed at a time, the norm and
    the MLP's gate, up and their product."""
    experts = config.experts.per_token * config.experts.intermediate if config.experts else 0
    rows = tokens if config.experts else min(tokens, ROWS)
    heads, kv_heads = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    mlp = rows * (config.hidden + 3 * max(config.intermediate, experts))
    return tokens * (config.hidden + heads + 2 * kv_heads) + max(3 * tokens * heads, tokens * heads + mlp)


def rope_bytes(config: ModelConfig, context_tokens: int) -> int:
    """The cosines and sines of every position."""
    return 2 * context_tokens * config.head_dim * DTYPE_BYTES[config.dtype]


def sequence_bytes(config: ModelConfig, layout: KvLayout, tokens: int) -> int:
    """A context on a decode rank, by the longest sequence that it has had: pages are committed when they are first written."""
    blocks = -(-tokens // layout.block_tokens)
    return blocks * layout.block_tokens * config.kv_bytes_per_token
