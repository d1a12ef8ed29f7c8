"""Where a rank computes, and what its group speaks there: the only place that decides it. The deciding is torch-free.

A rank has one device for its weights, tables, contexts and its own KV pool. With G GPUs rank k has GPU k mod G, so ranks may
share one: each of them has weights, pool and CUDA context of its own, and nothing but the GPU's time is shared.

CUDA cannot be used in a process that was forked after CUDA had begun. So neither the agent nor the zygote ever asks it
anything: GPUs are counted in a process of its own, which ends, and a rank begins with CUDA after it was forked.
"""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from services.worker.engine.protocol import EngineError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DeviceKind = Literal["cpu", "cuda"]

GPUS_MAX = 64
COUNT_LIMIT_S = 120.0
DRIVER = Path("/dev/nvidiactl")
"""There where NVIDIA's driver is loaded, and in a container that was given a GPU."""


def gpus_for(wanted: DeviceKind | None, visible: int) -> int:
    """How many GPUs the ranks share; 0 is the CPU, which is what nobody's wish means where there is none.

    EngineError if `device` asks for a GPU and none is visible.
    """
    if wanted == "cuda" and not visible:
        raise EngineError(
            "device: cuda was asked for, but torch sees no GPU here (driver, CUDA build of torch, CUDA_VISIBLE_DEVICES)"
        )
    return 0 if wanted == "cpu" else min(visible, GPUS_MAX)


def device_of(rank: int, gpus: int) -> str:
    """As torch names it."""
    return f"cuda:{rank % gpus}" if gpus else "cpu"


def backend_of(prefill_ranks: int, gpus: int) -> Literal["gloo", "nccl"]:
    """NCCL refuses two ranks on one GPU ("Duplicate GPU detected"). Ranks that share one exchange through host memory."""
    return "nccl" if gpus >= prefill_ranks else "gloo"


def visible_gpus() -> int:
    """How many GPUs torch can use. Takes as long as loading torch where there is a driver, and no time where there is none.

    EngineError if it cannot be found out.
    """
    if not DRIVER.exists():
        return 0
    count = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        found = subprocess.run(  # noqa: S603 - our own interpreter and line
            [sys.executable, "-c", count], capture_output=True, text=True, check=True, timeout=COUNT_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"device: the GPUs could not be counted ({error}); device=cpu does without") from error
    return int(found.stdout)


def upload(host: "Tensor", device: "torch.device") -> "Tensor":
    """To a GPU through pinned memory, so that nobody waits for the copy: what is computed with it afterwards comes after it."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
