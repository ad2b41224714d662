"""A stand-in for a GPU: tensors that say they lie on a device, hold CPU tensors, and have every op on them looked at.

    with StandIn() as device:          # all that runs inside is looked at, the ops of backward as well
        x = put(x)
        ...
        device.forget()
        step()
        assert device.waits == []

Numbers are those of the CPU. An op that mixes host and device fails, where a GPU would fail or fetch the host's tensor and
wait; what a GPU's host would wait for is noted with its place. It stands under the name of torch's device without data,
whose backward runs in the caller's thread, where the ops are seen. It knows nothing of streams.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("meta")
_HOST = torch.device("cpu")
_COPY, _COPY_INTO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
_BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class OnDevice(Tensor):
    """A tensor of the device.

    Attributes:
        held: its numbers, on the CPU.
    """

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    @property
    def data(self) -> Tensor:
        """As torch's; who writes it gives the tensor the other's memory."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: OnDevice) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the stand-in device, and nobody looks: use it inside `with StandIn()`")


class StandIn(TorchDispatchMode):
    """Looks at every op while it is entered.

    Attributes:
        waits: what the host of a GPU would have waited for, each with its place.
        arrivals: the host memory (addresses of storages) from which tensors were copied to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.arrivals: set[int] = set()

    def forget(self) -> None:
        """Forgets what has been noted."""
        self.waits.clear()
        self.arrivals.clear()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_ours = [isinstance(tensor, OnDevice) for tensor in tensors]
        is_copy = func in (_COPY, _COPY_INTO)
        device = kwargs.get("device") or (DEVICE if any(is_ours[:1] if is_copy else is_ours) else _HOST)
        if is_copy:
            self._note_copy(func, tensors[-1], device, kwargs.get("non_blocking", args[2:] == (True,)))
        else:
            _check_devices(func, tensors)
            if any(is_ours) and _depends_on_values(func, args):
                self._note(f"{func} reads the device")
        held_args, held_kwargs = pytree.tree_map(_held, (args, kwargs))
        result = func(*held_args, **held_kwargs)
        if device == DEVICE:
            result = pytree.tree_map_only(Tensor, OnDevice, result)
            return return_and_correct_aliasing(func, args, kwargs, result)
        return args[0] if func is _COPY_INTO else result

    def _note_copy(self, func: OpOverload, source: Tensor, device: torch.device, is_asynchronous: bool) -> None:
        if isinstance(source, OnDevice):
            if device != DEVICE and not is_asynchronous:
                self._note(f"{func} to the host")
        elif device == DEVICE:
            self.arrivals.add(source.untyped_storage().data_ptr())
            if not is_asynchronous:
                self._note(f"{func} from the host, waited for")

    def _note(self, what: str) -> None:
        """Notes a wait, with the innermost place outside of torch."""
        torch_home = str(Path(torch.__file__).parent)
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((torch_home, __file__))]
        self.waits.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}")


def put(value: Tensor) -> Tensor:
    """A copy of a tensor of the host, on the device."""
    return OnDevice(value.detach().clone())


def held(value: Tensor) -> Tensor:
    """The numbers of a tensor of the device."""
    assert isinstance(value, OnDevice), f"on the {value.device.type}, not on the stand-in device"
    return value.held


def _held(leaf: Any) -> Any:
    if isinstance(leaf, OnDevice):
        return leaf.held
    return _HOST if isinstance(leaf, torch.device) else leaf


def _check_devices(func: OpOverload, tensors: list[Tensor]) -> None:
    """Fails where an op mixes devices; a number of the host's (0-dim) may stand in arithmetic, which takes it as an argument."""
    others = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
    if any(tensor.device == DEVICE for tensor in others):
        raise RuntimeError(f"{func} takes a tensor that was made on the device of the host's numbers")
    if len(others) in (0, len(tensors)):
        return
    if torch.Tag.pointwise not in func.tags or any(tensor.dim() > 0 for tensor in others):
        raise RuntimeError(f"{func} mixes devices: some of its tensors are the host's, of shapes {[tuple(t.shape) for t in others]}")


def _depends_on_values(func: OpOverload, args: Any) -> bool:
    """Whether the host has to know values: they decide what it gets, or how many elements there are."""
    if func in _BY_MASK:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
