"""How many bytes of tensors are there: memory counted storage by storage, op by op, as an allocator would give it out."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512
"""What the allocator of a GPU gives out is a multiple of this."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that come into being while it is on, in this thread; not those on the meta device.

    A storage counts from the op that makes it until nobody has it any more. What an op needs while it runs is not seen.

    Args:
        block_bytes: every storage takes a multiple of this.

    Attributes:
        live: bytes of those that are still there.
        peak: the most that were there at once.
        action: what is being done, as whoever knows it says.
        peak_action, peak_op: that action, and the operator that had made its result, when the most were there.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.action = self.peak_action = self.peak_op = ""
        self._block_bytes = block_bytes
        self._known: set[int] = set()

    def start_anew(self) -> int:
        """Forgets the peak; what is there stays counted, and is returned."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, 0)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, 0 if tensor.is_meta else tensor.untyped_storage().nbytes())
        if self.live > self.peak:
            self.peak, self.peak_action, self.peak_op = self.live, self.action, str(func)
        return result

    def _meet(self, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known:
            return
        taken = -(-num_bytes // self._block_bytes) * self._block_bytes
        self._known.add(number)
        self.live += taken
        weakref.finalize(storage, self._forget, number, taken)

    def _forget(self, number: int, num_bytes: int) -> None:
        self._known.discard(number)
        self.live -= num_bytes


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
