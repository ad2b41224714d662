"""The model's parameters and buffers with their ties: one tensor under several names is one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from whale.capture.flat.sizes import dtype_name
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


def _describe(names: list[str], tensor: Tensor, kind: Literal["parameter", "buffer"]) -> Parameter:
    spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), (0,) * tensor.dim())
    trainable = kind == "parameter" and tensor.requires_grad
    return Parameter(names[0], spec, kind, trainable, tuple(names[1:]))
