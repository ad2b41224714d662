"""Copies between the memory of a device and that of its host, beside the device's own work.

    device   | backward of layers 2, 1 ...      |        | forward of layer 0 | of layer 1 ...
    copies        | gradients of layer 2 | of 1 |        | weights of layer 1 |

On a GPU they have a stream of their own, from and to pinned memory. A copy starts when all has run that the device was given before; who
reads what it makes waits for its mark, the device by `arrive`, the host by `finish`. Elsewhere a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Mark = torch.cuda.Event | None
"""What has been started up to some point; None where it is done."""


class HostCopies:
    """The copies of a rank.

    Args:
        device: that it computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_used = device, False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is started inside of it runs beside the device's other work, behind all that it was given before."""
        if self._stream is None:
            yield
            return
        self._is_used = True
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Of what has been started."""
        return None if self._stream is None else self._stream.record_event()

    def arrive(self, mark: Mark) -> None:
        """Lets the device's other work wait for what a mark is of."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def still_read(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor of the device, which others let go, until what has been started here is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def is_read(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor that was made here until what the device was given besides is done."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        """Waits, on the host and on the device, for all that has been started: the host may read what came, and write what was read."""
        if self._stream is not None and self._is_used:
            self._is_used = False
            self._stream.synchronize()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def on_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a tensor in the host's memory, which is there after `finish`."""
        if tensor.device.type == "cpu":
            return tensor.to(dtype)
        made = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)
        with self.beside():
            made.copy_(tensor, non_blocking=True)
        self.still_read(tensor)
        return made


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's memory, where a GPU copies from it in memory that stays where it is."""
    is_read_by_gpu = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_read_by_gpu and not tensor.is_pinned() else tensor
