"""Time of the optimizer's step: every weight, gradient and state is read and written; gradients begin the next one at zero."""

from __future__ import annotations

from whale.ir.cluster import Device


def host_step_seconds(device: Device, bandwidth: float, stepped: float, moved: float) -> float:
    """Seconds of a step on the CPU of a device's host, and of what is moved between the two, one after the other.

    Args:
        bandwidth: of the host's memory, bytes per second, that is this device's part; its own where it is the host.
        stepped: bytes of weights, gradients and what is kept of them.
        moved: bytes of gradients to the host, and of weights back.
    """
    if not device.host_link:
        return (2 * stepped + moved) / (device.bandwidth * device.traffic)
    return 2 * stepped / bandwidth + moved / device.host_link


def rounding_seconds(device: Device, gradients: float, sent: float, *, feeds_back: bool) -> float:
    """Seconds in which gradients are rounded to what is sent, and taken back from what has come.

    Args:
        gradients, sent: bytes.
        feeds_back: whether what that loses is kept, and what was lost before is added.
    """
    moved = 7 * gradients + 3 * sent if feeds_back else 2 * (gradients + sent)
    return moved / (device.bandwidth * device.traffic)


def optimizer_seconds(device: Device, weights: float, gradients: float, states: float) -> float:
    """Seconds of one step over so many bytes of trained weights, of their gradients and of what is kept of them."""
    return 2 * (weights + gradients + states) / (device.bandwidth * device.traffic)
