"""The decision: which devices run which ops of the model, on how many rows, in which schedule, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from whale.ir.division import divide, divide_evenly, intervals
from whale.units import format_bytes, format_seconds

BATCH = "batch"
"""The name of the axis that samples lie along."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a planner pass, for `whale explain`.

    Attributes:
        pass_name: the pass that decided (``balance``).
        subject: what was decided (``rows of replica 0``).
        decision: the outcome.
        cost: what it costs, in words with units.
        bound: what bound it (``memory of host1/0``, ``the slowest device``); "" where nothing did.
        runner_up: the next best and its cost; "" where there was no other.
    """

    pass_name: str
    subject: str
    decision: str
    cost: str = ""
    bound: str = ""
    runner_up: str = ""


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The ops of the model under one scope.

    Attributes:
        index: position in the plan's order.
        name: the scope's name, or a name made from its place.
        strategy: ``replicate`` or ``split``.
        ops: names, in graph order.
    """

    index: int
    name: str
    strategy: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """The ordered devices that one TaskGraph runs on, by name."""

    devices: tuple[str, ...]

    def __str__(self) -> str:
        return "{" + " ".join(self.devices) + "}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the cost model expects of one device of one stage, for one micro-batch of its rows.

    Attributes:
        forward, backward: seconds.
        parameter_bytes: weights, gradients and optimizer state.
        activation_bytes: kept for backward by all micro-batches in flight.
        capacity: bytes the device has.
    """

    forward: float
    backward: float
    parameter_bytes: int
    activation_bytes: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One axis of a split stage, divided over the devices of each split group.

    Where nothing else is said, every op that meets the axis works on parts of it, and every parameter that has it is held in
    parts. An op meets one axis that is cut at most; where its operands are cut along another, a bridge stands between.

    Attributes:
        axis: name of the logical axis.
        sizes: per device of a group, its units of the axis; their sum is the axis. For the batch, shares of the rows.
        whole_in: ops that meet the axis, but do not work on parts of it.
        whole_parameters: parameters and buffers that have the axis, but are not held in parts of it.
        scattered: ops that sum over another axis that is cut: each device keeps its part of this axis of the sum.
        arriving: values from other stages of which each device is handed its part only.
        handed_on: values for other stages that stay in parts; of another axis than the batch only where all of those let them
            arrive in the same parts.
    """

    axis: str
    sizes: tuple[int, ...]
    whole_in: tuple[str, ...] = ()
    whole_parameters: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    arriving: tuple[str, ...] = ()
    handed_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.axis} {':'.join(str(size) for size in self.sizes)}"


@dataclass(frozen=True, slots=True)
class Stage:
    """What one virtual device of one model replica runs.

    Attributes:
        index: position in the pipeline.
        task_graphs: names of the TaskGraphs it is made of.
        ops: op names in graph order, with the cheap ones that several stages repeat.
        virtual_device: where.
        shares: per split group of the virtual device (per device, where nothing is split), its weight in the rows of a
            micro-batch.
        parameters: names of the parameters and buffers it holds.
        estimates: per device.
        split: devices of a split group. Groups are consecutive devices; all devices of a group take the same rows.
        shards: what is divided over the devices of each group.
        recompute: first and last op of each run of `ops` whose activations are not kept but computed again in the backward
            pass; in order, without overlap.
        overlap: whether a split stage computes the rows of a micro-batch in two halves, of which one computes while what
            the other exchanges inside its group is on the way.
    """

    index: int
    task_graphs: tuple[str, ...]
    ops: tuple[str, ...]
    virtual_device: VirtualDevice
    shares: tuple[int, ...]
    parameters: tuple[str, ...]
    estimates: tuple[Estimate, ...] = ()
    split: int = 1
    shards: tuple[Shard, ...] = ()
    recompute: tuple[tuple[str, str], ...] = ()
    overlap: bool = False

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """The runs of `recompute` with all their ops."""
        position = {name: index for index, name in enumerate(self.ops)}
        return tuple(self.ops[position[first] : position[last] + 1] for first, last in self.recompute)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The split groups, each the names of its devices."""
        devices = self.virtual_device.devices
        return tuple(devices[start : start + self.split] for start in range(0, len(devices), self.split))

    def rows(self, num_rows: int) -> tuple[int, ...]:
        """Rows of a micro-batch that each device takes; the devices of a split group take the same ones.

        Raises:
            ValueError: there is less than one row per split group.
        """
        return tuple(size for size in divide(num_rows, self.shares, minimum=1) for _ in range(self.split))

    def row_intervals(self, num_rows: int, start: int = 0) -> tuple[tuple[int, int], ...]:
        """Per device, the rows of a micro-batch that it takes, counted from `start`.

        Raises:
            ValueError: there is less than one row per split group.
        """
        parts = intervals(divide(num_rows, self.shares, minimum=1), start)
        return tuple(part for part in parts for _ in range(self.split))

    @property
    def row_shard(self) -> Shard | None:
        """How the rows of a split group are divided among its devices, where some of its ops work on rows of their own."""
        return next((shard for shard in self.shards if shard.axis == BATCH), None)

    def border_shard(self, tensor: str) -> Shard | None:
        """The axis, other than the batch, along which a tensor is in parts while it crosses the border of the stage."""
        return next(
            (shard for shard in self.shards if shard.axis != BATCH and (tensor in shard.arriving or tensor in shard.handed_on)), None
        )

    def tensor_intervals(self, tensor: str, num_rows: int) -> tuple[tuple[int, int], ...]:
        """Per device, the rows of a micro-batch that it has of a tensor which crosses its border.

        Raises:
            ValueError: there is less than one row per device that takes rows of its own.
        """
        whole, shard = self.row_intervals(num_rows), self.row_shard
        if shard is None or (tensor not in shard.arriving and tensor not in shard.handed_on):
            return whole
        return tuple(
            part for start, stop in whole[:: self.split] for part in intervals(divide(stop - start, shard.sizes, minimum=1), start)
        )


@dataclass(frozen=True, slots=True)
class Edge:
    """What one stage hands to a later one for each micro-batch.

    Attributes:
        source, target: stage indices.
        tensors: names of the ops whose outputs travel.
        num_bytes: of one micro-batch of the planned size, forward; the gradients of the float tensors return.
    """

    source: int
    target: int
    tensors: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One complete set of TaskGraphs.

    Attributes:
        index: position; replicas take consecutive rows of the batch in this order.
        share: its weight in the rows of the batch.
        stages: its pipeline.
        edges: between its stages, sorted by (source, target).
    """

    index: int
    share: int
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Which part of a tensor dimension is the batch: the dimension is ``outer x rows x inner``."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class Plan:
    """The whole decision. Rank numbers are positions in `devices`.

    Attributes:
        model: fingerprint of the ModelGraph it was made for.
        cluster: name of the cluster.
        devices: the devices in use, by rank; replica by replica, stage by stage.
        idle_devices: devices of the cluster left over.
        task_graphs: the TaskGraphs of the model.
        replicas: the outer data parallelism.
        schedule: name of the schedule kind.
        num_micro_batch: micro-batches of each replica.
        num_chunks, group_size: of an interleaved schedule.
        stage_rank: per stage, its position among the virtual devices of the replica.
        batch_axes: per tensor that crosses stages, where its batch is; tensors without one are whole.
        planned_rows: rows of the global batch that shares and estimates were made for.
        step_seconds: predicted.
        choices: why.
        recomputes_stages: whether R actions go before the backward passes of a schedule that has none of its own.
    """

    model: str
    cluster: str
    devices: tuple[str, ...]
    idle_devices: tuple[str, ...]
    task_graphs: tuple[TaskGraph, ...]
    replicas: tuple[Replica, ...]
    schedule: str
    num_micro_batch: int
    stage_rank: tuple[int, ...]
    batch_axes: tuple[tuple[str, BatchAxis], ...]
    planned_rows: int
    num_chunks: int = 1
    group_size: int | None = None
    step_seconds: float = 0.0
    choices: tuple[Choice, ...] = ()
    recomputes_stages: bool = False

    @cached_property
    def rank_of(self) -> dict[str, int]:
        """Rank of each device in use."""
        return {device: rank for rank, device in enumerate(self.devices)}

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Per parameter or buffer, the ranks that hold it, ascending."""
        found: dict[str, set[int]] = {}
        for replica in self.replicas:
            for stage in replica.stages:
                ranks = {self.rank_of[device] for device in stage.virtual_device.devices}
                for name in stage.parameters:
                    found.setdefault(name, set()).update(ranks)
        return {name: tuple(sorted(ranks)) for name, ranks in found.items()}

    def replica_rows(self, num_rows: int) -> tuple[tuple[int, int], ...]:
        """The interval of the global batch's rows that each replica takes.

        Raises:
            ValueError: there are fewer rows than replicas x micro-batches.
        """
        sizes = divide(num_rows, [replica.share for replica in self.replicas], minimum=self.num_micro_batch)
        return intervals(sizes)

    def micro_batch_rows(self, replica: int, num_rows: int) -> tuple[tuple[int, int], ...]:
        """The intervals of the global batch's rows that a replica's micro-batches take."""
        start, stop = self.replica_rows(num_rows)[replica]
        return intervals(divide_evenly(stop - start, self.num_micro_batch), start)

    def __str__(self) -> str:
        lines = [
            f"plan: {len(self.replicas)} replica(s) x {self.num_stages} stage(s) on {len(self.devices)} device(s) of {self.cluster}, "
            f"{self.schedule}{' with recomputation' if self.recomputes_stages else ''}, {self.num_micro_batch} micro-batch(es), "
            f"{self.planned_rows} rows, predicted {format_seconds(self.step_seconds)} per step"
        ]
        for replica, (start, stop) in zip(self.replicas, self.replica_rows(self.planned_rows), strict=True):
            lines.append(f"  replica {replica.index}: rows {start}:{stop}")
            for stage in replica.stages:
                lines += _describe_stage(stage, self.micro_batch_rows(replica.index, self.planned_rows)[0])
            for edge in replica.edges:
                lines.append(f"    edge {edge.source} -> {edge.target}: {', '.join(edge.tensors)} ({format_bytes(edge.num_bytes)})")
        if self.idle_devices:
            lines.append(f"  idle: {', '.join(self.idle_devices)}")
        return "\n".join(lines)


def describe_shards(shards: Iterable[Shard]) -> str:
    """Cuts as text; those whose names differ only in numbers (of layers) and that have equal sizes are told once.

    Says how many ops meet an axis but work on all of it: ``hidden 16:16 (whole in 43 ops)``.
    """
    found: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for shard in shards:
        pattern = ".".join("*" if part.isdigit() else part for part in shard.axis.split("."))
        found.setdefault((pattern, shard.sizes), []).append(shard)
    texts = []
    for (pattern, sizes), own in found.items():
        num_whole = sum(len(shard.whole_in) for shard in own)
        note = f" (whole in {num_whole} op{'s' * (num_whole > 1)})" if num_whole else ""
        texts.append((str(own[0]) if len(own) == 1 else f"{len(own)} x {Shard(pattern, sizes)}") + note)
    return ", ".join(texts)


def _describe_stage(stage: Stage, micro_batch: tuple[int, int]) -> Iterable[str]:
    yield (
        f"    stage {stage.index} [{', '.join(stage.task_graphs)}]: {len(stage.ops)} ops "
        f"{stage.ops[0] if stage.ops else '-'} .. {stage.ops[-1] if stage.ops else '-'}, {len(stage.parameters)} tensors held"
    )
    if stage.shards:
        halves = ", in two halves that take turns" if stage.overlap else ""
        yield f"      groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
    if stage.recompute:
        yield f"      recomputes {sum(map(len, stage.segments))} ops in {len(stage.recompute)} segment(s)"
    rows = stage.rows(micro_batch[1] - micro_batch[0])
    for position, device in enumerate(stage.virtual_device.devices):
        line = f"      {device}: {rows[position]} rows"
        if stage.estimates:
            e = stage.estimates[position]
            line += (
                f", F {format_seconds(e.forward)}, B {format_seconds(e.backward)}, "
                f"{format_bytes(e.parameter_bytes + e.activation_bytes)} of {format_bytes(e.capacity)}"
            )
        yield line
