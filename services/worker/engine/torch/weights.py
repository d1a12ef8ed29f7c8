"""The tensors of a model directory: mapped, read in, and checked one by one as the layers take them."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.checkpoint import weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

CPU = torch.device("cpu")
PAGE_BYTES = 4096
REPORTS = 100
REPORT_BYTES_MAX = 256 << 20
"""A report per percent, and more of them for a large model: a disk of 10 MB/s makes one within half a minute."""

Progress = Callable[[str, int, int], None]
"""Called with the file that is being read, and how many bytes are in of how many."""


class Weights:
    """Read-only views of the mapped files, shared with every other process that maps them.

    Every page is looked at once, so that the disk is waited for here, where progress is reported, and not in the first
    step. The ranks of a node read the same pages at about the same time: the disk is read once.

    With a GPU each rank has a copy of all weights in its memory, and the mapped pages are only passed through: R ranks that
    share a GPU take R times the model there.
    """

    def __init__(self, model_dir: Path, dtype: str, progress: Progress, device: torch.device = CPU) -> None:
        """EngineError if files are missing or broken."""
        self._dtype, self.device = dtype, device
        self._tensors: dict[str, Tensor] = {}
        files = weight_files(model_dir)
        total_bytes = sum(path.stat().st_size for path in files)
        read_bytes, reported_bytes = 0, 0
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_tensor(name)
                    _read_in(tensor)
                    self._tensors[name] = tensor.to(device)
                    read_bytes += tensor.nbytes
                    if read_bytes - reported_bytes >= min(total_bytes // REPORTS, REPORT_BYTES_MAX):
                        progress(path.name, read_bytes, total_bytes)
                        reported_bytes = read_bytes

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`.weight. EngineError if it is missing, or not of this shape and the model's dtype."""
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != DTYPES[self._dtype]:
            found = "is missing" if tensor is None else f"is {tensor.dtype} {tuple(tensor.shape)}"
            raise EngineError(f"weights: {name}.weight {found}; config.json asks for {self._dtype} {shape}")
        return tensor


def _read_in(tensor: Tensor) -> None:
    """One byte of each page brings the whole page."""
    if tensor.numel():
        tensor.flatten().view(torch.uint8)[::PAGE_BYTES].max()
