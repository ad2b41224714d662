"""Compute time of ops on a device: the larger of arithmetic and memory traffic (roofline), plus kernel start; and the optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.costs import Costs
from whale.estimate.costs.line import Floats, Line, Started
from whale.estimate.costs.measured import Measured
from whale.estimate.costs.op_table import OpTable
from whale.hardware import half_type
from whale.ir.cluster import Device
from whale.ir.precision import OWN_HALF

Index = NDArray[np.int64]


@dataclass(frozen=True)
class OpSeconds:
    """Seconds per op in graph order: on the device ``fixed + per_row x rows`` (about `num_rows`), on the host the start of its kernels."""

    num_rows: float
    forward_fixed: Floats
    forward_per_row: Floats
    backward_fixed: Floats
    backward_per_row: Floats
    forward_host: Floats
    backward_host: Floats

    def forward(self, index: Index) -> Started:
        """The forward pass of some ops."""
        device = Line(float(self.forward_fixed[index].sum()), float(self.forward_per_row[index].sum()))
        return Started(device, float(self.forward_host[index].sum()))

    def backward(self, index: Index, shares: Floats | float = 1.0) -> Started:
        """The backward pass of some ops, or these shares of each."""
        device = Line(float((self.backward_fixed[index] * shares).sum()), float((self.backward_per_row[index] * shares).sum()))
        return Started(device, float((self.backward_host[index] * shares).sum()))


def op_seconds(table: OpTable, device: Device, num_rows: float, costs: Costs) -> OpSeconds:
    """Times of all ops on a device.

    An op takes ``max(flops / (peak x efficiency), bytes / (bandwidth x traffic))``; the efficiency falls with the smallest
    size of a matrix product. The line returned is the side that dominates at `num_rows`: exact there, a lower bound elsewhere
    if the efficiency is constant.

    Args:
        num_rows: rows of a micro-batch on this device.
        costs: launches and traffic, and measured times that replace computed ones.
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
    """Per op, the fixed time of its kernels, forward and backward, which does not shrink with the part of an op."""
    start = costs.launch_seconds if device.kernel_start is None else device.kernel_start
    forward: Floats = table.launches * start * device.slowdown
    return forward, forward * costs.backward_traffic * table.trains


def _as_measured(found: OpSeconds, table: OpTable, device: Device, known: Measured) -> OpSeconds:
    """Replaces times by measured ones, which include the host's time to start kernels."""
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
    """The dtype in which a device computes products of `dtype`."""
    if dtype == OWN_HALF:
        return half_type(device) or "float32"
    return "tf32" if dtype == "float32" and costs.allows_tf32 and "tf32" in dict(device.flops) else dtype


def _rule(arithmetic: tuple[Floats, Floats], traffic: tuple[Floats, Floats], num_rows: float) -> tuple[Floats, Floats]:
    bound_by_arithmetic = arithmetic[0] + arithmetic[1] * num_rows >= traffic[0] + traffic[1] * num_rows
    fixed = np.where(bound_by_arithmetic, arithmetic[0], traffic[0])
    return fixed, np.where(bound_by_arithmetic, arithmetic[1], traffic[1])


def host_step_seconds(device: Device, bandwidth: float, stepped: float, moved: float) -> float:
    """Seconds of an optimizer step on the host's CPU, and of the transfers to and from it, in sequence.

    Args:
        bandwidth: this device's share of the host memory's bytes per second; its own where it is the host.
        stepped: bytes of weights, gradients and optimizer state.
        moved: bytes of gradients to the host, and of weights back.
    """
    if not device.host_link:
        return (2 * stepped + moved) / device.reached_bandwidth
    return 2 * stepped / bandwidth + moved / device.host_link


def copy_seconds(device: Device, num_bytes: float) -> float:
    """Seconds of a copy between a device and its host's memory; where the device is the host, of a copy in memory."""
    return num_bytes / (device.host_link or device.reached_bandwidth / 2)


def rounding_seconds(device: Device, gradients: float, sent: float, *, feeds_back: bool) -> float:
    """Seconds of casting gradients (bytes) to the dtype that is sent, and back; with error feedback, of keeping and adding the error."""
    moved = 7 * gradients + 3 * sent if feeds_back else 2 * (gradients + sent)
    return moved / device.reached_bandwidth


def optimizer_seconds(device: Device, weights: float, gradients: float, states: float) -> float:
    """Seconds of one optimizer step over these bytes: each is read and written, and gradients are zeroed."""
    return 2 * (weights + gradients + states) / device.reached_bandwidth
