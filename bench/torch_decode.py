"""What companions cost a decoding sequence: `python -m bench.torch_decode MODEL_DIR`.

One prefill rank and one decode rank on this machine. N requests are prefilled and handed off, then decode together. Prints
tokens per second of wall time, and per second of the decode rank's own CPU time, which a busy machine does not blur.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np

from services.worker.engine.protocol import PrefillItem, PrefillStep, Sampling
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.lattice import Group

SEQUENCES = (1, 4, 8)
PROMPT_TOKENS = 256
NEW_TOKENS = 33
BLOCK_TOKENS = 16


def cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def decode_together(engine: TorchEngine, sequences: int) -> str:
    """Prefill one after the other, decode side by side."""
    rng = np.random.default_rng(sequences)
    firsts: dict[RequestId, int] = {}
    for number in range(sequences):
        request = RequestId(f"{sequences}-{number}")
        tokens = rng.integers(0, 40_000, PROMPT_TOKENS).astype(np.uint32)
        step = PrefillStep(1, Group(0, 1), (PrefillItem(request, tokens, ()),))
        token = (await engine.prefill(step)).items[0].first_token
        firsts[request] = token.token
        await engine.hand_off(request)
        engine.release(request)

    async def decode(request: RequestId) -> int:
        stop: frozenset[int] = frozenset()
        return len([1 async for _ in engine.decode(request, firsts[request], NEW_TOKENS, stop, Sampling())])

    pid = engine._ranks.decode[0].pid
    wall_s, used_s = time.perf_counter(), cpu_s(pid)
    tokens_made = sum(await asyncio.gather(*map(decode, firsts)))
    wall_s, used_s = time.perf_counter() - wall_s, cpu_s(pid) - used_s
    return f"{sequences} sequences: {tokens_made / wall_s:6.1f} tok/s, {tokens_made / used_s:6.1f} per CPU second"


async def main(model_dir: Path) -> None:
    zygote = Zygote()
    engine = TorchEngine(
        TorchSettings(model_dir, prefill_ranks=1, block_tokens=BLOCK_TOKENS, sequences_per_decode_rank=max(SEQUENCES)),
        zygote,
    )
    try:
        await engine.start()
        await engine.adopt(1, (1,))
        await decode_together(engine, 1)  # pages of the weights, first calls
        for sequences in SEQUENCES:
            sys.stdout.write(f"{await decode_together(engine, sequences)}\n")
    finally:
        await engine.close()
        zygote.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
