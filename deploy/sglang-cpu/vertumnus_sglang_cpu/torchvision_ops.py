"""torchvision's wheel is built for CUDA torch and does not load its operators beside a CPU torch, but describes two of them.

A `.pth` file of the environment imports this, so it must stay light: the operators are declared when somebody imports
torchvision.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _Declares(MetaPathFinder):
    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """Finds nothing; comes before those that do."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declares())
