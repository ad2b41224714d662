"""What reaches behind a tensor in the code that is captured: `.data` is the detached tensor that it is; what a graph loses is refused.

Without this, what is written to `.data` would vanish, numpy would be given memory without values, gradients that the code computes
itself would be made of tensors that the graph has not, and what `torch.vmap` wraps would lie in it for one sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from whale.capture.source import user_line
from whale.errors import CaptureError

_LEAVING = (torch.Tensor.numpy, torch.Tensor.__array__)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class DataAccess(TorchFunctionMode):
    """Reads `tensor.data` as ``tensor.detach()``, and refuses to set it; refuses what takes values out of torch, and what export loses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError(
                "a captured model puts no other tensor in the place of one (.data = ... does)",
                where=user_line(),
                hint="use the new tensor in its place; what a buffer holds is written by buffer.copy_(value)",
            )
        if func in _GRADIENTS:
            raise CaptureError(
                "a captured model computes no gradients itself (torch.autograd.grad, backward)",
                where=user_line(),
                hint="write the gradient out as tensor operations, or as an autograd.Function",
            )
        if func is torch._C._set_grad_enabled and not args[0] and torch.is_grad_enabled() and _casts():
            raise CaptureError(  # torch.export forgets it
                "a captured model has no no_grad() inside of torch.autocast",
                where=user_line(),
                hint="write the autocast inside of the no_grad(), or detach() what is read there",
            )
        if any(map(_is_transformed, args)):
            raise CaptureError(
                "a captured model calls no transforms of torch.func (vmap, grad, jvp)",
                where=user_line(),
                hint="write the operations for all samples at once: matmul, bmm and einsum take dimensions of the batch",
            )
        if func in _LEAVING and isinstance(args[0], FakeTensor):
            raise CaptureError(
                "a captured model computes with torch alone (here numpy is given a tensor's values)",
                where=user_line(),
                hint="compute it with torch, or before the step, in the data set",
            )
        if func == torch._pack_padded_sequence:
            raise CaptureError(
                "a captured model's control flow and sizes do not depend on values in tensors (those of packed sequences do)",
                where=user_line(),
                hint="run the layer on the padded batch and read each row's last place: output[torch.arange(len(lengths)), lengths - 1]",
            )
        return func(*args, **(kwargs or {}))


def _casts() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _is_transformed(value: object) -> bool:
    """Whether a tensor is one of those that `torch.func` puts in the place of another inside a transform."""
    return isinstance(value, torch.Tensor) and (is_batchedtensor(value) or is_gradtrackingtensor(value))
