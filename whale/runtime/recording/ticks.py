"""Times without waiting: of the host where it computes, else of the device's stream, read when the step is over.

A GPU's host runs ahead of it. An event is put into the stream where something begins or ends, and passes by when the GPU
comes to it; the host reads them all once the GPU has done.
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import torch

Tick = float | torch.cuda.Event


class Ticks(Protocol):
    """Where times are from."""

    def now(self) -> Tick:
        """This moment, or the event that will know it."""

    def seconds(self, tick: Tick) -> float:
        """When it was, by `time.perf_counter`; waits for the device."""

    def num_bytes(self) -> int | None:
        """Bytes of tensors on the device; None where nobody counts them."""


class HostTicks:
    """Of a device that computes when the host does."""

    def now(self) -> Tick:
        return perf_counter()

    def seconds(self, tick: Tick) -> float:
        assert isinstance(tick, float)
        return tick

    def num_bytes(self) -> int | None:
        return None


class StreamTicks:
    """Of a GPU's current stream.

    Args:
        device: the GPU; it is waited for once, here, so that its time and the host's can be compared.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._first = self._event()
        self._start = perf_counter()
        self._is_over = False

    def now(self) -> Tick:
        return self._event()

    def seconds(self, tick: Tick) -> float:
        if isinstance(tick, float):  # of what the host saw
            return tick
        if not self._is_over:
            torch.cuda.synchronize(self._device)
            self._is_over = True
        return self._start + float(self._first.elapsed_time(tick)) / 1e3

    def num_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def ticks_of(device: torch.device) -> Ticks:
    """Where a step's times are from on a device."""
    return StreamTicks(device) if device.type == "cuda" else HostTicks()
