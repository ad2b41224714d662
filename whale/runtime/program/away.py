"""Offload of activations: what a stage saves for its backward pass waits in host memory.

    forward     op saves x   -->  one host copy of x's storage for all that save it; the device frees x as if nobody saved it
    backward    op reads x   -->  the storage is copied back to the device, until the last that saved it has read it

Copies run in the device's stream order, so only their readers wait. Tensors that stay on the device anyway (parameters, buffers,
received tensors, the batch) are not copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from whale.runtime.program.watch import NOBODY, Watch

_Key = tuple[int, torch.dtype, bool, bool]


class Away:
    """The storage of a tensor, on the host."""

    def __init__(self, value: Tensor, watch: Watch) -> None:
        memory = value.untyped_storage()
        self._memory, self._version = weakref.ref(memory), value._version  # addresses are reused
        flat = value.detach().as_strided((memory.nbytes() // value.element_size(),), (1,), 0)
        with watch.on_host():
            self._there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        self._there.copy_(flat, non_blocking=flat.is_cuda)
        self._device = value.device
        self._num_waiting = 0
        self._back: Tensor | None = None

    def holds(self, value: Tensor) -> bool:
        """Whether it is the storage of a tensor in its current version."""
        return value.untyped_storage() is self._memory() and value._version == self._version

    def keep(self) -> None:
        """Counts one more reader."""
        self._num_waiting += 1

    def back(self) -> Tensor:
        """The storage on the device; copied for the first reader, freed after the last."""
        found = self._there.to(self._device, non_blocking=True, copy=True) if self._back is None else self._back
        self._num_waiting -= 1
        self._back = found if self._num_waiting > 0 else None
        return found


@contextmanager
def kept_on_host(there_anyway: Iterable[object], watch: Watch = NOBODY) -> Iterator[None]:
    """Keeps tensors that autograd saves inside on the host, except those whose storage is in `there_anyway`."""
    held = {value.untyped_storage()._cdata for value in there_anyway if isinstance(value, Tensor)}
    known: dict[_Key, Away] = {}

    def pack(value: Tensor) -> Tensor | tuple[Away, torch.Size, tuple[int, ...], int]:
        address = value.untyped_storage()._cdata
        if address in held or not value.numel():
            return value
        key = address, value.dtype, value.is_conj(), value.is_neg()
        away = known.get(key)
        if away is None or not away.holds(value):
            away = known[key] = Away(value, watch)
        away.keep()
        return away, value.shape, value.stride(), int(value.storage_offset())

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(kept: Tensor | tuple[Away, torch.Size, tuple[int, ...], int]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    away, shape, stride, offset = kept
    return away.back().as_strided(shape, stride, offset)
