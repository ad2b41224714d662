"""A copy of a module tree without data: the user's modules, shallowly copied, with meta tensors.

Initialisers run on it, with one real tensor inserted at a time, so that the user's model is never modified and other tensors
take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Slot:
    """A place of the shadow that holds a tensor."""

    name: str  # dotted name, the first if a shared module has several
    module: nn.Module  # of the shadow
    key: str  # the tensor's name in its module
    is_parameter: bool  # else a buffer
    original: Tensor
    blank: Tensor  # the meta tensor that is there while no data is inserted

    def get(self) -> Tensor | None:
        return self._places.get(self.key)

    def put(self, data: Tensor) -> None:
        self._places[self.key] = nn.Parameter(data, requires_grad=self.original.requires_grad) if self.is_parameter else data

    def clear(self) -> None:
        """Restores the meta tensor."""
        self._places[self.key] = self.blank

    @property
    def _places(self) -> dict[str, Tensor | None]:
        return self.module._parameters if self.is_parameter else self.module._buffers  # type: ignore[return-value]

    def __str__(self) -> str:
        kind = "parameter" if self.is_parameter else "buffer"
        shape = ", ".join(str(size) for size in self.original.shape)
        return f"{self.name} ({kind} {str(self.original.dtype).removeprefix('torch.')}[{shape}] of {type(self.module).__name__})"


@dataclass(frozen=True)
class Shadow:
    """The copied tree."""

    root: nn.Module  # the shadow of the model
    slots: tuple[Slot, ...]  # every place once, in ``state_dict`` order
    by_name: dict[str, Slot]  # by every name, including those of shared modules

    def ties(self, slot: Slot) -> tuple[Slot, ...]:
        """All places of a place's tensor, itself included, in ``state_dict`` order."""
        return tuple(other for other in self.slots if other.original is slot.original)


def make_shadow(model: nn.Module) -> Shadow:
    """Copies the module tree; shared modules stay shared, tied tensors have a place in each of their modules."""
    copies: dict[int, nn.Module] = {}
    originals: dict[int, nn.Module] = {}
    root = _copy(model, copies, originals)
    slots: dict[tuple[int, str], Slot] = {}
    by_name: dict[str, Slot] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, original, is_parameter in _tensors(originals[id(module)]):
            name = f"{prefix}.{key}" if prefix else key
            place = id(module), key
            if place not in slots:
                slots[place] = Slot(name, module, key, is_parameter, original, _blank(original, is_parameter))
                slots[place].clear()
            by_name[name] = slots[place]
    return Shadow(root, tuple(slots.values()), by_name)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names, in ``state_dict`` order, including non-persistent buffers."""
    return {
        f"{prefix}.{key}" if prefix else key: tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, tensor, _ in _tensors(module)
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter, True
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield key, buffer, False


def _copy(module: nn.Module, copies: dict[int, nn.Module], originals: dict[int, nn.Module]) -> nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    # Not copy.copy: modules may forbid it (parametrized ones do), and __setattr__ would register what is set.
    shadow: nn.Module = object.__new__(type(module))
    shadow.__dict__.update(module.__dict__)
    copies[id(module)], originals[id(shadow)] = shadow, module
    children = {name: None if child is None else _copy(child, copies, originals) for name, child in module._modules.items()}
    shadow.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers), _modules=children)
    return shadow


def _blank(original: Tensor, is_parameter: bool) -> Tensor:
    blank = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device="meta")
    return nn.Parameter(blank, requires_grad=original.requires_grad) if is_parameter else blank
