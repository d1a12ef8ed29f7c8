"""The tensors of a model directory, mapped and checked one by one as the layers take them."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.model_config import weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Weights:
    """Read-only views of the mapped files, shared with every other process that maps them."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        """EngineError if there is no file."""
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        for path in weight_files(model_dir):
            with safe_open(path, framework="pt") as file:
                self._tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`.weight. EngineError if it is missing, or not of this shape and the model's dtype."""
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != DTYPES[self._dtype]:
            found = "is missing" if tensor is None else f"is {tensor.dtype} {tuple(tensor.shape)}"
            raise EngineError(f"weights: {name}.weight {found}; config.json asks for {self._dtype} {shape}")
        return tensor
