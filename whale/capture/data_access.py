"""`Tensor.data` in the graph: the detached tensor that it is; without this, what is written to it would vanish."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whale.capture.source import user_line
from whale.errors import CaptureError


class DataAccess(TorchFunctionMode):
    """Reads `tensor.data` as ``tensor.detach()``, and refuses to set it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError(
                "a captured model puts no other tensor in the place of one (.data = ... does)",
                where=user_line(),
                hint="use the new tensor in its place; what a buffer holds is written by buffer.copy_(value)",
            )
        return func(*args, **(kwargs or {}))
