"""Rotary embedding: cos and sin of every position, and the rotation of queries and keys by them.

Shapes: P positions · T tokens · X heads · D head dim.
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from services.worker.engine.torch.rope_config import LinearScaling, Llama3Scaling, Rope, YarnScaling


def rotate(x_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, *, out: Tensor) -> None:
    """In the half-split form of the Hugging Face checkpoints, into `out` (T, X, D)."""
    first, second = x_TXD.chunk(2, dim=-1)
    torch.addcmul(x_TXD * cos_T1D, torch.cat((-second, first), dim=-1), sin_T1D, out=out)


def rope_tables(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (P, D), in host memory. Computed in float64: a float32 angle is off by 5e-4 at position 8192."""
    frequencies = _frequencies(rope, head_dim)
    angles_PD = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequencies).repeat(1, 2)
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return (angles_PD.cos() * scale).to(dtype), (angles_PD.sin() * scale).to(dtype)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(D / 2,) in radians per position, falling."""
    plain = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, rope.theta)
        case _:
            assert_never(rope.scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended (Llama 3.1 reference code)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain / scaling.factor, plain, blend.clamp(0, 1))


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Dimensions that turn more than `beta_fast` times within the original context are kept, those that turn less than
    `beta_slow` times divided by `factor`, with a ramp over the dimensions between (YaRN paper, section 3.2)."""

    def dimension(turns: float) -> float:
        """Which one turns so often, of head_dim / 2."""
        return len(plain) * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    width = last - first or 0.001  # a step, where the ramp has no width
    ramp = ((torch.arange(len(plain), dtype=torch.float64, device="cpu") - first) / width).clamp(0, 1)
    return torch.lerp(plain, plain / scaling.factor, ramp)
