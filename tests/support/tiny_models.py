"""Seeded models of a few hundred kilobytes, written as real Hugging Face directories: config, weights and tokenizer.

They say nothing sensible, but their logits are spread enough that a wrong token shows. The tokenizer maps every byte to
one token and knows the three ChatML markers, so any text can be encoded and a prompt's length is known beforehand.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Family = Literal["llama", "qwen3", "qwen3_moe"]

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(MARKERS)
CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    directory: Path, family: Family, seed: int = 0, context: int = CONTEXT, **changes: int | list[int]
) -> Path:
    """Write a model directory and return it. Equal arguments write equal bytes.

    Llama: tied embeddings, llama3 RoPE scaling. Qwen3: QK-norm, head_dim ≠ hidden / heads, an lm_head of its own.
    Qwen3-MoE: the same with three of eight experts in its first and last layer and a dense one between. `changes` replace
    entries of the config, and the weights follow.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(family, context) | changes
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    save_file(_weights(config, np.random.default_rng(seed)), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, context)
    return directory


def _config(family: Family, context: int) -> dict[str, Any]:
    common = {
        "dtype": "float32",
        "vocab_size": VOCAB,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "bos_token_id": 257,
        "eos_token_id": 258,
    }
    if family == "llama":
        scaling = {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        shape = {"hidden_size": 96, "head_dim": 16, "intermediate_size": 192, "tie_word_embeddings": True}
        rope = {"rope_theta": 10000.0, "rope_scaling": scaling, "mlp_bias": False}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common, **shape, **rope}
    shape = {"hidden_size": 64, "head_dim": 24, "intermediate_size": 160, "tie_word_embeddings": False}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "use_sliding_window": False}
    if family == "qwen3":
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common, **shape, **rope}
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **common, **shape, **rope, **experts}


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def linear(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, 1.5 / np.sqrt(columns), (rows, columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.normal(1.0, 0.1, size).astype(np.float32)

    weights = {"model.embed_tokens.weight": linear(VOCAB, hidden), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(VOCAB, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": norm(hidden),
            f"{at}self_attn.q_proj.weight": linear(q, hidden),
            f"{at}self_attn.k_proj.weight": linear(kv, hidden),
            f"{at}self_attn.v_proj.weight": linear(kv, hidden),
            f"{at}self_attn.o_proj.weight": linear(hidden, q),
            f"{at}post_attention_layernorm.weight": norm(hidden),
        }
        if config["model_type"] != "llama":
            weights |= {f"{at}self_attn.{which}_norm.weight": norm(head) for which in "qk"}
        mlps = {f"{at}mlp": inner}
        if "num_experts" in config and layer not in config["mlp_only_layers"]:
            weights[f"{at}mlp.gate.weight"] = linear(config["num_experts"], hidden)
            mlps = {f"{at}mlp.experts.{n}": config["moe_intermediate_size"] for n in range(config["num_experts"])}
        for name, size in mlps.items():
            weights |= {
                f"{name}.gate_proj.weight": linear(size, hidden),
                f"{name}.up_proj.weight": linear(size, hidden),
                f"{name}.down_proj.weight": linear(hidden, size),
            }
    return weights


def _write_tokenizer(directory: Path, context: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
