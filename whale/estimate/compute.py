"""Compute time of ops on a device: the larger of arithmetic and memory traffic, and a fixed part per kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whale.estimate.op_table import Floats, OpTable
from whale.ir.cluster import Device

LAUNCH_SECONDS = 4e-6
"""What starting one kernel costs, about the same from Python on a GPU and on a CPU."""

BACKWARD_TRAFFIC = 2.0
"""Memory traffic of a backward pass relative to its forward pass: the gradient and the saved values are both read."""


@dataclass(frozen=True)
class OpSeconds:
    """Seconds per op in graph order, as ``fixed + per_row x rows``."""

    forward_fixed: Floats
    forward_per_row: Floats
    backward_fixed: Floats
    backward_per_row: Floats


def op_seconds(table: OpTable, device: Device, num_rows: float) -> OpSeconds:
    """Times of all ops on a device.

    An op takes ``max(flops / (peak x efficiency), bytes / bandwidth)``, which bends where the one overtakes the
    other. The line given for it is the side that rules at `num_rows`: exact there, a lower bound elsewhere.

    Args:
        num_rows: rows of a micro-batch on this device, about which the lines are taken.
    """
    peaks = np.array([device.peak_flops(dtype) * device.efficiency for dtype in table.dtypes])[table.dtype]
    launch = table.launches * LAUNCH_SECONDS
    forward = _rule(
        (table.flops_fixed / peaks, table.flops_per_row / peaks),
        (table.bytes_fixed / device.bandwidth, table.bytes_per_row / device.bandwidth),
        num_rows,
    )
    traffic = BACKWARD_TRAFFIC * table.trains / device.bandwidth
    backward = _rule(
        (table.backward_flops_fixed / peaks, table.backward_flops_per_row / peaks),
        (table.bytes_fixed * traffic, table.bytes_per_row * traffic),
        num_rows,
    )
    return OpSeconds(forward[0] + launch, forward[1], backward[0] + launch * BACKWARD_TRAFFIC * table.trains, backward[1])


def _rule(arithmetic: tuple[Floats, Floats], traffic: tuple[Floats, Floats], num_rows: float) -> tuple[Floats, Floats]:
    bound_by_arithmetic = arithmetic[0] + arithmetic[1] * num_rows >= traffic[0] + traffic[1] * num_rows
    fixed = np.where(bound_by_arithmetic, arithmetic[0], traffic[0])
    return fixed, np.where(bound_by_arithmetic, arithmetic[1], traffic[1])
