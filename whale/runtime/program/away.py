"""What a stage keeps for its backward pass, in the memory of the host until that comes.

    forward     op keeps x   -->  a copy of x's memory on the host, one for all that keep it; the device lets go of x as if nobody kept it
    backward    an op asks   -->  the memory is back on the device, until the last that keeps it has asked

Copies stand in the device's own order of work, so nobody waits for them but who reads them. What is there anyway (parameters, buffers, what
was received, the batch) stays where it is.
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
    """A tensor's memory, on the host.

    Args:
        value: a tensor in it.
        watch: told when its copy is made.
    """

    def __init__(self, value: Tensor, watch: Watch) -> None:
        memory = value.untyped_storage()
        self._memory, self._version = weakref.ref(memory), value._version  # an address is given out again
        flat = value.detach().as_strided((memory.nbytes() // value.element_size(),), (1,), 0)
        with watch.on_host():
            self._there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        self._there.copy_(flat, non_blocking=flat.is_cuda)
        self._device = value.device
        self._num_waiting = 0
        self._back: Tensor | None = None

    def holds(self, value: Tensor) -> bool:
        """Whether it is the memory of a tensor, as that is now."""
        return value.untyped_storage() is self._memory() and value._version == self._version

    def keep(self) -> None:
        """Counts one more that will ask for it."""
        self._num_waiting += 1

    def back(self) -> Tensor:
        """The memory, on the device; brought for the first that asks, let go after the last."""
        found = self._there.to(self._device, non_blocking=True, copy=True) if self._back is None else self._back
        self._num_waiting -= 1
        self._back = found if self._num_waiting > 0 else None
        return found


@contextmanager
def kept_on_host(there_anyway: Iterable[object], watch: Watch = NOBODY) -> Iterator[None]:
    """What autograd keeps inside of it waits on the host.

    Args:
        there_anyway: tensors whose memory stays where it is.
        watch: told when copies are made.
    """
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
