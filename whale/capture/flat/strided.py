"""`as_strided` in a captured model: it reads memory by places, so its operand is laid out as it was in the capture.

What a tensor's values are does not depend on how it lies in memory; what `as_strided` makes of it does. A tensor that has travelled,
or has been put together from parts, may lie in another way than the one that the model's own code would have made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale.errors import OpFault

STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)


def strided(tensor: Tensor, strides: Sequence[int], sizes: Sequence[int], new_strides: Sequence[int], offset: int) -> Tensor:
    """`as_strided` of a tensor that lies with these strides; of a copy that does, where it lies otherwise.

    Args:
        tensor: of any strides.
        strides: those it had in the capture.
        sizes: of the result.
        new_strides: of the result.
        offset: of the result from the tensor's first element.

    Raises:
        OpFault: it lies otherwise, and memory is read that is none of its elements.
    """
    if tensor.stride() != tuple(strides):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, new_strides, strict=True))
        if last + 1 != tensor.numel() or not 0 <= offset <= reach <= last:
            raise OpFault(
                "as_strided of a captured model reads elements of its tensor only (this one reads what lies between or behind them)"
            )
        tensor = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided(sizes, new_strides, tensor.storage_offset() + offset)
