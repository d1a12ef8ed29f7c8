"""What the layout of a head's operands costs attention on the CPU: `python -m bench.attention`.

One thread, its own processor time, all ways in turn, medians of the rounds' ratios to operands as they lie in a step: queries
(T, H, D) and keys (S, G, D) with the heads inside. SmolLM2's heads.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SHAPES = ((16, 2_048, False), (256, 2_048, False), (1_024, 1_024, True), (4_096, 4_096, True))
ROUNDS = 7


def ways(queries: int, keys: int, causal: bool) -> dict[str, Callable[[], object]]:
    """Each with the copies that it needs."""
    q_1HTD = torch.randn(queries, HEADS, HEAD_DIM).transpose(0, 1)[None]
    k_1GSD, v_1GSD = (torch.randn(keys, KV_HEADS, HEAD_DIM).transpose(0, 1)[None] for _ in range(2))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return {
        "as they lie": lambda: kernel(q_1HTD, k_1GSD, v_1GSD, is_causal=causal),
        "queries copied": lambda: kernel(q_1HTD.contiguous(), k_1GSD, v_1GSD, is_causal=causal),
        "all copied": lambda: kernel(q_1HTD.contiguous(), k_1GSD.contiguous(), v_1GSD.contiguous(), is_causal=causal),
    }


def main() -> None:
    torch.set_num_threads(1)
    for queries, keys, causal in SHAPES:
        taken: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, way in ways(queries, keys, causal).items():
                began_s = time.thread_time()
                way()
                taken.setdefault(name, []).append(time.thread_time() - began_s)
        base = taken["as they lie"]
        found = {
            name: statistics.median(own / lying for own, lying in zip(each, base, strict=True))
            for name, each in taken.items()
        }
        shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
        sys.stdout.write(f"{queries} queries, {keys} keys{', causal' if causal else ''}: {shown}\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
