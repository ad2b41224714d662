"""Random numbers inside a split group: the same where a tensor is whole, others at each position where it is cut.

All devices of a group enter a stage with the same generator state. An op on whole tensors draws from it as it is. An op
on parts draws from a state made of (that state, position); afterwards the generator goes on from a state that is equal
on all devices again:

    generator  --s-->  dropout(whole)  --s'-->  dropout(part): seed = hash(s', position)  --hash(s', next)-->  ...
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor


def drawn_apart(position: int, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a random op with numbers of this position's own, and leaves the generator as on the group's other devices."""
    device = next(value.device for value in args if isinstance(value, Tensor))
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    state = _contents(generator.get_state())
    generator.manual_seed(_seed(state, position))
    try:
        return target(*args, **kwargs)
    finally:
        generator.manual_seed(_seed(state, -1))


def _contents(state: Tensor) -> bytes:
    """The bytes of a generator's state, read where they lie: it has contents where other tensors may have none (`whale.dry_run`)."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _seed(state: bytes, number: int) -> int:
    digest = hashlib.blake2b(state + number.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
