"""Which code fills which tensor: finds the initialisers of a model by running them on meta tensors.

An initialiser is one call for one module: the user's ``initialize(module)``, the nearest enclosing model's
``_init_weights(module)``, or the module's own ``reset_parameters()``. It may also write tensors of children (a feed-forward
block rescales its last projection), so a tensor can have several writers; they run from the innermost module outwards, as in
``nn.Module.apply``. They run on a shadow: the module tree, shallowly copied, with meta tensors. With one real tensor inserted at a
time, the user's model is never modified and other tensors take no memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


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
        for key, original, is_parameter in _own_tensors(originals[id(module)]):
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
        for key, tensor, _ in _own_tensors(module)
    }


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
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


# Methods without arguments that reinitialise a module, by torch's convention.
_RESETS = ("reset_parameters", "_reset_parameters")
_CREATES_LIKE = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones", "new_full"}
)


@dataclass(frozen=True, eq=False)
class Initializer:
    """One call that fills tensors."""

    label: str  # for messages and seeds (``_init_weights(transformer.h.0.mlp)``)
    run: Callable[[], object]  # the call, on the current tensors of the shadow
    written: frozenset[Slot]  # places that it writes
    # per place, the places that must hold data together with it, because values of one flow into another
    groups: Mapping[Slot, tuple[Slot, ...]]
    touched: frozenset[Slot]  # places that it may change

    def group(self, slot: Slot) -> tuple[Slot, ...]:
        """The places to fill together in order to fill one, that one included, in a fixed order."""
        return self.groups.get(slot, (slot,))


def find_initializers(shadow: Shadow, initialize: Callable[[nn.Module], None] | None) -> tuple[tuple[Initializer, ...], ...]:
    """The initialisers of a model by source, the strongest first, each source in order of execution."""
    modules = list(_innermost_first(shadow.root, "", None, set()))
    sources: list[list[tuple[str, nn.Module, Callable[[], object]]]] = [[], [], []]
    for name, module, dispatcher in modules:
        if initialize is not None:
            sources[0].append((f"initialize({name})", module, _bind(initialize, module)))
        if dispatcher is not None:
            sources[1].append((f"_init_weights({name})", module, _bind(dispatcher, module)))
        for reset in _RESETS:
            function = getattr(module, reset, None)
            if callable(function) and _accepts(function, 0):
                sources[2].append((f"{name}.{reset}()" if name else f"{reset}()", module, function))
    trial = _Trial(shadow)
    return tuple(tuple(trial.run(label, module, run) for label, module, run in source) for source in sources)


def _bind(function: Callable[[nn.Module], object], module: nn.Module) -> Callable[[], object]:
    return lambda: function(module)


def _innermost_first(
    module: nn.Module, name: str, dispatcher: Callable[[nn.Module], object] | None, seen: set[int]
) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], object] | None]]:
    """Every module once, children before parents, with the ``_init_weights`` of the nearest enclosing model."""
    seen.add(id(module))
    own = getattr(module, "_init_weights", None)
    if callable(own) and _accepts(own, 1):
        dispatcher = own
    for key, child in module._modules.items():
        if child is not None and id(child) not in seen:
            yield from _innermost_first(child, f"{name}.{key}" if name else key, dispatcher, seen)
    yield name, module, dispatcher


def _accepts(function: Callable[..., object], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*(None,) * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


class _Trial:
    """Runs initialisers on meta tensors, which takes no memory, and notes what each touches."""

    def __init__(self, shadow: Shadow) -> None:
        self.slots: dict[int, list[Slot]] = {}
        for slot in shadow.slots:
            self.slots.setdefault(id(slot.module), []).append(slot)
        self.order = {slot: position for position, slot in enumerate(shadow.slots)}
        self.by_storage = {_storage(slot.blank): slot for slot in shadow.slots}

    def run(self, label: str, module: nn.Module, run: Callable[[], object]) -> Initializer:
        """Runs one, and restores what it replaced."""
        recorder = _Recorder(self.by_storage)
        failed = False
        try:
            with recorder, _HideMeta(), torch.no_grad(), torch.device("cpu"):
                run()
        except Exception:  # any user code; it runs again, with data, if a tensor needs it
            failed = True
        below = [slot for child in module.modules() for slot in self.slots.get(id(child), ())]
        replaced = {slot for slot in below if self._put_back(slot)}
        written = recorder.written | replaced
        flows = recorder.flows
        if failed:  # what it would have done after that is unknown
            written = set(below)
            flows = [*flows, {*self.slots.get(id(module), ()), *recorder.written}]
        return Initializer(label, run, frozenset(written), self._groups(flows), frozenset(written))

    def _groups(self, flows: Sequence[set[Slot]]) -> dict[Slot, tuple[Slot, ...]]:
        groups: list[set[Slot]] = []
        for flow in flows:
            apart = [group for group in groups if not group & flow]
            groups = [*apart, flow.union(*(group for group in groups if group & flow))]
        ordered = [tuple(sorted(group, key=self.order.__getitem__)) for group in groups]
        return {slot: group for group in ordered for slot in group}

    def _put_back(self, slot: Slot) -> bool:
        """Restores a place; returns whether its tensor, or the tensor's data, had been replaced."""
        replaced = slot.get() is not slot.blank
        slot.clear()
        if self.by_storage.get(_storage(slot.blank)) is slot:
            return replaced
        for storage in [key for key, other in self.by_storage.items() if other is slot]:
            del self.by_storage[storage]
        slot.blank.data = torch.empty_strided(slot.original.shape, slot.original.stride(), dtype=slot.original.dtype, device="meta")
        self.by_storage[_storage(slot.blank)] = slot
        return True


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _HideMeta(TorchFunctionMode):
    """Makes code that branches on ``is_meta``, or loops on random values, take the path with data once.

    torch's ``trunc_normal_`` does both: it skips meta tensors, and redraws while some value is outside the bounds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == _IS_META or (func is Tensor.__bool__ and args[0].device.type == "meta"):
            return False
        return func(*args, **(kwargs or {}))


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which places are written, and between which places values flow."""

    def __init__(self, by_storage: dict[int, Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_storage = by_storage
        self.written: set[Slot] = set()
        self.flows: list[set[Slot]] = []
        self._origins: dict[int, set[Slot]] = {}  # per new storage, the places that its values come from
        self._kept: list[Tensor] = []  # so that no storage's address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        origins: set[Slot] = set()
        targets: list[Tensor] = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                targets += _tensors(value)
            elif func.overloadpacket.__name__ not in _CREATES_LIKE:
                origins.update(*map(self._origin, _tensors(value)))
        for target in targets:
            self._write(target, origins)
        result = func(*args, **kwargs)
        if origins:
            for made in _tensors(result):
                self._write(made, origins, is_result=True)
        return result

    def _origin(self, tensor: Tensor) -> set[Slot]:
        storage = _storage(tensor)
        return {self.by_storage[storage]} if storage in self.by_storage else self._origins.get(storage, set())

    def _write(self, tensor: Tensor, origins: set[Slot], is_result: bool = False) -> None:
        storage = _storage(tensor)
        slot = self.by_storage.get(storage)
        if slot is None:
            self._origins.setdefault(storage, set()).update(origins)
            self._kept.append(tensor)
        elif not is_result:  # a result that shares a place's storage is a view of it, or the tensor written
            self.written.add(slot)
            if origins - {slot}:
                self.flows.append({slot, *origins})


def _tensors(value: object) -> list[Tensor]:
    return [item for item in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(item, Tensor)]
