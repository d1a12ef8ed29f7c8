"""Which models are served, and that every refusal says why."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.model_config import Experts, model_revision, read_config
from services.worker.engine.torch.rope_config import Llama3Scaling
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from tests.support.tiny_models import Family, write_tiny_model


def with_config(directory: Path, family: Family = "llama", **changes: Any) -> Path:
    """A tiny model whose configuration differs; None removes a field."""
    write_tiny_model(directory, family)
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def test_reads_both_families(tiny_llama: Path, tiny_qwen3: Path) -> None:
    llama, qwen3 = read_config(tiny_llama), read_config(tiny_qwen3)
    assert (llama.qk_norm, llama.tied_embeddings, llama.head_dim) == (False, True, 16)
    assert llama.rope.scaling == Llama3Scaling(4.0, 1.0, 4.0, 64)
    assert (qwen3.qk_norm, qwen3.tied_embeddings, qwen3.head_dim) == (True, False, 24)
    assert (qwen3.rope.theta, qwen3.rope.scaling) == (1e6, None)
    assert qwen3.kv_bytes_per_token == 2 * 3 * 2 * 24 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM: not supported; supported are Llama.*, Qwen3"),
        ({"architectures": None}, "architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": {"modules_to_not_convert": ["x" * 200]}}, "quantization_config = .{,140}… is not"),
        ({"compression_config": {"format": "pack-quantized"}}, "compression_config"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported; it must be False"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types \['sliding_attention'\] are not supported",
        ),
        ({"architectures": {"a": 1}}, "architectures = {'a': 1}: Input should be a valid list"),
        ({"vocab_size": "many"}, "vocab_size = 'many': Input should be a valid integer"),
        ({"vocab_size": 10**30}, "vocab_size = 10{30}: Input should be less than"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: Input should be greater than or equal to 1"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads = 0: Input should be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: Input should be"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': Input should be a valid boolean"),
        ({"rope_theta": 1, "rope_parameters": None}, "rope_theta = 1: Input should be greater than 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn': Input should be"),
        (
            {"rope_scaling": {"type": "yarn", "factor": "4"}},
            "rope_scaling.factor = '4': Input should be a valid number",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "config.json has no 'factor'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            r"low_freq_factor = 4\.0 is not below high_freq_factor = 4\.0",
        ),
        ({"num_key_value_heads": 5}, r"num_attention_heads = \d is no multiple of num_key_value_heads = 5"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"max_position_embeddings": 1}, "max_position_embeddings = 1 has no room"),
        ({"head_dim": 12, "torch_dtype": "bfloat16", "dtype": "bfloat16"}, "head_dim = 12 is no multiple of 8"),
        ({"dtype": "float16"}, "dtype = 'float16'.*float32"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type = 'dynamic' .* one of default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "config.json has no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor of rope_type 'linear' is 0.5; .* at least 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "config.json has no 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"by layer type \(full_attention\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_config(with_config(tmp_path, **changes))


def test_reads_experts(tiny_qwen3: Path, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    assert read_config(tiny_qwen3).experts is None
    experts = read_config(tiny_qwen3_moe).experts
    assert experts == Experts(8, 3, 48, normalised=True, step=1, dense_layers=(1,))
    assert [experts.serve(layer) for layer in range(3)] == [True, False, True]
    changes = {"num_experts": None, "num_local_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": None}
    other = read_config(with_config(tmp_path, "qwen3_moe", **changes)).experts
    assert other == Experts(8, 3, 48, normalised=True, step=2, dense_layers=())
    assert [other.serve(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0: Input should be greater"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers = 'all': Input should be a valid list"),
        ({"moe_intermediate_size": None}, "config.json has no 'moe_intermediate_size'"),
    ],
)
def test_refuses_experts_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_config(with_config(tmp_path, "qwen3_moe", **changes))


def test_refuses_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        read_config(tmp_path)
    write_tiny_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"holds neither model\.safetensors nor"):
        TorchEngine(TorchSettings(tmp_path), Zygote())
    write_tiny_model(tmp_path, "qwen3")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"no readable tokenizer\.json"):
        TorchEngine(TorchSettings(tmp_path), Zygote())


def test_a_revision_tells_checkpoints_apart(tmp_path: Path, tiny_llama: Path) -> None:
    same, other = (write_tiny_model(tmp_path / name, "llama", seed) for name, seed in (("same", 0), ("other", 1)))
    assert model_revision(same) == model_revision(tiny_llama)
    assert model_revision(other) != model_revision(tiny_llama)


def test_settings_name_the_field_and_its_limits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"block_tokens: 3 is outside \[4, 512\]"):
        TorchSettings(tmp_path, block_tokens=3)
    with pytest.raises(ValueError, match=r"step_timeout_s: 0 is outside"):
        TorchSettings(tmp_path, step_timeout_s=0)
