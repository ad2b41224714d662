"""Prices: what the ops of a stage cost on a device, for one graph on one cluster, cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from whale.axes import Axes, discover
from whale.axes.labels import Labels, label
from whale.estimate.costs.compute import OpSeconds, copy_seconds, host_step_seconds, op_seconds, optimizer_seconds
from whale.estimate.costs.costs import Costs
from whale.estimate.costs.line import Floats, Line, Started
from whale.estimate.costs.op_table import OpTable, op_table, output_line, output_lines
from whale.estimate.memory.held import HeldTensors, held_tensors, kept_by_maker
from whale.estimate.memory.memory import (
    StateBytes,
    activations_of,
    kept_tensors,
    places_line,
    size_line,
    state_bytes,
    weight_share,
)
from whale.estimate.memory.passes import BackwardStates, BridgedTensor, Bytes, FetchedWeights, Passes, PassStates, PerOp, as_bytes, line_of
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.part import NOTHING, Alive, Part, Recompute
from whale.estimate.prices.traffic import WorkOnParts, local_graph, work_on_parts
from whale.ir.cluster import Cluster, Device, Link
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Op
from whale.ir.plan import BATCH, ParameterState, Shard, states_of, zero_of
from whale.sharding.bridges import Bridge, find_bridges
from whale.sharding.buckets import NUM_AT_ONCE, Buckets

Value = TypeVar("Value", float, Floats)


@dataclass(frozen=True, slots=True)
class PartCost:
    """What a part needs on any device."""

    parameter_bytes: int  # weights, gradients and optimizer state
    activation: Line  # bytes kept for backward, by rows of one micro-batch, with received and handed-on tensors
    for_weights: Line  # bytes from I to W, where these are separate, by rows of one micro-batch
    working: Line  # bytes of a pass at its peak, beyond what is kept, and of messages in flight
    beside: Line  # of these, recomputed activations and messages
    first: Line | None  # of the first B at its peak, with the gradients that it makes; None where these have buckets
    gradient_bytes: int  # of all gradients
    largest_gradient: float  # bytes
    sends: tuple[tuple[int, Line, int], ...]  # per source stage, bytes that arrive and return, by rows, and the number of messages

    def with_copies(self, copies: Line, recompute: Recompute) -> PartCost:
        """Adds forms of its tensors that are kept as well."""
        if recompute.num_alive:
            return replace(self, working=self.working + copies * recompute.num_alive)
        return replace(self, activation=self.activation + copies)

    def with_rows(self, share: float) -> PartCost:
        """The same bytes, where the part takes this share of the rows."""

        def scaled(line: Line) -> Line:
            return Line(line.fixed, line.per_row * share)

        found = replace(self, activation=scaled(self.activation), for_weights=scaled(self.for_weights), working=scaled(self.working))
        return found if self.first is None else replace(found, first=scaled(self.first))

    @property
    def waits(self) -> Line:
        """Extra bytes of a micro-batch between I and W."""
        return Line.largest((Line(), self.for_weights + self.activation * -1))

    def held(self, alive: Alive) -> Line:
        """Bytes without the running micro-batch, by rows."""
        waiting = max(0, alive.waiting - 1)
        return Line(float(self.parameter_bytes)) + self.activation * alive.in_flight + self.waits * waiting

    def at_work(self, alive: Alive) -> tuple[Line, ...]:
        """Bytes of the running micro-batch: of its F and B or I, and of its W."""
        return (self.working, self.waits + Line(self.largest_gradient)) if alive.waiting else (self.working,)


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices for one graph on one cluster. Equal devices and equal parts are priced once, for each budget that they depend on."""

    graph: ModelGraph
    cluster: Cluster
    costs: Costs
    _seconds: dict[tuple[Device, float], OpSeconds] = field(default_factory=dict, init=False)
    _held: dict[tuple[str, int | None], StateBytes] = field(default_factory=dict, init=False)
    _held_tensors: dict[tuple[Part, tuple[tuple[str, ...], ...], bool], HeldTensors] = field(default_factory=dict, init=False)
    _parts: dict[Hashable, PartCost] = field(default_factory=dict, init=False)
    _passes: dict[Hashable, tuple[Passes, PassStates]] = field(default_factory=dict, init=False)
    _started: dict[tuple[Part, Device, float], tuple[Started, Started]] = field(default_factory=dict, init=False)
    _links: dict[tuple[str, str], Link] = field(default_factory=dict, init=False)
    _buckets: list[tuple[Hashable, Buckets]] = field(default_factory=list, init=False)  # of the last plan
    _locals: dict[tuple[tuple[str, ...], tuple[Shard, ...], tuple[tuple[int, int], ...]], Prices] = field(default_factory=dict, init=False)
    _labels: dict[tuple[tuple[str, ...], tuple[Shard, ...]], Labels] = field(default_factory=dict, init=False)
    _works: dict[tuple[tuple[str, ...], tuple[Shard, ...]], WorkOnParts] = field(default_factory=dict, init=False)
    _bridges: dict[tuple[tuple[str, ...], tuple[Shard, ...], frozenset[str]], tuple[Bridge, ...]] = field(default_factory=dict, init=False)

    @cached_property
    def table(self) -> OpTable:
        return op_table(self.graph, self.outputs, fused=self.costs.compiles, by_hand=self.costs.fuses_pointwise)

    @cached_property
    def outputs(self) -> dict[str, Line]:
        """Per op, the bytes of its results by rows."""
        return output_lines(self.graph)

    @cached_property
    def result_bytes(self) -> dict[str, Bytes]:
        """The same as numbers."""
        return {name: as_bytes(line) for name, line in self.outputs.items()}

    @cached_property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """Per op, what it keeps for backward."""
        found = dict(kept_tensors(self.graph))
        if not self.costs.compiles:
            return found
        from whale.estimate.costs.fusion import kept_by_kernels  # needed here alone

        return kept_by_kernels(self.graph, self.outputs, found)

    @cached_property
    def kept_there(self) -> Mapping[str, tuple[str, ...]]:
        """Per op, what it keeps on the device."""
        return {} if self.costs.offloads_activations else self.kept

    @cached_property
    def kept_by_maker(self) -> Floats:
        """Bytes that ops keep there, each at the op that makes it, as lines by rows: ``[2, ops]``."""
        return kept_by_maker(self.graph, [self.outputs[op.name] for op in self.graph.ops], self.kept_there)

    def held_tensors(self, part: Part, segments: Sequence[tuple[str, ...]] = (), *, is_away: bool = False) -> HeldTensors:
        """What a part holds of one micro-batch; arguments as of `whale.estimate.memory.held.held_tensors`."""
        key = part, tuple(segments), is_away
        if key not in self._held_tensors:
            self._held_tensors[key] = held_tensors(
                self.graph, part.ops, self.kept, segments, received=part.arriving, handed_on=part.handed_on, is_away=is_away
            )
        return self._held_tensors[key]

    def waits_away(self, recompute: Recompute) -> bool:
        """Whether what a stage keeps waits on the host: not what R has recomputed, which B takes soon."""
        return self.costs.offloads_activations and not recompute.num_alive

    def away(self, part: Part, segments: Sequence[tuple[str, ...]]) -> Line:
        """Bytes that a stage keeps on the host for one micro-batch."""
        return self.held_tensors(part, segments, is_away=True).bytes_away(self.graph, self.outputs)

    def copying(self, device: Device, num_bytes: Line) -> Started:
        """A copy of so many bytes between a device and its host."""
        return Started(num_bytes * copy_seconds(device, 1.0))

    @cached_property
    def first_kept(self) -> Floats:
        """Bytes on the host that each op is the first to keep, as lines by rows, in the order of `positions`: ``[2, ops]``."""
        found, seen = np.zeros((2, len(self.graph.ops))), set[str]()
        for place, op in enumerate(self.graph.ops) if self.costs.offloads_activations and self.training else ():
            names = [name for name in self.kept.get(op.name, ()) if name not in seen]
            seen.update(names)
            line = size_line(self.outputs, names)
            if op.kind == "call":
                line = line + places_line(self.graph, self.outputs, [op.name])
            found[:, place] = line.fixed, line.per_row
        return found

    def bringing(self, device: Device, num_bytes: Floats, budget: Budget = ALL) -> tuple[Floats, Floats]:
        """Seconds in which a device fetches weights of so many bytes in a pass: exposed, and overlapped with compute."""
        own = num_bytes * self._kept_share(budget) if "compute" in self.costs.on_host else np.zeros_like(num_bytes)
        seconds: Floats = copy_seconds(device, 1.0) * own
        none = np.zeros_like(seconds)
        return (none, seconds) if device.host_link and not self.costs.zero else (seconds, none)

    def update_seconds(self, device: Device, num_bytes: float, budget: Budget = ALL) -> float:
        """Seconds of this device's part of the optimizer step for trained weights of so many bytes."""
        states, own = self.costs.optimizer_states, num_bytes * self._kept_share(budget)
        if "optimizer" not in self.costs.on_host:
            return optimizer_seconds(device, own, own, own * states)
        shared = self.costs.host_bandwidth * len(self.cluster.hosts) / len(self.cluster.devices)
        return host_step_seconds(device, shared, own * (2 + states), own * (1 if "compute" in self.costs.on_host else 2))

    def _kept_share(self, budget: Budget) -> float:
        """The approximate share of the state of each parameter on each device."""
        part = 1 / self._num_keepers(budget)
        return part * self._shared_share + (1 - self._shared_share)

    def _num_keepers(self, budget: Budget) -> int:
        """The devices that keep a copy of sharded state together, where each has an equal part."""
        found = budget.num_keepers or len(self.cluster.devices)
        return found if self.costs.zero_within != "host" else min(found, max(len(host.devices) for host in self.cluster.hosts))

    @cached_property
    def _shared_share(self) -> float:
        """The share of all trained elements whose state is sharded over owners."""
        numbers = {True: 0, False: 0}
        for each in self.graph.parameters:
            if each.kind == "parameter" and each.trainable:
                numbers[zero_of(self.costs.zero, each.name) > 0] += each.spec.num_elements
        return numbers[True] / max(1, sum(numbers.values()))

    @cached_property
    def weight_shares(self) -> Floats:
        """Per op, in the order of `positions`, the share of weight gradients in its backward pass."""
        found: Floats = np.array([weight_share(self.graph, op.name) for op in self.graph.ops])
        return found

    @cached_property
    def activations(self) -> frozenset[str]:
        """The ops whose values depend on the batch."""
        return activations_of(self.graph)

    @cached_property
    def axes(self) -> Axes:
        return discover(self.graph)

    def labels(self, ops: tuple[str, ...], shards: tuple[Shard, ...]) -> Labels:
        """The labels of a split stage that runs these ops."""
        key = ops, shards
        if key not in self._labels:
            self._labels[key] = label(self.graph, self.axes, ops, shards)
        return self._labels[key]

    def bridges(self, ops: tuple[str, ...], shards: tuple[Shard, ...], returned: frozenset[str]) -> tuple[Bridge, ...]:
        """The bridges of a split stage that runs these ops and hands on these values, independent of the parts' sizes."""
        key = ops, unsized(shards), returned
        if key not in self._bridges:
            self._bridges[key] = find_bridges(self.labels(ops, shards), returned)
        return self._bridges[key]

    def local(self, ops: tuple[str, ...], shards: tuple[Shard, ...], position: int) -> Prices:
        """Prices for the device at a position of the stage's split groups; shared between equal parts."""
        cuts = unsized(shards)
        parts = tuple((shard.sizes[position], sum(shard.sizes)) for shard in shards)
        key = ops, cuts, parts
        if key not in self._locals:
            labels = self.labels(ops, cuts)
            named = {shard.axis: part for shard, part in zip(shards, parts, strict=True)}
            local = Prices(local_graph(labels, named), self.cluster, self.costs)
            unlike = (own for own, whole in zip(local.graph.ops, self.graph.ops, strict=True) if own is not whole)
            outputs = self.outputs | {own.name: output_line(own, self.graph.num_rows) for own in unlike}
            shares = {axis: size / total for axis, (size, total) in named.items()}
            if BATCH in shares:
                cut = (name for name in labels.ops if labels.held(name) == BATCH)
                outputs |= {name: self.outputs[name] * shares[BATCH] for name in cut}
            vars(local).update(
                _links=self._links,
                kept=self.kept,
                weight_shares=self.weight_shares,
                outputs=outputs,
                table=self._on_parts(ops, cuts).at(shares),
                states=self.states,  # of no parameter they depend on its shape
                _accumulated=self._accumulated.copy(),  # what other stages add is not asked for
            )
            for name in labels.ops:
                local._accumulated[self.graph.position[name]] = local._added(local.graph.by_name[name])
            self._locals[key] = local
        return self._locals[key]

    def _on_parts(self, ops: tuple[str, ...], cuts: tuple[Shard, ...]) -> WorkOnParts:
        key = ops, cuts
        if key not in self._works:
            self._works[key] = work_on_parts(self.graph, self.axes, self.table, self.labels(ops, cuts).work)
        return self._works[key]

    @property
    def training(self) -> bool:
        return self.graph.mode == "train"

    def capacity(self, device: str, budget: Budget = ALL) -> int:
        """Bytes that a plan may fill, beside the communicator of all devices."""
        return self.room(self.cluster.by_name[device].kind, budget)

    def room(self, kind: Device, budget: Budget = ALL) -> int:
        """`capacity` of the devices of a type."""
        return self.costs.capacity(kind) - self.everyones_buffers - budget.reserved_on(kind)

    @cached_property
    def everyones_buffers(self) -> int:
        """Bytes on each device of the communicator of all, which is made for the devices that a plan leaves idle too."""
        devices = [device.name for device in self.cluster.devices]
        return self.group_buffers(devices) if len(devices) > 1 and self.cluster.has_nccl else 0

    def group_buffers(self, devices: Sequence[str]) -> int:
        """Bytes on each device of the communicator of those that sum together, where NCCL carries sums."""
        if self.costs.communicator_bytes is not None:
            return self.costs.communicator_bytes
        from whale.estimate.costs.communicators import group_bytes  # needed here alone

        return group_bytes(self.cluster, devices)

    def seconds(self, device: Device, num_rows: float) -> OpSeconds:
        """Times of all ops on a device, as lines about a number of rows; without training nothing runs backward."""
        key = (device.kind, num_rows)
        if key not in self._seconds:
            found = op_seconds(self.table, device, num_rows, self.costs)
            if self.training:
                found = replace(found, backward_fixed=found.backward_fixed + self.adding(device))
            else:
                zero = np.zeros_like(found.backward_fixed)
                found = replace(found, backward_fixed=zero, backward_per_row=zero, backward_host=zero)
            self._seconds[key] = found
        return self._seconds[key]

    def waiting(self, device: Device, num_rows: float) -> Started:
        """The extra time of each of F, I and W for one op with deferred weight gradients.

        A measurement of the whole graph is divided equally among these ops: with few rows it is Python time, with many it is
        caches, since what an op reads, and the gradient of what it makes, are cold when W runs.
        """
        known = None if self.costs.measured is None else self.costs.measured.apart(device, num_rows)
        if known is None or not self._num_waiting:
            return Started(host=self.costs.waiting_seconds * device.slowdown)
        return Started(known * (1 / (3 * self._num_waiting)))

    @cached_property
    def _num_waiting(self) -> int:
        return int(np.count_nonzero(self.weight_shares))

    def adding(self, device: Device) -> Floats:
        """Per op, the seconds of a backward pass that accumulate its parameter gradients."""
        result: Floats = self._accumulated / device.reached_bandwidth
        return result

    @cached_property
    def _accumulated(self) -> Floats:
        """Per op, the bytes read and written to accumulate its parameter gradients in every micro-batch."""
        return np.array([self._added(op) for op in self.graph.ops], dtype=np.float64)

    def _added(self, op: Op) -> float:
        found = 0.0
        for parameter in self.graph.parameters_among(op.inputs) if op.kind == "call" else ():
            if parameter.kind == "parameter":
                state = self.state_of[parameter.name]
                if state.gradient is not None:
                    num_elements = parameter.gradient_elements
                    read, summed = (num_elements * DTYPE_BYTES[form.dtype] for form in (state.compute, state.gradient))
                    found += read + 2 * summed
        return found

    @cached_property
    def states(self) -> tuple[ParameterState, ...]:
        """The forms of parameters and buffers."""
        costs = self.costs
        return states_of(
            self.graph.parameters,
            costs.optimizer_states,
            num_outer_tensors=costs.outer_tensors,
            zero=costs.zero,
            on_host=costs.on_host,
            gradient_dtype=costs.gradient_dtype,
            sum_dtype=costs.sum_dtype,
            feeds_back=costs.feeds_back,
        )

    @cached_property
    def sent_share(self) -> float:
        """Bytes of all gradients as they are sent, relative to their own."""
        own, sent = 0, 0
        for name, state in self.state_of.items():
            if state.gradient is not None and state.sent_dtype is not None:
                num_elements = self.graph.parameter_by_name[name].gradient_elements
                own += num_elements * DTYPE_BYTES[state.gradient.dtype]
                sent += num_elements * DTYPE_BYTES[state.sent_dtype]
        return sent / own if own else 1.0

    @cached_property
    def state_of(self) -> Mapping[str, ParameterState]:
        return {name: state for state in self.states for name in state.parameters}

    def parameter_bytes(self, name: str, budget: Budget = ALL) -> int:
        """Bytes of a parameter or buffer with its gradient and optimizer state."""
        return self.held(name, budget).total

    def held(self, name: str, budget: Budget = ALL) -> StateBytes:
        """These bytes by form, on a device with an equal part of what is sharded; gradients are whole until they are summed."""
        key = name, budget.num_keepers
        if key not in self._held:
            own, state = self.graph.parameter_by_name[name], self.state_of[name]
            part = -(-own.spec.num_elements // self._num_keepers(budget))
            whole, kept = (state_bytes(own, state, training=self.training, kept=each) for each in (None, part))
            self._held[key] = replace(kept, gradient=whole.gradient)
        return self._held[key]

    def held_twice(self, parts: Sequence[Part], budget: Budget = ALL) -> int:
        """Bytes of parameters that several parts hold, beyond the first: a device that has these parts holds them once."""
        numbers = Counter(name for part in parts for name in part.parameters)
        return sum((number - 1) * self.parameter_bytes(name, budget) for name, number in numbers.items() if number > 1)

    def let_go(self, num_bytes: Value, budget: Budget = ALL) -> Value:
        """Of gradients of so many bytes, those never alive together with the others: where one micro-batch makes them."""
        if not budget.sums_at_once:
            return num_bytes * 0.0
        found: Value = np.maximum(0.0, num_bytes * self.spared_share(budget) - self._not_let_go)
        return found

    @cached_property
    def _not_let_go(self) -> int:
        """Bytes of gradients that are alive besides equal parts of what keepers have, in buckets of at least one gradient.

        Those in flight, one that fills, one by which a keeper of whole parameters may exceed the others, and the gathering buffer.
        """
        own = [max(self.costs.bucket_bytes, self.held(each.name).gradient) for each in self.graph.parameters]
        largest = sorted(own, reverse=True)[: NUM_AT_ONCE + 2]
        return sum(largest) + max(largest, default=0)

    def lasting_bytes(self, name: str, budget: Budget) -> float:
        """`parameter_bytes` without what is freed that way."""
        held = self.held(name, budget)
        return held.total - held.gradient * self.spared_share(budget) * budget.sums_at_once

    def spared_share(self, budget: Budget) -> float:
        """Of the gradients of one micro-batch, the share that goes to keepers before the others exist."""
        return 0.0 if self.costs.zero != 2 or "compute" in self.costs.on_host else 1 - self._kept_share(budget)

    def part(
        self,
        part: Part,
        num_rows: float,
        recompute: Recompute = NOTHING,
        budget: Budget = ALL,
        *,
        waits: bool = False,
        forms: tuple[BridgedTensor, ...] = (),
    ) -> PartCost:
        """What a part needs about a number of rows.

        Args:
            num_rows: of a micro-batch.
            recompute: what it recomputes.
            budget: who keeps its state.
            waits: whether its weight gradients have W actions.
            forms: that its split group makes of tensors.
        """
        key = part, num_rows, recompute, budget.keeping, waits, forms
        if key not in self._parts:
            self._parts[key] = self._price_part(part, num_rows, recompute, budget, forms, waits=waits)
        return self._parts[key]

    def _price_part(
        self, part: Part, num_rows: float, recompute: Recompute, budget: Budget, forms: tuple[BridgedTensor, ...], *, waits: bool
    ) -> PartCost:
        tensors = self.held_tensors(part, recompute.segments, is_away=self.waits_away(recompute))
        activation, recomputed = tensors.bytes_there(self.graph, self.outputs), Line()
        if recompute.num_alive:
            activation, recomputed = size_line(self.outputs, tensors.crossing), activation * recompute.num_alive
        held = [self.held(name, budget) for name in part.parameters]
        gradients = float(sum(each.gradient for each in held))
        passes, states = self.passes(
            part,
            {name: float(own.gradient) for name, own in zip(part.parameters, held, strict=True) if own.gradient},
            segments=recompute.segments,
            recomputes=bool(recompute.num_alive),
            defers_weights=waits,
            offloads=tensors.is_away,
            forms=forms,
        )
        first, working = None, states.working(num_rows)
        if budget.is_alone and self.training:
            backward = passes.backward(stay=passes.uses, defers_weights=waits)
            first = line_of(backward.totals, num_rows) + recomputed + self._on_the_way(part)
        return PartCost(
            parameter_bytes=sum(each.total for each in held) - round(self.let_go(gradients, budget)),
            activation=activation,
            for_weights=size_line(self.outputs, () if recompute.num_alive else tensors.for_weights),
            working=working + recomputed + self._on_the_way(part),
            beside=recomputed + Line.largest(size_line(self.outputs, each) for each in tensors.restored) + self._on_the_way(part),
            first=first,
            gradient_bytes=round(gradients),
            largest_gradient=passes.largest_gradient,
            sends=tuple((source, *self._both_ways(tensors)) for source, tensors in part.received),
        )

    def passes(
        self,
        part: Part,
        parameter_bytes: Mapping[str, float],
        *,
        segments: tuple[tuple[str, ...], ...] = (),
        recomputes: bool = False,
        defers_weights: bool = False,
        offloads: bool = False,
        forms: tuple[BridgedTensor, ...] = (),
        divided: frozenset[str] = frozenset(),
        fetched: tuple[FetchedWeights, ...] = (),
        in_halves: bool = False,
    ) -> tuple[Passes, PassStates]:
        """The passes of a part, and what they hold; arguments as the fields of `Passes`, and of `StageKey`."""
        key = part, tuple(parameter_bytes.items()), segments, recomputes, defers_weights, offloads, forms, divided, fetched, in_halves
        if key not in self._passes:
            tensors = self.held_tensors(part, segments, is_away=offloads)
            crossing, kept = frozenset(tensors.crossing), frozenset(tensors.there)
            own = crossing, parameter_bytes, divided, forms, offloads, fetched, in_halves
            made = Passes(self.graph, self.result_bytes, part.ops, self.kept, segments, *own)
            nothing: PerOp = np.zeros(0, dtype=np.complex128)
            if self.training:
                states = PassStates(
                    made.forward(crossing if recomputes else kept),
                    made.forward(kept) if recomputes else nothing,
                    made.backward(defers_weights=defers_weights),
                )
            else:
                states = PassStates(made.forward(part.returned(self.graph)), nothing, BackwardStates.of(()))
            self._passes[key] = made, states
        return self._passes[key]

    def _on_the_way(self, part: Part) -> Line:
        """Bytes of a micro-batch that arrives ahead of its use, and of gradients that arrive and leave."""
        forward, backward = self.payload(part.arriving)
        return forward + backward + self.payload(part.handed_on)[1]

    def payload(self, tensors: Sequence[str]) -> tuple[Line, Line]:
        """Bytes of tensors that are sent, and of the gradients that return, by rows."""
        forward = Line.sum(self.outputs[name] for name in tensors)
        if not self.training:
            return forward, Line()
        return forward, Line.sum(self.outputs[name] for name in tensors if self.graph.by_name[name].requires_grad)

    def _both_ways(self, tensors: Sequence[str]) -> tuple[Line, int]:
        forward, backward = self.payload(tensors)
        return forward + backward, len(tensors) + self.num_gradients(tensors)

    def num_gradients(self, tensors: Sequence[str]) -> int:
        """How many of these tensors have a gradient that returns."""
        return sum(self.training and self.graph.by_name[name].requires_grad for name in tensors)

    def buckets(self, held: Hashable, make: Callable[[], Buckets]) -> Buckets:
        """The buckets of a plan; those of the last one are cached, since a search often makes plans in a row whose devices hold the same.

        `held` is the key: equal for plans with equal buckets.
        """
        if not self._buckets or self._buckets[0][0] != held:
            self._buckets[:] = [(held, make())]
        return self._buckets[0][1]

    @cached_property
    def kinds(self) -> Mapping[str, Device]:
        """Per device name its type, one object for all equal types."""
        known: dict[Device, Device] = {}
        return {device.name: known.setdefault(device.kind, device.kind) for device in self.cluster.devices}

    def link(self, a: str, b: str) -> Link:
        by_name = self.cluster.by_name
        hosts = by_name[a].host, by_name[b].host
        known = self._links.get(hosts)
        if known is None:
            known = self._links[hosts] = self.cluster.link(a, b)
        return known

    def recomputing(self, part: Part, recompute: Recompute, device: Device, num_rows: float) -> Started:
        """What a part recomputes, about a number of rows."""
        if recompute.num_alive:
            return self.started(part, device, num_rows)[0]
        repeated = self.positions(name for segment in recompute.segments for name in segment)
        return self.seconds(device, num_rows).forward(repeated)

    def positions(self, ops: Iterable[str]) -> NDArray[np.int64]:
        """Indices of ops in the table and in `seconds`."""
        return np.array([self.table.position[name] for name in ops], dtype=np.int64)

    def started(self, part: Part, device: Device, num_rows: float) -> tuple[Started, Started]:
        """A part on a device, forward and backward, about a number of rows."""
        key = (part, device.kind, num_rows)
        if key not in self._started:
            seconds = self.seconds(device, num_rows)
            index = self.positions(part.ops)
            self._started[key] = seconds.forward(index), seconds.backward(index)
        return self._started[key]


def unsized(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """The shards without their sizes."""
    return tuple(replace(shard, sizes=()) for shard in shards)
