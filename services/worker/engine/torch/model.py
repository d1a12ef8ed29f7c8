"""A decoder-only transformer: Llama family, and Qwen3 (which normalises queries and keys per head) dense and with experts.

The model knows nothing of ranks, caches or batches. It maps tokens at given positions to hidden states and leaves
attention to the caller, who alone knows where the keys and values of the other tokens are.

Shapes: T tokens · E hidden · H query heads · G key/value heads · D head dim · V vocabulary.
"""

from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear, rms_norm

from services.worker.engine.torch.mlp import mlp_of
from services.worker.engine.torch.model_config import ModelConfig
from services.worker.engine.torch.rope import rope_tables, rotate
from services.worker.engine.torch.weights import DTYPES, Weights


class Attend(Protocol):
    """Attention of one layer for the tokens of this call, with their own keys and values and whatever came before."""

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Returns (T, H, D)."""


class Layer:
    """One decoder layer's weights, straight out of the mapped file."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        at, hidden, head = f"model.layers.{index}", config.hidden, config.head_dim
        self.attention_norm_E = weights.take(f"{at}.input_layernorm", hidden)
        self.q = weights.take(f"{at}.self_attn.q_proj", config.q_heads * head, hidden)
        self.k = weights.take(f"{at}.self_attn.k_proj", config.kv_heads * head, hidden)
        self.v = weights.take(f"{at}.self_attn.v_proj", config.kv_heads * head, hidden)
        self.o = weights.take(f"{at}.self_attn.o_proj", hidden, config.q_heads * head)
        self.q_norm_D = weights.take(f"{at}.self_attn.q_norm", head) if config.qk_norm else None
        self.k_norm_D = weights.take(f"{at}.self_attn.k_norm", head) if config.qk_norm else None
        self.mlp_norm_E = weights.take(f"{at}.post_attention_layernorm", hidden)
        self.mlp = mlp_of(config, weights, index)


class Model:
    """See the module docstring."""

    def __init__(self, config: ModelConfig, weights: Weights, positions: int) -> None:
        """For positions 0 … positions - 1. EngineError names a tensor that does not fit."""
        self.config = config
        self.embedding_VE = weights.take("model.embed_tokens", config.vocab, config.hidden)
        self.layers = [Layer(config, weights, index) for index in range(config.layers)]
        self.norm_E = weights.take("model.norm", config.hidden)
        self.head_VE = (
            self.embedding_VE if config.tied_embeddings else weights.take("lm_head", config.vocab, config.hidden)
        )
        # Computed on the CPU whatever the device is, so that every node has the same tables.
        tables = rope_tables(config.rope, config.head_dim, positions, DTYPES[config.dtype])
        self.cos_PD, self.sin_PD = (table.to(weights.device) for table in tables)
        self.device = weights.device

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states (T, E) after the last layer. `attend` is called once per layer, in order."""
        config, eps = self.config, self.config.norm_eps
        cos_T1D, sin_T1D = self.cos_PD[positions_T].unsqueeze(1), self.sin_PD[positions_T].unsqueeze(1)
        x_TE = self.embedding_VE[tokens_T]
        for index, layer in enumerate(self.layers):
            normed_TE = rms_norm(x_TE, (config.hidden,), layer.attention_norm_E, eps)
            q_THD = linear(normed_TE, layer.q).view(-1, config.q_heads, config.head_dim)
            k_TGD = linear(normed_TE, layer.k).view(-1, config.kv_heads, config.head_dim)
            v_TGD = linear(normed_TE, layer.v).view(-1, config.kv_heads, config.head_dim)
            if layer.q_norm_D is not None:
                q_THD = rms_norm(q_THD, (config.head_dim,), layer.q_norm_D, eps)
                k_TGD = rms_norm(k_TGD, (config.head_dim,), layer.k_norm_D, eps)
            q_THD, k_TGD = rotate(q_THD, cos_T1D, sin_T1D), rotate(k_TGD, cos_T1D, sin_T1D)
            x_TE = x_TE + linear(attend(index, q_THD, k_TGD, v_TGD).flatten(1), layer.o)
            normed_TE = rms_norm(x_TE, (config.hidden,), layer.mlp_norm_E, eps)
            x_TE = x_TE + layer.mlp(normed_TE)
        return x_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """(T, V) float32 for the hidden states of the positions whose next token is wanted, in host memory: one copy, and
        choosing costs the device no further wait."""
        normed_TE = rms_norm(hidden_TE, (self.config.hidden,), self.norm_E, self.config.norm_eps)
        return linear(normed_TE, self.head_VE).float().cpu()
