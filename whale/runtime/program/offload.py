"""Saved tensors whose storage is restored in the backward pass, and offload of activations to the host by them.

    forward     op saves x   -->  one host copy of x's storage for all that save it; the device frees x as if nobody saved it
    backward    op reads x   -->  the storage is copied back to the device, until the last that saved it has read it

Copies run in the device's stream order, so only their readers wait. Tensors that stay on the device anyway (parameters, buffers,
received tensors, the batch) are not copied.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from whale.runtime.program.watch import NOBODY, Watch


class SavedStorage(ABC):
    """The storage of a tensor that ops save for backward: restored for the first reader, freed after the last."""

    def __init__(self, value: Tensor) -> None:
        self._storage = weakref.ref(value.untyped_storage())  # addresses are reused, and are 0 for all fake tensors
        self._num_readers = 0
        self._restored: Tensor | None = None

    @abstractmethod
    def restore(self) -> Tensor:
        """A tensor with the elements of the storage, in order."""

    def holds(self, value: Tensor) -> bool:
        """Whether it is the storage of a tensor."""
        return value.untyped_storage() is self._storage()

    def save(self, value: Tensor) -> SavedView:
        """What autograd saves of a tensor with this storage."""
        self._num_readers += 1
        return self, value.shape, value.stride(), int(value.storage_offset())

    def read(self) -> Tensor:
        found = self.restore() if self._restored is None else self._restored
        self._num_readers -= 1
        self._restored = found if self._num_readers > 0 else None
        return found


SavedView = tuple[SavedStorage, torch.Size, tuple[int, ...], int]
"""(storage, shape, stride, offset)."""


def unpack(saved: Tensor | SavedView) -> Tensor:
    """The saved tensor, for `torch.autograd.graph.saved_tensors_hooks`."""
    if isinstance(saved, Tensor):
        return saved
    storage, shape, stride, offset = saved
    return storage.read().as_strided(shape, stride, offset)


class OffloadedStorage(SavedStorage):
    """The storage of a tensor in its current version, on the host."""

    def __init__(self, value: Tensor, watch: Watch) -> None:
        super().__init__(value)
        self._version, self._device = value._version, value.device
        flat = value.detach().as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
        with watch.on_host():
            self._on_host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        self._on_host.copy_(flat, non_blocking=flat.is_cuda)

    def holds(self, value: Tensor) -> bool:
        return super().holds(value) and value._version == self._version

    def restore(self) -> Tensor:
        return self._on_host.to(self._device, non_blocking=True, copy=True)


@contextmanager
def offload_saved(on_device: Iterable[object], watch: Watch = NOBODY) -> Iterator[None]:
    """Offloads tensors that autograd saves inside, except those with the storage of one in `on_device`."""
    held = {value.untyped_storage()._cdata for value in on_device if isinstance(value, Tensor)}
    known: dict[tuple[int, torch.dtype, bool, bool], OffloadedStorage] = {}

    def pack(value: Tensor) -> Tensor | SavedView:
        address = value.untyped_storage()._cdata
        if address in held or not value.numel():
            return value
        key = address, value.dtype, value.is_conj(), value.is_neg()
        storage = known.get(key)
        if storage is None or not storage.holds(value):
            storage = known[key] = OffloadedStorage(value, watch)
        return storage.save(value)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
