"""How many bytes of tensors code makes, counted op by op: exact, and the same on every machine."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that come into being while it is on, in this thread; not those on the meta device.

    Attributes:
        live: bytes of those that are still there.
        peak: the most that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, 0)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, 0 if tensor.is_meta else tensor.untyped_storage().nbytes())
        return result

    def _meet(self, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known:
            return
        self._known.add(number)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, number, num_bytes)

    def _forget(self, number: int, num_bytes: int) -> None:
        self._known.discard(number)
        self.live -= num_bytes


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
