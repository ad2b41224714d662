"""What one virtual device of one model replica runs, on which rows, and how its ops are divided and treated.

The axes of a split stage are divided over the devices of each split group. Its segments are runs of ops that are treated alike: kept, on
the device or the host, or computed again, at once or in halves.

The segments of a stage are its program: they cover its ops in order, without gap or overlap.

    ops       embedding  linear  gelu  linear_1  add  linear_2
    program   |- kept --||------ recomputed ------||-- kept --|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whale.ir.division import divide, intervals
from whale.units import counted

BATCH = "batch"
"""The name of the axis that samples lie along."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One axis of a split stage, divided over the devices of each split group.

    Unless stated otherwise, every op that meets the axis works on parts of it, and every parameter that has it is held in
    parts. An op meets one axis that is cut at most; where its operands are cut along another, a bridge stands between.

    Attributes:
        axis: name of the logical axis.
        sizes: per device of a group, its units of the axis; their sum is the axis. For the batch, shares of the rows.
        whole_in: ops that meet the axis, but do not work on parts of it.
        whole_parameters: parameters and buffers that have the axis, but are not held in parts of it.
        scattered: ops that sum over another axis that is cut: each device keeps its part of this axis of the sum.
        arriving: values from other stages of which each device is handed its part only.
        handed_on: values for other stages that stay in parts, whatever parts they arrive in.
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


def describe_shards(shards: Iterable[Shard]) -> str:
    """Cuts as text; those whose names differ only in numbers (of layers) and that have equal sizes are shown once.

    Says how many ops meet an axis but work on all of it: ``hidden 16:16 (whole in 43 ops)``.
    """
    found: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for shard in shards:
        pattern = ".".join("*" if part.isdigit() else part for part in shard.axis.split("."))
        found.setdefault((pattern, shard.sizes), []).append(shard)
    texts = []
    for (pattern, sizes), own in found.items():
        num_whole = sum(len(shard.whole_in) for shard in own)
        note = f" (whole in {counted(num_whole, 'op')})" if num_whole else ""
        texts.append((str(own[0]) if len(own) == 1 else f"{len(own)} x {Shard(pattern, sizes)}") + note)
    return ", ".join(texts)


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of a stage, one behind the other.

    Attributes:
        first, last: names of the first and the last.
        recompute: whether their activations are not kept, but computed again in the backward pass.
        in_halves: whether the rows of a micro-batch go through them in two halves that take turns: one computes while what the
            other exchanges inside its split group is on the way.
        offload: whether what they keep for the backward pass (of what is computed again, what it reads) waits in the memory of the host.
    """

    first: str
    last: str
    recompute: bool = False
    in_halves: bool = False
    offload: bool = False


def program_of(
    ops: Sequence[str], recomputed: Sequence[tuple[str, str]] = (), *, in_halves: bool = False, offload: bool = False
) -> tuple[Segment, ...]:
    """The program of a stage of these ops: the runs to recompute, by first and last op in order, and what lies between them."""
    position = {name: index for index, name in enumerate(ops)}
    segments, start = [], 0
    for first, last in recomputed:
        if start < position[first]:
            segments.append(Segment(ops[start], ops[position[first] - 1], in_halves=in_halves, offload=offload))
        segments.append(Segment(first, last, recompute=True, in_halves=in_halves, offload=offload))
        start = position[last] + 1
    if start < len(ops):
        segments.append(Segment(ops[start], ops[-1], in_halves=in_halves, offload=offload))
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """The ordered devices that one TaskGraph runs on, by name."""

    devices: tuple[str, ...]

    def __str__(self) -> str:
        return "{" + " ".join(self.devices) + "}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the estimate of a step expects of one device of one stage.

    Attributes:
        forward, backward: seconds for one micro-batch of its rows; backward with what is computed again.
        parameter_bytes: weights, gradients and optimizer state.
        activation_bytes: what the stage keeps besides them when the device's memory is fullest.
        capacity: bytes that a plan may use.
    """

    forward: float
    backward: float
    parameter_bytes: int
    activation_bytes: int
    capacity: int


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
        program: the segments that `ops` fall into, in order.
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
    program: tuple[Segment, ...] = ()

    @property
    def recomputed(self) -> tuple[tuple[str, ...], ...]:
        """The ops of each segment that is computed again."""
        position = {name: index for index, name in enumerate(self.ops)}
        return tuple(self.ops[position[own.first] : position[own.last] + 1] for own in self.program if own.recompute)

    @property
    def overlap(self) -> bool:
        """Whether its rows are computed in two halves that take turns."""
        return any(segment.in_halves for segment in self.program)

    @property
    def offloads(self) -> bool:
        """Whether what it keeps for its backward passes waits in the memory of the host."""
        return any(segment.offload for segment in self.program)

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
