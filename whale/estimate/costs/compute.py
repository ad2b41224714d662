"""Compute time of ops on a device: the larger of arithmetic and memory traffic, and a fixed part per kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whale.estimate.costs.costs import Costs
from whale.estimate.costs.op_table import Floats, OpTable
from whale.ir.cluster import Device


@dataclass(frozen=True)
class OpSeconds:
    """Seconds per op in graph order, as ``fixed + per_row x rows``."""

    forward_fixed: Floats
    forward_per_row: Floats
    backward_fixed: Floats
    backward_per_row: Floats


def op_seconds(table: OpTable, device: Device, num_rows: float, costs: Costs) -> OpSeconds:
    """Times of all ops on a device.

    An op takes ``max(flops / (peak x efficiency), bytes / bandwidth)``, which bends where the one overtakes the
    other. The line given for it is the side that rules at `num_rows`: exact there, a lower bound elsewhere.

    Args:
        num_rows: rows of a micro-batch on this device, about which the lines are taken.
        costs: efficiency, launches and traffic.
    """
    efficiency = device.efficiency
    peaks = np.array([device.peak_flops(dtype) * efficiency for dtype in table.dtypes])[table.dtype]
    launch = table.launches * (costs.launch_seconds if device.kernel_start is None else device.kernel_start)
    forward = _rule(
        (table.flops_fixed / peaks, table.flops_per_row / peaks),
        (table.bytes_fixed / device.bandwidth, table.bytes_per_row / device.bandwidth),
        num_rows,
    )
    traffic = costs.backward_traffic * table.trains / device.bandwidth
    backward = _rule(
        (table.backward_flops_fixed / peaks, table.backward_flops_per_row / peaks),
        (table.bytes_fixed * traffic, table.bytes_per_row * traffic),
        num_rows,
    )
    return OpSeconds(forward[0] + launch, forward[1], backward[0] + launch * costs.backward_traffic * table.trains, backward[1])


def _rule(arithmetic: tuple[Floats, Floats], traffic: tuple[Floats, Floats], num_rows: float) -> tuple[Floats, Floats]:
    bound_by_arithmetic = arithmetic[0] + arithmetic[1] * num_rows >= traffic[0] + traffic[1] * num_rows
    fixed = np.where(bound_by_arithmetic, arithmetic[0], traffic[0])
    return fixed, np.where(bound_by_arithmetic, arithmetic[1], traffic[1])
