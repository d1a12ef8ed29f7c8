"""What a Hugging Face directory says about its model, checked against what the engine can run. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.checkpoint import weight_files
from services.worker.engine.torch.config_json import present, short
from services.worker.engine.torch.rope_config import Rope, read_rope

# architecture -> whether queries and keys are normalised per head (QK-norm)
ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True, "Qwen3MoeForCausalLM": True}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FULL_ATTENTION = "full_attention"
REVISION_BYTES = 12
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. `normalised`: the shares of a token's experts are made to add up to 1. Every `step`-th layer has
    one, but for `dense_layers`; the others have an MLP of the model's own `intermediate` size."""

    count: int
    per_token: int
    intermediate: int
    normalised: bool
    step: int
    dense_layers: tuple[int, ...]

    def serve(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.step == 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. `dtype` is that of the stored weights, and so of all computing."""

    architecture: str
    dtype: Literal["float32", "bfloat16"]
    vocab: int
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions_max: int
    norm_eps: float
    rope: Rope
    qk_norm: bool
    tied_embeddings: bool
    experts: Experts | None

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


def read_config(model_dir: Path) -> ModelConfig:
    """The directory's model. EngineError names the file or field that is missing or unsupported."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"model_dir {model_dir}: no readable config.json ({error})") from error
    if not isinstance(config, dict):
        raise EngineError(f"model_dir {model_dir}: config.json is no JSON object")
    config = present(config)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise EngineError(f"architecture {architecture}: not supported; supported are {', '.join(ARCHITECTURES)}")
    _refuse_variants(config)
    try:
        found = _from_fields(architecture, config)
    except KeyError as error:
        raise EngineError(f"model_dir {model_dir}: config.json has no {error}") from error
    _check_sizes(found)
    return found


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Options of the supported families that change the arithmetic in ways this engine does not follow."""
    supported = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "quantization_config": (None,),
        "compression_config": (None,),
    }
    for key, values in supported.items():
        value = config.get(key, values[0])
        if value not in values:
            raise EngineError(f"config.json: {key} = {short(value)} is not supported; it must be {values[0]!r}")
    if windowed := set(config.get("layer_types") or ()) - {FULL_ATTENTION}:
        raise EngineError(
            f"config.json: layer_types {sorted(windowed)} are not supported; all must be {FULL_ATTENTION!r}"
        )


def _check_sizes(config: ModelConfig) -> None:
    """EngineError for numbers that do not go together, or leave nothing to do."""
    if config.positions_max < 2:
        raise EngineError(
            f"config.json: max_position_embeddings = {config.positions_max} has no room for a prompt and an answer"
        )
    if config.q_heads % config.kv_heads:
        raise EngineError(
            f"config.json: num_attention_heads = {config.q_heads} is no multiple of num_key_value_heads = {config.kv_heads}"
        )
    if config.head_dim < 1 or config.head_dim % 2:
        raise EngineError(f"config.json: head_dim = {config.head_dim} is odd or 0; rotary positions turn pairs")
    if config.dtype == "bfloat16" and config.head_dim % 8:
        raise EngineError(
            f"config.json: head_dim = {config.head_dim} is no multiple of 8, which attention in bfloat16 needs"
        )


def _from_fields(architecture: str, config: Mapping[str, Any]) -> ModelConfig:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPE_BYTES:
        raise EngineError(f"config.json: dtype = {dtype!r} is not supported; it must be one of {list(DTYPE_BYTES)}")
    q_heads = config["num_attention_heads"]
    return ModelConfig(
        architecture=architecture,
        dtype=dtype,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        q_heads=q_heads,
        kv_heads=config.get("num_key_value_heads") or q_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // q_heads,
        intermediate=config["intermediate_size"],
        positions_max=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope=read_rope(config),
        qk_norm=ARCHITECTURES[architecture],
        tied_embeddings=config.get("tie_word_embeddings", False),
        experts=_experts(config) if architecture == "Qwen3MoeForCausalLM" else None,
    )


def _experts(config: Mapping[str, Any]) -> Experts:
    """Transformers 5 writes `num_local_experts`; older files have `num_experts`."""
    experts = Experts(
        count=config["num_local_experts"] if "num_local_experts" in config else config["num_experts"],
        per_token=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        normalised=config.get("norm_topk_prob", False),
        step=config.get("decoder_sparse_step", 1),
        dense_layers=tuple(config.get("mlp_only_layers") or ()),
    )
    if not 1 <= experts.per_token <= experts.count:
        raise EngineError(f"config.json: num_experts_per_tok = {experts.per_token} of {experts.count} experts")
    return experts


def model_revision(model_dir: Path) -> str:
    """A digest of configuration and weights. Of each weight file it reads the header and 64 pages spread evenly: enough to
    tell two checkpoints apart, and the same few milliseconds for any size."""
    digest = blake2b((model_dir / "config.json").read_bytes(), digest_size=REVISION_BYTES)
    for path in weight_files(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_revision(model_dir: Path) -> str:
    """A digest of tokenizer.json. EngineError if it is missing."""
    try:
        return blake2b((model_dir / "tokenizer.json").read_bytes(), digest_size=REVISION_BYTES).hexdigest()
    except OSError as error:
        raise EngineError(f"model_dir {model_dir}: no readable tokenizer.json ({error})") from error
