"""The fields of a config.json that the engine reads, and what each may be. What they mean together is for `model_config` and
`rope_config`, as is which of them must be there. Torch-free.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.worker.engine.protocol import EngineError

VALUE_CHARS_MAX = 120

Count = Annotated[int, Field(ge=1, lt=1 << 31)] | None
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Base = Annotated[float, Field(gt=1, allow_inf_nan=False)] | None
"""Of powers that must differ."""


class _Fields(BaseModel):
    """Others are passed over. JSON has types, and nothing is taken for what it is not."""

    model_config = ConfigDict(strict=True, extra="ignore")


class RopeFields(_Fields):
    """`rope_parameters` or `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base = None
    factor: Positive = None
    low_freq_factor: Positive = None
    high_freq_factor: Positive = None
    original_max_position_embeddings: Count = None
    beta_fast: Positive = None
    beta_slow: Positive = None
    attention_factor: Positive = None
    mscale: Positive = None
    mscale_all_dim: Positive = None
    truncate: bool | None = None


class ConfigFields(_Fields):
    """The file."""

    architectures: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    vocab_size: Count = None
    hidden_size: Count = None
    num_hidden_layers: Count = None
    num_attention_heads: Count = None
    num_key_value_heads: Count = None
    head_dim: Count = None
    intermediate_size: Count = None
    max_position_embeddings: Count = None
    rms_norm_eps: Positive = None
    tie_word_embeddings: bool | None = None
    layer_types: list[str] | None = None
    rope_theta: Base = None
    rope_parameters: RopeFields | None = None
    rope_scaling: RopeFields | None = None
    num_experts: Count = None
    num_local_experts: Count = None
    num_experts_per_tok: Count = None
    moe_intermediate_size: Count = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Count = None
    mlp_only_layers: list[int] | None = None


def present(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null, which says as much as a missing one. EngineError names one that is not what it must be."""
    try:
        ConfigFields.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise EngineError(f"config.json: {field} = {short(first['input'])}: {first['msg']}") from error
    return {name: value for name, value in config.items() if value is not None}


def short(value: object) -> str:
    """A quantisation's configuration lists every layer that it leaves out."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"
