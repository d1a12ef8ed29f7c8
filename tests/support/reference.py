"""Llama, Qwen3 and Qwen3-MoE in float64, written for reading: what exact arithmetic would answer, to measure engines against.

Nothing here is shared with the engine: no cache, no tiles, no ranks, the whole square of attention at once.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor


class Reference:
    """A model directory's log-probabilities in float64."""

    def __init__(self, model_dir: Path) -> None:
        self.config = json.loads((model_dir / "config.json").read_text())
        self.weights = {
            name: torch.from_numpy(tensor.astype(np.float64))
            for name, tensor in load_file(model_dir / "model.safetensors").items()
        }

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """(tokens, vocabulary): for every position, the log-probabilities of the token after it."""
        config, head_dim, length = self.config, self.config["head_dim"], len(tokens)
        queries, groups = config["num_attention_heads"], config["num_key_value_heads"]
        angles = torch.outer(torch.arange(length, dtype=torch.float64), self._frequencies())
        turn = torch.polar(torch.full_like(angles, self._rope_scale()), angles)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.weights["model.embed_tokens.weight"][torch.from_numpy(tokens.astype(np.int64))]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = self._norm(x, f"{at}input_layernorm")
            q, k, v = (
                self._linear(h, f"{at}self_attn.{n}_proj").view(length, -1, head_dim).transpose(0, 1) for n in "qkv"
            )
            if f"{at}self_attn.q_norm.weight" in self.weights:
                q, k = self._norm(q, f"{at}self_attn.q_norm"), self._norm(k, f"{at}self_attn.k_norm")
            q, k = self._rotate(q, turn), self._rotate(k, turn)
            k, v = (each.repeat_interleave(queries // groups, dim=0) for each in (k, v))
            scores = (q @ k.transpose(1, 2) / math.sqrt(head_dim)).masked_fill(future, -math.inf)
            attended = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(length, -1)
            x = x + self._linear(attended, f"{at}self_attn.o_proj")
            h = self._norm(x, f"{at}post_attention_layernorm")
            x = x + (
                self._experts(h, f"{at}mlp") if f"{at}mlp.gate.weight" in self.weights else self._mlp(h, f"{at}mlp")
            )
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return (self._norm(x, "model.norm") @ head.T).log_softmax(dim=-1).numpy()

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{n}_proj") for n in ("gate", "up"))
        return self._linear(gate * torch.sigmoid(gate) * up, f"{name}.down_proj")

    def _experts(self, x: Tensor, name: str) -> Tensor:
        """Token by token, each with its own few experts."""
        shares = self._linear(x, f"{name}.gate").softmax(dim=-1)
        out = torch.zeros_like(x)
        for token, row in enumerate(shares):
            chosen = row.argsort(descending=True)[: self.config["num_experts_per_tok"]].tolist()
            whole = row[chosen].sum() if self.config["norm_topk_prob"] else 1.0
            for expert in chosen:
                out[token] += row[expert] / whole * self._mlp(x[token], f"{name}.experts.{expert}")
        return out

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
            * self.weights[f"{name}.weight"]
        )

    @staticmethod
    def _rotate(x: Tensor, turn: Tensor) -> Tensor:
        """Dimensions i and i + d/2 form one complex number."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _frequencies(self) -> Tensor:
        rope = self._rope()
        theta = rope.get("rope_theta", self.config.get("rope_theta"))
        dim = self.config["head_dim"]
        frequencies = [theta ** (-i / dim) for i in range(0, dim, 2)]
        match rope.get("rope_type"):
            case "linear":
                frequencies = [f / rope["factor"] for f in frequencies]
            case "llama3":
                frequencies = [self._llama3(f, rope) for f in frequencies]
            case "yarn":
                frequencies = [self._yarn(i, f, theta, rope) for i, f in enumerate(frequencies)]
        return torch.tensor(frequencies, dtype=torch.float64)

    def _rope(self) -> dict[str, Any]:
        return self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}

    def _rope_scale(self) -> float:
        """What YaRN makes queries and keys longer by; the paper's value unless another is given."""
        rope = self._rope()
        if rope.get("rope_type") != "yarn":
            return 1.0
        return rope.get("attention_factor", 0.1 * math.log(rope["factor"]) + 1)

    def _yarn(self, index: int, frequency: float, theta: float, rope: dict[str, Any]) -> float:
        """Between the two bounds, in pairs of dimensions, the frequency falls from its own to the interpolated one."""
        pairs, context = self.config["head_dim"] / 2, rope["original_max_position_embeddings"]
        bounds = [
            pairs * math.log(context / (2 * math.pi * turns), theta)
            for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
        ]
        if rope.get("truncate", True):
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        low, high = max(bounds[0], 0), min(bounds[1], 2 * pairs - 1)
        interpolated = min(1.0, max(0.0, (index - low) / (high - low)))
        return frequency * (1 - interpolated) + frequency / rope["factor"] * interpolated

    @staticmethod
    def _llama3(frequency: float, rope: dict[str, float]) -> float:
        wavelength = 2 * math.pi / frequency
        context, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < context / high:
            return frequency
        if wavelength > context / low:
            return frequency / factor
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency
