"""Costs of collectives inside the split groups of a stage.

All devices of a group wait for a message. Handling of messages by the device itself counts as work: a device with less
to compute handles its part while the others compute. The rest of the message all wait for:

    device 0   |    compute     |handles|  wait  |
    device 1   |  compute   |   handles   | wait |      the slowest in both together

A stage may compute its rows in two halves, one while the other's messages travel. That starts every kernel twice and pays
every latency twice; but a message then only costs what the other half's work around it does not hide. Each of `n` messages
of a direction has its share of that direction's work, by all `g` gaps:

    at once    work + messages                      in halves    work' + max(first or last message, messages' - work' n / g)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from whale.estimate.costs.communication import (
    Volume,
    all_gather_line,
    all_reduce_line,
    all_to_all_line,
    all_to_all_volume,
    ring_volume,
)
from whale.estimate.costs.line import Line, Started
from whale.estimate.prices.prices import Prices
from whale.hardware import half_type
from whale.ir.cluster import Device, Handling
from whale.ir.graph import Op
from whale.ir.precision import HALF
from whale.sharding.bridges import GATHERED, ON_THE_SPOT, Bridge, Transport, summed_size


@dataclass(frozen=True)
class StagePlace:
    """Where a stage runs."""

    groups: tuple[tuple[str, ...], ...]  # the devices of each split group; of equal groups one is enough
    num_rows: float  # rows of a micro-batch per group
    in_flight: int  # micro-batches whose activations are held
    num_micro_batch: int  # micro-batches of a step

    @property
    def width(self) -> int:
        return len(self.groups[0])


COPY_TRAFFIC = 3  # memory traffic per copied byte on a CPU: read, and a write that first reads the cache line


def moves(transport: Transport) -> bool:
    """Whether the transport sends a message."""
    return transport not in ON_THE_SPOT


def copied_bytes(num_devices: int, transport: Transport, payload: Line) -> Line:
    """Memory traffic of the copies that a device makes besides a message, by rows.

    A sum works on a copy, since others may read the addend, except between two devices; a gather concatenates, a scatter
    slices, an all-to-all does both.
    """
    if not moves(transport) or (transport == "all-reduce" and num_devices == 2):
        return Line()
    return payload * (COPY_TRAFFIC * (2 / num_devices if transport == "all-to-all" else 1))


@dataclass(frozen=True)
class CollectiveCosts:
    """Prices of collectives at one place."""

    prices: Prices
    site: StagePlace

    @cached_property
    def _known(self) -> dict[tuple[Transport, Line, int], Line]:
        return {}

    def line(self, transport: Transport, payload: Line, num_messages: int = 1) -> Line:
        """Seconds by rows of one collective over a whole tensor (bytes by rows), in the slowest group; each starts a kernel."""
        if not moves(transport):
            return Line(self.prices.costs.launch_seconds if transport else 0.0)
        key = transport, payload, num_messages
        if key not in self._known:
            price = {"all-reduce": all_reduce_line, "all-to-all": all_to_all_line}.get(transport, all_gather_line)
            rows = self.site.num_rows
            lines = (price(self.prices.cluster, group, payload, num_messages, rows) for group in self.site.groups)
            slowest = max(lines, key=lambda line: line.at(rows))
            self._known[key] = slowest + Line(num_messages * (self.prices.costs.launch_seconds + self.prices.costs.message_seconds))
        return self._known[key]

    def payload(self, op: Op) -> Line:
        """Bytes of an op's results as they travel: in float32 between devices of unlike half-precision types."""
        num_bytes = self.prices.outputs[op.name]
        return num_bytes * 2 if self._is_unlike and op.outputs[0].dtype == HALF else num_bytes

    @cached_property
    def _is_unlike(self) -> bool:
        """Whether a group has devices of unlike half-precision types."""
        by_name = self.prices.cluster.by_name
        types = (len({half_type(by_name[name]) for name in group}) for group in self.site.groups if self.prices.graph.half_by_device)
        return any(count > 1 for count in types)

    def both_ways(self, bridge: Bridge) -> tuple[Line, Line]:
        """Seconds of a bridge, forward and backward."""
        forward, backward = self._travels(bridge)
        return self.line(*forward), self.line(*backward)

    def _travels(self, bridge: Bridge) -> tuple[tuple[Transport, Line], tuple[Transport, Line]]:
        """Transport and bytes of a bridge, forward and backward."""
        op = self.prices.graph.by_name[bridge.tensor]
        backward: tuple[Transport, Line] = (bridge.backward, self.payload(op)) if self.prices.training else ("", Line())
        if not bridge.is_sum:
            return (bridge.forward, self.payload(op)), backward
        summed, share = summed_size(bridge, self.prices.graph, self.prices.axes)
        payload = self.payload(self.prices.graph.by_name[summed]) * share
        if bridge.combine in GATHERED:
            return ("all-gather", payload * self.site.width), backward
        return (bridge.forward, payload), backward

    def synchronized(self, op: Op) -> Line:
        """Seconds per micro-batch of the all-reduce of a whole parameter's gradient in its group, once per step."""
        return self.line("all-reduce", self.payload(op)) * (1 / self.site.num_micro_batch)

    def started(self, bridges: Collection[Bridge], device: Device) -> tuple[Started, Started]:
        """All bridges of a stage, forward and backward, on a device; starting a message takes equally long on host and device."""
        forward, backward = Started(), Started()
        for bridge in bridges:
            there, back = self.both_ways(bridge)
            forward += Started(there, moves(bridge.forward) * self.prices.costs.message_seconds)
            backward += Started(back, moves(bridge.backward) * self.prices.costs.message_seconds * self.prices.training)
        if not self._handles:
            return forward, backward
        volumes, own = self.volumes(bridges), self.handled(bridges, device)
        forward, backward = (
            replace(messages, device=self.awaited(messages.device, volume) + line)
            for messages, volume, line in zip((forward, backward), volumes, own, strict=True)
        )
        return forward, backward

    def handled(self, bridges: Collection[Bridge], device: Device) -> tuple[Line, Line]:
        """Seconds of a device itself for bridges, forward and backward: handling of messages, and copies; 0 where not measured."""
        if not device.handling:
            return Line(), Line()
        copied = [Line.sum(copied_bytes(self.site.width, *each) for each in way) for way in zip(*map(self._travels, bridges), strict=True)]
        volumes = self.volumes(bridges)
        there, back = (
            volume.line(device.reached_handling) + num_bytes * (device.slowdown / device.bandwidth)
            for volume, num_bytes in zip(volumes, copied or (Line(), Line()), strict=True)
        )
        return there, back

    def volumes(self, bridges: Iterable[Bridge]) -> tuple[Volume, Volume]:
        """What each device sends and receives over bridges, forward and backward."""
        forward, backward = Volume(), Volume()
        for there, back in map(self._travels, bridges):
            forward, backward = forward + self._volume(*there), backward + self._volume(*back)
        return forward, backward

    def _volume(self, transport: Transport, payload: Line) -> Volume:
        if not moves(transport):
            return Volume()
        if transport == "all-to-all":
            return all_to_all_volume(self.site.width, payload)
        return ring_volume(self.site.width, payload, 2 if transport == "all-reduce" else 1)

    @cached_property
    def _handles(self) -> tuple[Handling, ...]:
        """The distinct non-zero handlings of the devices."""
        found = dict.fromkeys(self.prices.cluster.by_name[name].reached_handling for group in self.site.groups for name in group)
        return tuple(handling for handling in found if handling)

    def awaited(self, messages: Line, volume: Volume) -> Line:
        """Seconds of messages that all devices wait for, beyond the longest handling."""
        most = max((volume.line(handling) for handling in self._handles), key=lambda line: line.at(self.site.num_rows), default=Line())
        left = messages + most * -1
        return left if left.at(self.site.num_rows) > 0 else Line()


@dataclass(frozen=True)
class Messages:
    """What the devices of a group exchange during one micro-batch."""

    forward: Line  # seconds that other work may hide, by rows, without handling
    backward: Line  # the same of the backward pass
    num_forward: int
    num_backward: int
    num_gaps: int  # places in the stage with an exchange, in either direction


def messages_of(collective_costs: CollectiveCosts, bridges: Iterable[Bridge]) -> Messages:
    """What bridges exchange of values with rows."""
    forward, backward, gaps = [], [], 0
    with_rows = [bridge for bridge in bridges if bridge.tensor in collective_costs.prices.activations]
    for bridge in with_rows:
        there, back = collective_costs.both_ways(bridge)
        forward += [there] if moves(bridge.forward) else []
        backward += [back] if moves(bridge.backward) and collective_costs.prices.training else []
        gaps += moves(bridge.forward) or moves(bridge.backward)
    there_volume, back_volume = collective_costs.volumes(with_rows)
    awaited = collective_costs.awaited(Line.sum(forward), there_volume), collective_costs.awaited(Line.sum(backward), back_volume)
    return Messages(*awaited, len(forward), len(backward), gaps)


def halved(at_once: Started, messages: Line, num_messages: int, num_gaps: int, rows: float) -> Started:
    """One direction of a stage in two halves.

    Args:
        at_once: messages included.
        messages: their seconds.
        num_messages: in this direction.
        num_gaps: in both directions.
        rows: about which lines are taken.
    """
    work, host = _twice(at_once.device + messages * -1), 2 * at_once.host
    if not num_messages:
        return Started(work, host)
    both = _twice(messages)
    exposed = both * (0.5 / num_messages), both + work * (-num_messages / num_gaps)
    return Started(work + max(exposed, key=lambda line: line.at(rows)), host)


def _twice(line: Line) -> Line:
    """Two halves of the rows, one after the other."""
    return Line(2 * line.fixed, line.per_row)
