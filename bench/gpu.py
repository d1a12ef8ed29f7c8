"""The first run on GPUs, in one go: `python -m bench.gpu MODEL_DIR [--out FOLDER]`.

Everything that was written for GPUs and could be tried without one only in part (docs/operations.md, "GPUs"), in the order in
which a failure explains the ones after it: the kernels and the engine's contract, the CPU's tokens, then speed, switches,
companions and KV on the move. Each goes on when one before it has failed; what it said is kept in FOLDER. Ends with the
number of failures.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from services.worker.engine.torch.devices import visible_gpus

LIMIT_S = 1_800.0
TESTS = "tests/services/worker/engine/torch"


class Check(NamedTuple):
    """One process. `module` is run with the model's directory if it asks for one."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    model: bool = True


CHECKS = (
    Check("contract", "pytest", (f"{TESTS}/test_cuda.py", "-v", "-rs"), model=False),
    Check("shapes", "pytest", (f"{TESTS}/test_devices.py", "-q"), model=False),
    Check("prefill", "bench.prefill"),
    Check("switching", "bench.switching"),
    Check("companions", "bench.torch_engine"),
    Check("kv", "bench.kv_movement"),
)


def run(check: Check, model_dir: Path, folder: Path) -> int:
    """The process's exit status; 124 if it took longer than `LIMIT_S`."""
    command = [sys.executable, "-m", check.module, *check.arguments, *([str(model_dir)] if check.model else [])]
    began_s = time.monotonic()
    with (folder / f"{check.name}.log").open("wb") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = 124
    verdict = "ok" if status == 0 else f"failed ({status})"
    sys.stdout.write(f"{check.name:<12}{verdict:<14}{time.monotonic() - began_s:7.0f} s  {folder / check.name}.log\n")
    sys.stdout.flush()
    return status


def main(model_dir: Path, folder: Path) -> int:
    gpus = visible_gpus()
    if not gpus:
        sys.stderr.write("torch sees no GPU here (driver, CUDA build of torch, CUDA_VISIBLE_DEVICES)\n")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{gpus} GPUs\n")
    return sum(run(check, model_dir, folder) != 0 for check in CHECKS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.gpu")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu-run"))
    given = parser.parse_args()
    sys.exit(main(given.model_dir, given.out))
