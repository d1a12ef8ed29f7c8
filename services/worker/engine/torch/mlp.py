"""The second half of a layer: one gated MLP for every token, or a few of many experts for each.

Every rank has all experts: a token's experts are a function of the token alone, so neither degree nor companions change them.

Shapes: T tokens · E hidden · X experts · K experts per token · N = T × K.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from services.worker.engine.torch.model_config import Experts, ModelConfig
from services.worker.engine.torch.weights import Weights


class DenseMlp:
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, weights: Weights, name: str, hidden: int, intermediate: int) -> None:
        self._gate = weights.take(f"{name}.gate_proj", intermediate, hidden)
        self._up = weights.take(f"{name}.up_proj", intermediate, hidden)
        self._down = weights.take(f"{name}.down_proj", hidden, intermediate)

    def __call__(self, x_TE: Tensor) -> Tensor:
        gated = silu(linear(x_TE, self._gate), inplace=True).mul_(linear(x_TE, self._up))
        return linear(gated, self._down)


class ExpertMlp:
    """The K most probable experts of each token, weighted by the router's probabilities (Qwen3-MoE)."""

    def __init__(self, weights: Weights, name: str, hidden: int, experts: Experts) -> None:
        self._router_XE = weights.take(f"{name}.gate", experts.count, hidden)
        self._experts = [
            DenseMlp(weights, f"{name}.experts.{index}", hidden, experts.intermediate) for index in range(experts.count)
        ]
        self._per_token, self._normalised = experts.per_token, experts.normalised

    def __call__(self, x_TE: Tensor) -> Tensor:
        probabilities_TX = linear(x_TE, self._router_XE).softmax(-1, dtype=torch.float32)
        shares_TK, chosen_TK = probabilities_TX.topk(self._per_token)
        if self._normalised:
            shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        shares_N = shares_TK.to(x_TE.dtype).flatten()
        chosen_N, order_N = chosen_TK.flatten().sort(stable=True)
        experts = torch.arange(len(self._experts), device=x_TE.device)
        # The layer's one wait for a GPU: what is looked up for each expert by itself waits for each.
        ends = torch.searchsorted(chosen_N, experts, right=True).tolist()
        out_TE = torch.zeros_like(x_TE)
        # In the order of their ids: a sum in another order would differ in its last bits.
        for expert, start, end in zip(self._experts, (0, *ends), ends, strict=False):
            if start < end:
                own_N = order_N[start:end]
                rows = own_N // self._per_token
                out_TE.index_add_(0, rows, expert(x_TE[rows]) * shares_N[own_N, None])
        return out_TE


def mlp_of(config: ModelConfig, weights: Weights, layer: int) -> DenseMlp | ExpertMlp:
    """The MLP of one layer. EngineError names a tensor that does not fit."""
    name = f"model.layers.{layer}.mlp"
    if config.experts is not None and config.experts.serve(layer):
        return ExpertMlp(weights, name, config.hidden, config.experts)
    return DenseMlp(weights, name, config.hidden, config.intermediate)
