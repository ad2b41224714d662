"""Compute time of ops on a device: the larger of arithmetic and memory traffic, a fixed part per kernel, and the host that starts them.

Of the optimizer's step: every weight, gradient and state is read and written; gradients begin the next one at zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.costs import Costs
from whale.estimate.costs.line import Floats, Line, Started
from whale.estimate.costs.measured import Measured
from whale.estimate.costs.op_table import OpTable
from whale.ir.cluster import Device

Index = NDArray[np.int64]


@dataclass(frozen=True)
class OpSeconds:
    """Seconds per op in graph order: on the device as ``fixed + per_row x rows``, and of the host that starts the kernels.

    Attributes:
        num_rows: about which the lines are taken.
    """

    num_rows: float
    forward_fixed: Floats
    forward_per_row: Floats
    backward_fixed: Floats
    backward_per_row: Floats
    forward_host: Floats
    backward_host: Floats

    def forward(self, index: Index) -> Line:
        """The forward pass of some ops, one after the other, on a device that never waits for its host."""
        return Line(float(self.forward_fixed[index].sum()), float(self.forward_per_row[index].sum()))

    def backward(self, index: Index, shares: Floats | float = 1.0) -> Line:
        """The backward pass of some ops, or these shares of each, likewise."""
        return Line(float((self.backward_fixed[index] * shares).sum()), float((self.backward_per_row[index] * shares).sum()))

    def started_forward(self, index: Index) -> Started:
        """The forward pass of some ops, with their host."""
        return Started(self.forward(index), float(self.forward_host[index].sum()))

    def started_backward(self, index: Index, shares: Floats | float = 1.0) -> Started:
        """The backward pass of some ops, or these shares of each, likewise."""
        return Started(self.backward(index, shares), float((self.backward_host[index] * shares).sum()))


def op_seconds(table: OpTable, device: Device, num_rows: float, costs: Costs) -> OpSeconds:
    """Times of all ops on a device.

    An op takes ``max(flops / (peak x efficiency), bytes / (bandwidth x traffic))``, which bends where the one overtakes the
    other; the efficiency falls with the smallest size of a matrix product. The line given for it is the side that rules at
    `num_rows`: exact there, a lower bound elsewhere if the efficiency is constant.

    Args:
        num_rows: rows of a micro-batch on this device, about which the lines are taken.
        costs: launches and traffic, and times that were measured instead.
    """
    filled = 1 / (1 + device.half_width / np.maximum(table.narrowest(num_rows), 1.0))
    peaks = np.array([device.reached_flops(_computed_in(dtype, device, costs)) for dtype in table.dtypes])[table.dtype] * filled
    bandwidth = device.reached_bandwidth
    launch, launched_again = kernel_seconds(table, device, costs)
    start = table.launches * device.host_seconds * device.slowdown
    forward = _rule(
        (table.flops_fixed / peaks, table.flops_per_row / peaks), (table.bytes_fixed / bandwidth, table.bytes_per_row / bandwidth), num_rows
    )
    again = costs.backward_traffic * table.trains
    backward = _rule(
        (table.backward_flops_fixed / peaks, table.backward_flops_per_row / peaks),
        (table.bytes_fixed * again / bandwidth, table.bytes_per_row * again / bandwidth),
        num_rows,
    )
    found = OpSeconds(num_rows, forward[0] + launch, forward[1], backward[0] + launched_again, backward[1], start, start * again)
    return found if costs.measured is None else _as_measured(found, table, device, costs.measured)


def kernel_seconds(table: OpTable, device: Device, costs: Costs) -> tuple[Floats, Floats]:
    """Of the times of all ops, forward and backward, the fixed part of their kernels: the same however small the part of an op is."""
    start = costs.launch_seconds if device.kernel_start is None else device.kernel_start
    forward: Floats = table.launches * start * device.slowdown
    return forward, forward * costs.backward_traffic * table.trains


def _as_measured(found: OpSeconds, table: OpTable, device: Device, known: Measured) -> OpSeconds:
    """The times with those that were measured in their place; what the host needs to start a kernel is in them."""
    forward = known.lines(device, table.op, table.share, found.num_rows, backward=False)
    backward = known.lines(device, table.op, table.share, found.num_rows, backward=True)
    return replace(
        found,
        forward_fixed=np.where(np.isnan(forward[0]), found.forward_fixed, forward[0]),
        forward_per_row=np.where(np.isnan(forward[0]), found.forward_per_row, forward[1]),
        backward_fixed=np.where(np.isnan(backward[0]), found.backward_fixed, backward[0]),
        backward_per_row=np.where(np.isnan(backward[0]), found.backward_per_row, backward[1]),
        forward_host=np.where(np.isnan(forward[0]), found.forward_host, 0.0),
        backward_host=np.where(np.isnan(backward[0]), found.backward_host, 0.0),
    )


def _computed_in(dtype: str, device: Device, costs: Costs) -> str:
    """The type that a device computes products of a dtype in."""
    return "tf32" if dtype == "float32" and costs.allows_tf32 and "tf32" in dict(device.flops) else dtype


def _rule(arithmetic: tuple[Floats, Floats], traffic: tuple[Floats, Floats], num_rows: float) -> tuple[Floats, Floats]:
    bound_by_arithmetic = arithmetic[0] + arithmetic[1] * num_rows >= traffic[0] + traffic[1] * num_rows
    fixed = np.where(bound_by_arithmetic, arithmetic[0], traffic[0])
    return fixed, np.where(bound_by_arithmetic, arithmetic[1], traffic[1])


def host_step_seconds(device: Device, bandwidth: float, stepped: float, moved: float) -> float:
    """Seconds of a step on the CPU of a device's host, and of what is moved between the two, one after the other.

    Args:
        bandwidth: of the host's memory, bytes per second, that is this device's part; its own where it is the host.
        stepped: bytes of weights, gradients and what is kept of them.
        moved: bytes of gradients to the host, and of weights back.
    """
    if not device.host_link:
        return (2 * stepped + moved) / device.reached_bandwidth
    return 2 * stepped / bandwidth + moved / device.host_link


def copy_seconds(device: Device, num_bytes: float) -> float:
    """Seconds of bringing so many bytes to the memory of a device's host, or back; where it is the host, of a copy."""
    return num_bytes / (device.host_link or device.reached_bandwidth / 2)


def rounding_seconds(device: Device, gradients: float, sent: float, *, feeds_back: bool) -> float:
    """Seconds in which gradients are rounded to what is sent, and taken back from what has come.

    Args:
        gradients, sent: bytes.
        feeds_back: whether what that loses is kept, and what was lost before is added.
    """
    moved = 7 * gradients + 3 * sent if feeds_back else 2 * (gradients + sent)
    return moved / device.reached_bandwidth


def optimizer_seconds(device: Device, weights: float, gradients: float, states: float) -> float:
    """Seconds of one step over so many bytes of trained weights, of their gradients and of what is kept of them."""
    return 2 * (weights + gradients + states) / device.reached_bandwidth
