"""A decoder-only transformer: Llama family, and Qwen3 (which normalises queries and keys per head) dense and with experts.

The model knows nothing of ranks, caches or batches. It maps tokens at given positions to hidden states and leaves
attention to the caller, who alone knows where the keys and values of the other tokens are.

All of a layer but attention is a function of each token alone. On a CPU it is computed some rows at a time: what lies between
two matrix products stays in the processor's cache and in the same few pages, where a long prompt's would be written to memory
and read again, in pages that the kernel has to clear first.

Shapes: T tokens · E hidden · H query heads · G key/value heads · D head dim · A = H × D · 2 (K, V) · V vocabulary.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.memory import ROWS
from services.worker.engine.torch.mlp import ExpertMlp, mlp_of
from services.worker.engine.torch.model_config import ModelConfig
from services.worker.engine.torch.rope import rope_tables, rotate
from services.worker.engine.torch.weights import DTYPES, Weights


class Attend(Protocol):
    """Attention of one layer for the tokens of this call, with their own keys and values and whatever came before."""

    def __call__(self, layer: int, q_THD: Tensor, kv_2TGD: Tensor) -> Tensor:
        """Returns (T, H, D). The next layer's operands come in the same memory."""


class Layer:
    """One decoder layer's weights, straight out of the mapped file."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        at, hidden, head = f"model.layers.{index}", config.hidden, config.head_dim
        self._head_dim, self._eps = head, config.norm_eps
        self.attention_norm_E = weights.take(f"{at}.input_layernorm", hidden)
        self.q = weights.take(f"{at}.self_attn.q_proj", config.q_heads * head, hidden)
        self.k = weights.take(f"{at}.self_attn.k_proj", config.kv_heads * head, hidden)
        self.v = weights.take(f"{at}.self_attn.v_proj", config.kv_heads * head, hidden)
        self.o = weights.take(f"{at}.self_attn.o_proj", hidden, config.q_heads * head)
        self.q_norm_D = weights.take(f"{at}.self_attn.q_norm", head) if config.qk_norm else None
        self.k_norm_D = weights.take(f"{at}.self_attn.k_norm", head) if config.qk_norm else None
        self.mlp_norm_E = weights.take(f"{at}.post_attention_layernorm", hidden)
        self.mlp = mlp_of(config, weights, index)
        # Experts share out what they are given: few rows at a time would leave each of them hardly any.
        self._rows = ROWS if weights.device.type == "cpu" and not isinstance(self.mlp, ExpertMlp) else None

    def parts(self, tokens: int) -> Iterator[slice]:
        """The rows that are computed at a time."""
        size = self._rows or tokens
        return (slice(start, start + size) for start in range(0, tokens, size))

    def project(self, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, q_THD: Tensor, kv_2TGD: Tensor) -> None:
        """What the tokens bring to attention, into `q_THD` and `kv_2TGD`."""
        normed_TE = self._norm(x_TE, self.attention_norm_E)
        q, k = (linear(normed_TE, weight).view(len(x_TE), -1, self._head_dim) for weight in (self.q, self.k))
        if self.q_norm_D is not None:
            q, k = self._norm(q, self.q_norm_D), self._norm(k, self.k_norm_D)
        rotate(q, cos_T1D, sin_T1D, out=q_THD)
        rotate(k, cos_T1D, sin_T1D, out=kv_2TGD[0])
        torch.mm(normed_TE, self.v.t(), out=kv_2TGD[1].flatten(1))

    def go_on(self, x_TE: Tensor, attended_TA: Tensor) -> None:
        """The rest of the layer, in place."""
        x_TE += linear(attended_TA, self.o)
        x_TE += self.mlp(self._norm(x_TE, self.mlp_norm_E))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight, self._eps)


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
        config = self.config
        cos_T1D, sin_T1D = self.cos_PD[positions_T].unsqueeze(1), self.sin_PD[positions_T].unsqueeze(1)
        x_TE = self.embedding_VE[tokens_T]
        tokens = x_TE.shape[0]
        # Each query head in one piece, as attention on a CPU wants it.
        q_THD = x_TE.new_empty((config.q_heads, tokens, config.head_dim)).transpose(0, 1)
        kv_2TGD = x_TE.new_empty((2, tokens, config.kv_heads, config.head_dim))
        for index, layer in enumerate(self.layers):
            for rows in layer.parts(tokens):
                layer.project(x_TE[rows], cos_T1D[rows], sin_T1D[rows], q_THD[rows], kv_2TGD[:, rows])
            attended_TA = attend(index, q_THD, kv_2TGD).flatten(1)
            for rows in layer.parts(tokens):
                layer.go_on(x_TE[rows], attended_TA[rows])
        return x_TE

    def check(self) -> None:
        """EngineError if even one token alone comes to nothing: such weights would fail every request, and quickly."""
        token_T, times = self.cos_PD.new_zeros(1, dtype=torch.int64), self.config.q_heads // self.config.kv_heads

        def attend(layer: int, q_THD: Tensor, kv_2TGD: Tensor) -> Tensor:  # noqa: ARG001 - see `Attend`
            """What a single token attends to is its own value."""
            return kv_2TGD[1].repeat_interleave(times, dim=1)

        hidden_TE = self.forward(token_T, token_T, attend)
        if not self.logits(hidden_TE).isfinite().all():
            raise EngineError("weights: the logits of token 0 are no finite numbers; is the checkpoint damaged?")

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """(T, V) float32 for the hidden states of the positions whose next token is wanted, in host memory: one copy, and
        choosing costs the device no further wait."""
        normed_TE = rms_norm(hidden_TE, (self.config.hidden,), self.norm_E, self.config.norm_eps)
        return linear(normed_TE, self.head_VE).float().cpu()
