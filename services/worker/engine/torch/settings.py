"""How a torch engine is set up, and the environment its processes run in."""

import os
from dataclasses import dataclass
from pathlib import Path

from services.worker.engine.torch.devices import GPUS_MAX
from shared.model.blocks import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN
from shared.model.lattice import RANKS_MAX


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Everything is bounded here: KV memory is prefill_ranks × blocks_per_rank blocks, decode memory is decode_ranks ×
    sequences_per_decode_rank contexts of context_tokens_max tokens (committed when they are first used).

    ValueError names the field and its limits.
    """

    model_dir: Path
    prefill_ranks: int = 8
    decode_ranks: int = 1
    """0 for a node that only prefills."""
    block_tokens: int = 64
    blocks_per_rank: int = 128
    context_tokens_max: int = 8192
    """Prompt and new tokens of one request together; the model's own limit applies as well."""
    sequences_per_decode_rank: int = 8
    """Hand-offs beyond this wait until a sequence ends."""
    switch_timeout_s: float = 0.8
    """Ranks that are not all ready for a switch by then go back to the epoch they serve. The controller allows a switch 2 s,
    and the agent waits for a step boundary first."""
    hung_s: float = 3.0
    """Ranks that owe an answer and all this time neither run, nor wait for a processor or a disk, are hung: no guess of what
    a step should take is in it, so it is the same on every machine. One that was stopped by a signal is hung whatever the
    others do; at the start, where they may sleep until it comes, it alone is."""
    step_timeout_s: float = 600.0
    """A prefill rank that is busy with one answer for this long counts as hung. A last resort: the agent, who knows what a
    step should take, loses patience earlier; a prompt of the whole context takes minutes where ranks share few cores."""
    token_timeout_s: float = 30.0
    """The same for a decode rank, which owes a token every few milliseconds."""
    start_timeout_s: float = 120.0
    """A start in which no rank gets on for this long has failed. How long a whole start may take is nobody's to say: reading
    the weights of a large model takes minutes."""
    copy_bytes_per_s: float = 4e9
    """What copies from other workers may take of memory and links, all of them together; the steps that run beside them read
    several times as much."""
    collective_byte_cost: float = 100.0
    """What a byte in a collective costs, in bytes read from another rank's pool: decides whether keys or queries move
    (see `movement`). 0 always moves queries where that is possible. With gloo and pools in shared memory both took about the
    same at 85 bytes to 1 (`bench.prefill`: a ratio of 0.96, within its noise). Where both take the same links it has not been
    measured."""
    gpus: int = 0
    """How many GPUs the ranks share, rank k on k mod this many; 0 for the CPU (`devices.gpus_for` tells which)."""
    copy_checksums: bool = False
    """Whether lent blocks come with a checksum: it finds what a link has changed, and costs a pass over every block on both
    sides. Generations are compared in any case."""

    def __post_init__(self) -> None:
        limits = {
            "prefill_ranks": (1, RANKS_MAX),
            "decode_ranks": (0, RANKS_MAX),
            "block_tokens": (BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX),
            "blocks_per_rank": (1, 1 << 24),
            "context_tokens_max": (2, 1 << 20),
            "sequences_per_decode_rank": (1, 1024),
            "switch_timeout_s": (0.01, 60),
            "hung_s": (0.2, 3600),
            "step_timeout_s": (0.1, 3600),
            "token_timeout_s": (0.1, 3600),
            "start_timeout_s": (1, 3600),
            "copy_bytes_per_s": (1e4, 1e13),
            "collective_byte_cost": (0, 1e6),
            "gpus": (0, GPUS_MAX),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: {value} is outside [{low}, {high}]")


def rank_environment() -> dict[str, str]:
    """The parent's environment, with one thread per rank (ranks are the parallelism), and gloo and NCCL's first meeting on the
    loopback interface (a node's ranks share a machine, and its host name may resolve to an address that is not its own). NIXL
    is to say what fails and not how it starts, and UCX to leave signals alone: a rank that crashes is to end at once."""
    ours = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {"NIXL_LOG_LEVEL": "ERROR", "UCX_ERROR_SIGNALS": "", **os.environ, **ours}
