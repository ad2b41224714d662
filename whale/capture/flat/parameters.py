"""The model's parameters and buffers with their ties: one tensor under several names is one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from torch import Tensor, nn

from whale.capture.flat.sizes import dtype_name
from whale.errors import CaptureError
from whale.ir.graph import Parameter, TensorSpec


@dataclass(frozen=True)
class Holdings:
    """What a model holds.

    Attributes:
        parameters: every parameter and buffer, in the order of their first names in ``state_dict``.
        tensors: the user's tensors by canonical name.
        canonical: canonical name of every name.
    """

    parameters: tuple[Parameter, ...]
    tensors: dict[str, Tensor]
    canonical: dict[str, str]


def holdings(model: nn.Module) -> Holdings:
    """Finds a model's parameters and buffers; ties by object identity."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Literal["parameter", "buffer"]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = [(name, tensor, "parameter") for name, tensor in module._parameters.items()]
        held += [(name, tensor, "buffer") for name, tensor in module._buffers.items()]
        for name, tensor, kind in held:
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            names.setdefault(id(tensor), []).append(full)
            tensors[full] = tensor
            kinds[full] = "parameter" if kind == "parameter" else "buffer"
    found = [_describe(same, tensors[same[0]], kinds[same[0]]) for same in names.values()]
    canonical = {name: same[0] for same in names.values() for name in same}
    return Holdings(tuple(found), {parameter.name: tensors[parameter.name] for parameter in found}, canonical)


def check_memory(held: Holdings) -> None:
    """Checks that tensors share memory as one parameter or not at all: a rank holds each in a place of its own.

    Raises:
        CaptureError: a parameter that is trained shares its memory with another parameter or a buffer.
    """
    by_storage: dict[int, list[Parameter]] = {}
    for parameter in held.parameters:
        by_storage.setdefault(_extent(held.tensors[parameter.name])[0], []).append(parameter)
    for parameters in by_storage.values():
        for one, other in combinations(parameters, 2):
            if (one.trainable or other.trainable) and _share_memory(held.tensors[one.name], held.tensors[other.name]):
                raise CaptureError(
                    f"parameters and buffers have memory of their own, or are one ({one.name} and {other.name} share memory)",
                    hint=f"assign the parameter itself ({other.name} = {one.name}), which ties them, or clone() one of them",
                )


def lender(held: Holdings, tensor: Tensor) -> str | None:
    """The trained parameter whose memory a tensor shares; None where it has its own."""
    return next((each.name for each in held.parameters if each.trainable and _share_memory(held.tensors[each.name], tensor)), None)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes between the first and last element of two tensors overlap."""
    (storage, start, stop), (other_storage, other_start, other_stop) = _extent(one), _extent(other)
    return storage == other_storage and start < other_stop and other_start < stop


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """The storage, which meta tensors have too, and the bytes in it."""
    if tensor.numel() == 0:
        return 0, 0, 0
    size, last = tensor.element_size(), sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return tensor.untyped_storage()._cdata, int(first * size), int((first + last + 1) * size)


def _describe(names: list[str], tensor: Tensor, kind: Literal["parameter", "buffer"]) -> Parameter:
    spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), (0,) * tensor.dim())
    trainable = kind == "parameter" and tensor.requires_grad
    return Parameter(names[0], spec, kind, trainable, tuple(names[1:]))
