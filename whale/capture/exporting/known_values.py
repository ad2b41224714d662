"""Values that are known while a model is captured: of tensors made from plain numbers alone, such as a causal mask.

Nothing is computed in a capture, so what a model's code reads of a tensor (`if`, `int()`) is not known. But where neither
an input nor a parameter, a buffer or chance is in it, it is the same in every step, and is computed beside the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 1 << 20
"""Elements of a tensor whose value is kept."""

_READ = torch.ops.aten._local_scalar_dense.default
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class KnownValues(TorchDispatchMode):
    """Around what is captured: answers what is read of tensors that are made from plain numbers; all else passes as it is.

    Args:
        seen: called for every operation.
        read: called with every number that is read of a tensor and is not known, and the tensor.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: Callable[[], None] = lambda: None, read: Callable[[object, Tensor], None] = lambda _, __: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._read = seen, read
        self._values: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._unknown: dict[int, Tensor] = {}  # by memory, which is kept: what is made later lies elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        known = all(map(self.knows, tensors))
        if known and func is _READ:
            with _disable_current_modes():
                return self._values[tensors[0]].item()
        self._seen()
        result = func(*args, **kwargs)
        if func is _READ:
            self._read(result, tensors[0])
        if not known and func._schema.is_mutable:
            self._forget(tensors)
        elif known and not any(isinstance(leaf, _SYMBOLS) for leaf in leaves) and torch.Tag.nondeterministic_seeded not in func.tags:
            self._learn(func, args, kwargs, result)
        return result

    def knows(self, tensor: Tensor) -> bool:
        """Whether what is read of a tensor is known."""
        is_real = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and tensor.numel() <= LARGEST
        if is_real and tensor not in self._values:
            with _disable_current_modes():
                self._values[tensor] = tensor.detach().clone()  # a number's tensor, or one that the code keeps: it stays as it is
        value = self._values.get(tensor)
        return value is not None and _memory(value) not in self._unknown

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        """What shares memory with tensors that something unknown may have been written to."""
        known = [self._values[tensor] for tensor in tensors if tensor in self._values]
        self._unknown |= {_memory(value): value for value in known}

    def _learn(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Computes an op's results on the values; those that are views share memory as the traced tensors do."""
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not found or any(isinstance(tensor.numel(), torch.SymInt) or tensor.numel() > LARGEST for tensor in found):
            return
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(Tensor, self._values.__getitem__, (args, kwargs))
            values = [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for tensor, value in zip(found, values, strict=True):
            self._values[tensor] = value


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
