"""The memory formula on numbers small enough for a pencil. `bench/switching.py` holds it against the kernel."""

from pathlib import Path

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.memory import ROWS, StepBytes, rope_bytes, sequence_bytes, step_bytes
from services.worker.engine.torch.model_config import read_config


def test_a_step_by_hand(tiny_qwen3: Path) -> None:
    """2 key/value heads of 24 in float32: 384 bytes of keys and values per token and layer."""
    config = read_config(tiny_qwen3)
    heads = config.q_heads * 24
    widest = max(3 * heads, heads + config.hidden + 3 * config.intermediate)
    assert step_bytes(config, prefix_tokens=64, suffix_tokens=100, degree=4) == StepBytes(
        context=(64 + 104) * 384,  # eight chunks of 13
        exchange=(26 + 104) * 384,  # sent, and gathered
        activations=26 * (config.hidden + heads + 2 * 2 * 24 + widest) * 4,
    )


def test_a_long_prompt_has_an_mlp_for_some_rows_only(tiny_qwen3: Path, tiny_qwen3_moe: Path) -> None:
    """And experts one for all."""

    def added_by_a_token(model_dir: Path) -> int:
        one, two = (step_bytes(read_config(model_dir), 0, tokens, 1).activations for tokens in (4 * ROWS, 4 * ROWS + 2))
        return (two - one) // 2 // 4

    config = read_config(tiny_qwen3)
    heads = config.q_heads * 24
    kept = config.hidden + heads + 2 * 2 * 24
    assert added_by_a_token(tiny_qwen3) == kept + 3 * heads
    assert added_by_a_token(tiny_qwen3_moe) == kept + heads + config.hidden + 3 * config.intermediate


def test_a_rank_that_computes_alone_exchanges_nothing(tiny_qwen3: Path) -> None:
    alone = step_bytes(read_config(tiny_qwen3), 0, 100, 1)
    assert alone.exchange == 0
    assert alone.total == sum(alone)


def test_experts_count_as_many_as_a_token_has(tiny_qwen3: Path, tiny_qwen3_moe: Path) -> None:
    """Three experts of 48 are narrower than the dense layer between."""
    assert step_bytes(read_config(tiny_qwen3_moe), 0, 100, 2) == step_bytes(read_config(tiny_qwen3), 0, 100, 2)


def test_tables_and_sequences(tiny_qwen3: Path) -> None:
    config = read_config(tiny_qwen3)
    assert rope_bytes(config, 512) == 2 * 512 * 24 * 4
    assert sequence_bytes(config, KvLayout.of(config, 16, 1), 33) == 48 * config.kv_bytes_per_token
