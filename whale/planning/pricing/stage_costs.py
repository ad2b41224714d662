"""What one stage costs each device of its virtual device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.estimate import Line, edge_line
from whale.estimate.costs.line import Floats, Started
from whale.estimate.prices.part import NOTHING, Part, Recompute
from whale.estimate.prices.prices import PartCost, Prices
from whale.planning.structure.stages import Assignment

BESIDE = 1e-7
"""So much of the kernels counts beside the host that starts them: of divisions that take equally long, that in which devices work alike."""


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """What one stage costs one device of its virtual device, by the rows that it takes of a micro-batch.

    Attributes:
        forward, backward: computing, what is computed again in the backward pass, and the messages inside a split group.
        receive: seconds of waiting for what arrives, both ways.
        part: bytes.
        capacity: bytes that a plan may use on the device.
    """

    forward: Started
    backward: Started
    receive: Line
    part: PartCost
    capacity: int

    @property
    def seconds(self) -> Line:
        """Without waiting for the host."""
        return self.forward.device + self.backward.device + self.receive

    def waiting(self, rows: Floats) -> Floats:
        """Seconds of waiting for the host, by rows."""
        found: Floats = np.zeros_like(rows)
        for each in (self.forward, self.backward):
            if each.host > each.device.fixed:
                found = found + replace(each, device=each.device * (1 - BESIDE)).waiting(rows)
        return found


def stage_costs(
    prices: Prices, assignment: Assignment, stage: int, devices: Sequence[Sequence[str]], num_rows: float, recompute: Recompute = NOTHING
) -> tuple[DeviceCost, ...]:
    """What a stage costs each device of its virtual device.

    Args:
        devices: per stage, the devices that run it.
        num_rows: rows of a micro-batch on one device, about which the lines are taken.
        recompute: what it computes again.
    """
    return tuple(device_cost(prices, assignment, stage, devices, index, num_rows, recompute) for index in range(len(devices[stage])))


def device_cost(
    prices: Prices,
    assignment: Assignment,
    stage: int,
    devices: Sequence[Sequence[str]],
    index: int,
    num_rows: float,
    recompute: Recompute = NOTHING,
) -> DeviceCost:
    """What a stage costs one device of its virtual device; the arguments are those of `stage_costs`, and its index among them."""
    own = cost_alone(prices, assignment.parts[stage], devices[stage][index], num_rows, recompute)
    return replace(own, receive=received_line(prices, own.part, devices, stage, index))


def cost_alone(prices: Prices, part: Part, name: str, num_rows: float, recompute: Recompute = NOTHING) -> DeviceCost:
    """What a part costs a device, without what it waits for."""
    device = prices.cluster.by_name[name]
    forward, backward = prices.started(part, device, num_rows)
    again = prices.again(part, recompute, device, num_rows)
    return DeviceCost(forward, backward + again, Line(), prices.part(part, recompute), prices.capacity(name))


def received_line(prices: Prices, part: PartCost, devices: Sequence[Sequence[str]], stage: int, index: int) -> Line:
    """Seconds of waiting for what arrives at a device of a stage from other stages, both ways."""
    own, receive = devices[stage], Line()
    for source, payload, num_messages in part.sends:
        sender = devices[source][index * len(devices[source]) // len(own)]
        if sender != own[index]:
            receive = receive + edge_line(prices.link(sender, own[index]), payload, num_messages)
    return receive
