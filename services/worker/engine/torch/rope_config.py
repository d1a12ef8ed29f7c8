"""Which rotary embedding a Hugging Face configuration asks for. Torch-free.

*linear* divides every frequency. *llama3* divides the low ones, keeps the high ones and blends those between. *yarn* does so by
dimension and scales the attention as well. Their angles are functions of the position alone. Those of *dynamic* and *longrope*
change with the length of the sequence, so that keys in a cache would be wrong for a longer prompt: they are refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.worker.engine.protocol import EngineError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """`attention_factor` scales cos and sin, and so queries and keys alike. `truncate` rounds the blend to whole
    dimensions."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """`theta` is the base of the frequencies."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`.

    Errors: EngineError names what is not supported, KeyError the field that is missing.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fields = {name: value for name, value in given.items() if value is not None}
    by_layer = [key for key, value in fields.items() if isinstance(value, Mapping)]
    if by_layer:
        raise EngineError(f"config.json: rope parameters by layer type ({', '.join(by_layer)}) are not supported")
    share = fields.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if share != 1.0:
        raise EngineError(f"config.json: partial_rotary_factor = {share} is not supported; it must be 1")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in KINDS:
        raise EngineError(f"config.json: rope_type = {kind!r} is not supported; it must be one of {', '.join(KINDS)}")
    theta = fields.get("rope_theta", config.get("rope_theta", 10_000.0))
    return Rope(theta, None if kind == "default" else _scaling(kind, fields, config["max_position_embeddings"]))


def _scaling(kind: str, fields: Mapping[str, Any], context: int) -> LinearScaling | Llama3Scaling | YarnScaling:
    factor = fields["factor"]
    if factor < 1:
        raise EngineError(f"config.json: the factor of rope_type {kind!r} is {factor}; it must be at least 1")
    original = fields.get("original_max_position_embeddings", context)
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        if low >= high:
            raise EngineError(f"config.json: low_freq_factor = {low} is not below high_freq_factor = {high}")
        return Llama3Scaling(factor, low, high, original)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.get("beta_fast") or 32.0,
        beta_slow=fields.get("beta_slow") or 1.0,
        attention_factor=_yarn_attention_factor(factor, fields),
        truncate=fields.get("truncate", True),
    )


def _yarn_attention_factor(factor: float, fields: Mapping[str, Any]) -> float:
    """As given, or 0.1 ln(factor) + 1 (YaRN paper, section 3.4), or DeepSeek's ratio of two of those."""
    given, scale, scale_all = (fields.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if scale and scale_all:
        return (0.1 * float(scale) * math.log(factor) + 1) / (0.1 * float(scale_all) * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1
