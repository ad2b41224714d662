"""What a stage costs on a device: the cost model applied to the parts of one graph, each question answered once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from whale.axes import Axes, discover
from whale.axes.labels import Labels, label
from whale.estimate import (
    Line,
    OpSeconds,
    OpTable,
    activation_line,
    edge_line,
    kept_tensors,
    op_seconds,
    op_table,
    parameter_bytes,
    recomputed_lines,
    spec_line,
    storage_of,
    working_line,
)
from whale.ir.cluster import Cluster, Device, Link
from whale.ir.graph import ModelGraph
from whale.ir.plan import Estimate, Shard
from whale.planning.pricing.local_graph import local_graph
from whale.planning.pricing.traffic import local_table
from whale.planning.structure.stages import NOTHING, Assignment, Part, Recompute
from whale.planning.structure.structure import activations_of


def device_kind(device: Device) -> tuple[Hashable, ...]:
    """Devices of equal kind cost the same."""
    return device.model, device.memory, device.flops, device.bandwidth, device.efficiency


@dataclass(frozen=True, slots=True)
class PartCost:
    """What a part needs on any device.

    Attributes:
        parameter_bytes: weights, gradients and optimizer state.
        activation: bytes kept for backward, by rows of one micro-batch.
        working: bytes of the op at work, and of the activations that were computed again.
        sends: per source stage, bytes that arrive forward and return as gradients, by rows, and in how many messages.
    """

    parameter_bytes: int
    activation: Line
    working: Line
    sends: tuple[tuple[int, Line, int], ...]


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """What one stage costs one device of its virtual device, by the rows that it takes of a micro-batch.

    Attributes:
        forward, backward: seconds of computing.
        receive: seconds of waiting for what arrives, both ways.
        part: bytes.
        capacity: bytes that a plan may use on the device.
    """

    forward: Line
    backward: Line
    receive: Line
    part: PartCost
    capacity: int

    @property
    def seconds(self) -> Line:
        return self.forward + self.backward + self.receive

    def memory(self, in_flight: int) -> Line:
        """Bytes kept, without the op at work."""
        return Line(float(self.part.parameter_bytes)) + self.part.activation * in_flight

    def estimate(self, num_rows: int, in_flight: int) -> Estimate:
        """The figures for the plan, at a number of rows."""
        kept = self.part.activation.at(num_rows) * in_flight + self.part.working.at(num_rows)
        return Estimate(self.forward.at(num_rows), self.backward.at(num_rows), self.part.parameter_bytes, round(kept), self.capacity)


@dataclass(eq=False)
class Pricing:
    """Prices for one graph on one cluster. Equal devices and equal parts are priced once.

    Args:
        fraction: share of each device's memory that a plan may use.
        optimizer_states: tensors that the optimizer keeps per parameter.
        overlap: whether split stages compute their rows in two halves; None where that pays.
        cuttings: what was found out about split stages, for those that ask it.
    """

    graph: ModelGraph
    cluster: Cluster
    fraction: float
    optimizer_states: int
    overlap: bool | None = None
    _seconds: dict[Hashable, OpSeconds] = field(default_factory=dict)
    _parts: dict[tuple[int, Recompute], tuple[Part, PartCost]] = field(default_factory=dict)
    _computing: dict[Hashable, tuple[Line, Line]] = field(default_factory=dict)
    _links: dict[tuple[str, str], Link] = field(default_factory=dict)
    _locals: dict[Hashable, Pricing] = field(default_factory=dict)
    _labels: dict[Hashable, Labels] = field(default_factory=dict)
    cuttings: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def table(self) -> OpTable:
        """Figures of all ops."""
        return op_table(self.graph)

    @cached_property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """Per op, what it keeps for backward."""
        return dict(kept_tensors(self.graph))

    @cached_property
    def owner(self) -> dict[str, str]:
        """Per op, the op whose memory its result is in."""
        return storage_of(self.graph)

    @cached_property
    def activations(self) -> frozenset[str]:
        """The ops whose values depend on the batch."""
        return activations_of(self.graph)

    @cached_property
    def axes(self) -> Axes:
        """The logical axes of the graph."""
        return discover(self.graph)

    def labels(self, ops: tuple[str, ...], shards: tuple[Shard, ...]) -> Labels:
        """The labels of a split stage that runs these ops."""
        key = hash(ops), shards
        if key not in self._labels:
            self._labels[key] = label(self.graph, self.axes, ops, shards)
        return self._labels[key]

    def local(self, ops: tuple[str, ...], shards: tuple[Shard, ...], position: int) -> Pricing:
        """Prices for the device at a position of the split groups of the stage that runs these ops."""
        sizes = tuple(shard.sizes[position] for shard in shards)
        key = hash(ops), shards, sizes
        if key not in self._locals:
            labels = self.labels(ops, shards)
            local = Pricing(local_graph(labels, position), self.cluster, self.fraction, self.optimizer_states, _links=self._links)
            shares = {shard.axis: size / self.axes.by_name[shard.axis].size for shard, size in zip(shards, sizes, strict=True)}
            local.table = local_table(self.graph, self.axes, self.table, labels.work, shares)
            self._locals[key] = local
        return self._locals[key]

    @property
    def training(self) -> bool:
        return self.graph.mode == "train"

    def capacity(self, device: str) -> int:
        """Bytes that a plan may use."""
        return int(self.cluster.by_name[device].memory * self.fraction)

    def seconds(self, device: Device, num_rows: float) -> OpSeconds:
        """Times of all ops on a device, as lines about a number of rows. Without training nothing runs backward."""
        key = (device_kind(device), num_rows)
        if key not in self._seconds:
            found = op_seconds(self.table, device, num_rows)
            if not self.training:
                zero = np.zeros_like(found.backward_fixed)
                found = OpSeconds(found.forward_fixed, found.forward_per_row, zero, zero)
            self._seconds[key] = found
        return self._seconds[key]

    def parameter_bytes(self, name: str) -> int:
        """Bytes of a parameter or buffer with all that training keeps beside it."""
        return parameter_bytes(self.graph.parameter_by_name[name], self.optimizer_states, training=self.training)

    def part(self, part: Part, recompute: Recompute = NOTHING) -> PartCost:
        """What a part needs anywhere."""
        key = id(part), recompute
        if key not in self._parts:
            self._parts[key] = part, self._price_part(part, recompute)
        return self._parts[key][1]

    def _price_part(self, part: Part, recompute: Recompute) -> PartCost:
        activation, again = activation_line(self.graph, part.ops, self.kept), Line()
        if recompute.num_alive:
            received = {name for names in part.received.values() for name in names}
            activation, again = self.payload(tuple(sorted(received)))[0], activation * recompute.num_alive
        elif recompute.segments:
            activation, again = recomputed_lines(self.graph, part.ops, self.kept, self.owner, recompute.segments)
        return PartCost(
            parameter_bytes=sum(self.parameter_bytes(name) for name in part.parameters),
            activation=activation,
            working=working_line(self.graph, part.ops) + again,
            sends=tuple((source, *self._both_ways(tensors)) for source, tensors in part.received.items()),
        )

    def payload(self, tensors: Sequence[str]) -> tuple[Line, Line]:
        """Bytes of tensors that travel, and of the gradients that return, by rows."""
        ops = [self.graph.by_name[name] for name in tensors]
        forward = Line.sum(spec_line(spec, self.graph.num_rows) for op in ops for spec in op.outputs)
        if not self.training:
            return forward, Line()
        return forward, Line.sum(spec_line(spec, self.graph.num_rows) for op in ops if op.requires_grad for spec in op.outputs)

    def _both_ways(self, tensors: Sequence[str]) -> tuple[Line, int]:
        forward, backward = self.payload(tensors)
        return forward + backward, len(tensors) + self.num_gradients(tensors)

    def num_gradients(self, tensors: Sequence[str]) -> int:
        """How many of these tensors have a gradient that returns."""
        return sum(self.training and self.graph.by_name[name].requires_grad for name in tensors)

    def link(self, a: str, b: str) -> Link:
        """The link between two devices."""
        hosts = self.cluster.by_name[a].host, self.cluster.by_name[b].host
        if hosts not in self._links:
            self._links[hosts] = self.cluster.link(a, b)
        return self._links[hosts]

    def stage(
        self, assignment: Assignment, stage: int, devices: Sequence[Sequence[str]], num_rows: float, recompute: Recompute = NOTHING
    ) -> tuple[DeviceCost, ...]:
        """What a stage costs each device of its virtual device.

        Args:
            devices: per stage, the devices that run it.
            num_rows: rows of a micro-batch on one device, about which the lines are taken.
            recompute: what it computes again.
        """
        part, own = self.part(assignment.parts[stage], recompute), devices[stage]
        costs = []
        for position, name in enumerate(own):
            device = self.cluster.by_name[name]
            forward, backward = self._compute(assignment.parts[stage], device, num_rows)
            backward = backward + self.again(assignment.parts[stage], recompute, device, num_rows)
            receive = Line()
            for source, payload, num_messages in part.sends:
                sender = devices[source][position * len(devices[source]) // len(own)]
                if sender != name:
                    receive = receive + edge_line(self.link(sender, name), payload, num_messages)
            costs.append(DeviceCost(forward, backward, receive, part, self.capacity(name)))
        return tuple(costs)

    def again(self, part: Part, recompute: Recompute, device: Device, num_rows: float) -> Line:
        """Seconds of what a part computes a second time."""
        if recompute.num_alive:
            return self._compute(part, device, num_rows)[0]
        seconds = self.seconds(device, num_rows)
        index = np.array([self.table.position[name] for segment in recompute.segments for name in segment], dtype=np.int64)
        return Line(float(seconds.forward_fixed[index].sum()), float(seconds.forward_per_row[index].sum()))

    def _compute(self, part: Part, device: Device, num_rows: float) -> tuple[Line, Line]:
        key = (id(part), device_kind(device), num_rows)
        if key not in self._computing:
            seconds = self.seconds(device, num_rows)
            index = np.array([self.table.position[name] for name in part.ops], dtype=np.int64)
            forward = Line(float(seconds.forward_fixed[index].sum()), float(seconds.forward_per_row[index].sum()))
            backward = Line(float(seconds.backward_fixed[index].sum()), float(seconds.backward_per_row[index].sum()))
            self._computing[key] = forward, backward
        return self._computing[key]
