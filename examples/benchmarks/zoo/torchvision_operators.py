"""torchvision's wheel is compiled for CUDA; beside a CPU build of torch its operators do not load, and then nothing of it imports.

No model here that trains needs them. So where they are missing, the two that its import asks for are declared, without a kernel.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing() -> None:
    """Makes `import torchvision` work; does nothing where its compiled operators load, or where there is no torchvision."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _loads(folder: Path) -> bool:
    try:
        for file in folder.glob("_C*.so"):
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return True
