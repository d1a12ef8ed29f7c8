"""What the pool has to know of a model that SGLang serves, out of its Hugging Face directory. Pure but for reading the files.

SGLang serves far more architectures than the built-in engine, so nothing here asks which one it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.engine.protocol import EngineError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`kv_bytes_per_token` is of one rank's cache, which SGLang keeps whole on every rank of a context-parallel group."""

    architectures: tuple[str, ...]
    vocabulary: int
    positions_max: int
    dtype: str
    kv_bytes_per_token: int


def read_model(model_dir: Path) -> ModelFacts:
    """EngineError names the directory and the field that is missing."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"model_dir {model_dir}: no readable config.json ({error})") from None
    try:
        text = config.get("text_config", config)
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        return ModelFacts(
            architectures=tuple(config["architectures"]),
            vocabulary=int(text["vocab_size"]),
            positions_max=int(text["max_position_embeddings"]),
            dtype=dtype,
            kv_bytes_per_token=_kv_values(text) * int(text["num_hidden_layers"]) * DTYPE_BYTES.get(dtype, 2),
        )
    except KeyError as error:
        raise EngineError(f"{path}: {error} is missing") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise EngineError(f"{path}: is not a model's configuration: {error}") from None


def _kv_values(text: Mapping[str, Any]) -> int:
    """Numbers that one layer keeps of a token: keys and values of every KV head, or the latent of MLA models."""
    if (latent := text.get("kv_lora_rank")) is not None:
        return int(latent) + int(text["qk_rope_head_dim"])
    heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
    width = text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"])
    return 2 * heads * int(width)
