"""Copies between a device and its host, concurrent with the device's other work.

    device   | backward of layers 2, 1 ...      |        | forward of layer 0 | of layer 1 ...
    copies        | gradients of layer 2 | of 1 |        | weights of layer 1 |

On a GPU they run in a stream of their own, with pinned memory, after all work enqueued before. Readers of a copy wait for its mark: the
device by `arrive`, the host by `finish`. On other devices a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Mark = torch.cuda.Event | None
"""The copies started up to some point; None if they are done."""
NUM_STEPS_AHEAD = 2
"""Steps that a GPU may lag behind the host: what a step computes is read so many steps later."""


class HostCopies:
    """The copies of a rank, for its device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_used = device, False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Runs what is started inside in the copy stream, after all work enqueued before."""
        if self._stream is None:
            yield
            return
        self._is_used = True
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        return None if self._stream is None else self._stream.record_event()

    def arrive(self, mark: Mark) -> None:
        """Makes the device's current stream wait for a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def keep_for_copies(self, tensor: Tensor) -> None:
        """Keeps a device tensor's memory until the copies started here are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def keep_for_device(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor made here until the device's current stream is done with it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        """Waits, on the host and on the device, for all copies: results may be read, and sources written."""
        if self._stream is not None and self._is_used:
            self._is_used = False
            self._stream.synchronize()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def on_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a tensor on the host, complete after `finish`."""
        if tensor.device.type == "cpu":
            return tensor.to(dtype)
        made = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)
        with self.stream():
            made.copy_(tensor, non_blocking=True)
        self.keep_for_copies(tensor)
        return made


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor, pinned if a GPU copies from it."""
    is_read_by_gpu = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_read_by_gpu and not tensor.is_pinned() else tensor


@dataclass(frozen=True)
class LateNumber:
    """A number in flight from a GPU to the host, or arrived."""

    _value: Tensor
    _arrived: torch.cuda.Event | None = None

    @staticmethod
    def of(number: Tensor) -> LateNumber:
        """Starts an asynchronous copy of a 0-dim tensor."""
        if number.device.type == "cpu":
            return LateNumber(number)
        is_cuda = number.device.type == "cuda"
        value = torch.empty((), dtype=number.dtype, pin_memory=is_cuda)
        value.copy_(number, non_blocking=True)
        if not is_cuda:
            return LateNumber(value)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return LateNumber(value, arrived)

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """The number; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast(float, self._value.tolist())
