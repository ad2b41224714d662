"""A stage: what one virtual device of one model replica runs, on which rows, and how its ops are divided and run.

The axes of a split stage are divided over the devices of each split group. The program of a stage are its segments, which cover its ops in
order: their activations are kept, on the device or the host, or recomputed, for all rows at once or in halves.

    ops       embedding  linear  gelu  linear_1  add  linear_2
    program   |- kept --||------ recomputed ------||-- kept --|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whale.ir.division import divide, intervals
from whale.units import counted

BATCH = "batch"  # the name of the sample axis


@dataclass(frozen=True, slots=True)
class Shard:
    """One axis of a split stage, divided over the devices of each split group.

    Unless stated otherwise, every op that meets the axis works on parts of it, and every parameter that has it is held in parts. An op
    meets
    at most one cut axis; if its operands are cut along another, a bridge stands between.
    """

    axis: str  # name of the logical axis
    sizes: tuple[int, ...]  # per device of a group, its units of the axis, which sum to the axis. For the batch, shares of the rows.
    whole_in: tuple[str, ...] = ()  # ops that meet the axis, but do not work on parts of it
    whole_parameters: tuple[str, ...] = ()  # parameters and buffers that have the axis, but are held whole
    scattered: tuple[str, ...] = ()  # ops that sum over another cut axis: each device keeps its part of this axis of the sum
    arriving: tuple[str, ...] = ()  # values from other stages of which each device receives its part only
    handed_on: tuple[str, ...] = ()  # values for other stages that stay in parts, whatever parts they arrive in

    def __str__(self) -> str:
        return f"{self.axis} {':'.join(str(size) for size in self.sizes)}"


def describe_shards(shards: Iterable[Shard]) -> str:
    """Cuts as text; those with equal sizes and names that differ only in numbers (of layers) are shown once.

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
    """Consecutive ops of a stage."""

    first: str  # name of the first op, as `last`
    last: str
    recompute: bool = False  # whether their activations are recomputed in the backward pass
    # whether two halves of a micro-batch's rows take turns: one computes while the other communicates in its split group
    in_halves: bool = False
    offload: bool = False  # whether saved activations (of recomputed ops, their inputs) wait in the host's memory


def program_of(
    ops: Sequence[str], recomputed: Sequence[tuple[str, str]] = (), *, in_halves: bool = False, offload: bool = False
) -> tuple[Segment, ...]:
    """The program of a stage of these ops: the recomputed runs, by first and last op in order, and what lies between them."""
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
    """The predicted step of one device of one stage."""

    forward: float  # seconds for one micro-batch of its rows
    backward: float  # the same, with recomputation
    parameter_bytes: int  # weights, gradients and optimizer state
    activation_bytes: int  # everything else at the peak of the device's memory
    capacity: int  # bytes that a plan may use


@dataclass(frozen=True, slots=True)
class Stage:
    """What one virtual device of one model replica runs."""

    index: int  # position in the pipeline
    task_graphs: tuple[str, ...]  # names of its TaskGraphs
    ops: tuple[str, ...]  # op names in graph order, with the cheap ones that several stages repeat
    virtual_device: VirtualDevice
    shares: tuple[int, ...]  # per split group (per device, if nothing is split), its weight in the rows of a micro-batch
    parameters: tuple[str, ...]  # names of the parameters and buffers it holds
    estimates: tuple[Estimate, ...] = ()  # per device
    split: int = 1  # devices of a split group. Groups are consecutive devices; all devices of a group take the same rows.
    shards: tuple[Shard, ...] = ()  # what is divided over the devices of each group
    program: tuple[Segment, ...] = ()  # the segments of `ops`, in order

    @property
    def recomputed(self) -> tuple[tuple[str, ...], ...]:
        """The ops of each recomputed segment."""
        position = {name: index for index, name in enumerate(self.ops)}
        return tuple(self.ops[position[own.first] : position[own.last] + 1] for own in self.program if own.recompute)

    @property
    def overlap(self) -> bool:
        """Whether its rows are computed in two halves that take turns."""
        return any(segment.in_halves for segment in self.program)

    @property
    def offloads(self) -> bool:
        """Whether its saved activations wait in the host's memory."""
        return any(segment.offload for segment in self.program)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The split groups, each the names of its devices."""
        devices = self.virtual_device.devices
        return tuple(devices[start : start + self.split] for start in range(0, len(devices), self.split))

    def rows(self, num_rows: int) -> tuple[int, ...]:
        """Rows of a micro-batch of each device; those of a split group take the same. Raises ValueError: less than one per split group."""
        return tuple(size for size in divide(num_rows, self.shares, minimum=1) for _ in range(self.split))

    def row_intervals(self, num_rows: int, start: int = 0) -> tuple[tuple[int, int], ...]:
        """Per device, its rows of a micro-batch, counted from `start`. Raises ValueError: less than one per split group."""
        parts = intervals(divide(num_rows, self.shares, minimum=1), start)
        return tuple(part for part in parts for _ in range(self.split))

    @property
    def row_shard(self) -> Shard | None:
        """How the rows of a split group are divided among its devices, if some of its ops work on rows of their own."""
        return next((shard for shard in self.shards if shard.axis == BATCH), None)

    def border_shard(self, tensor: str) -> Shard | None:
        """The axis, other than the batch, along which a tensor is in parts at the border of the stage."""
        return next(
            (shard for shard in self.shards if shard.axis != BATCH and (tensor in shard.arriving or tensor in shard.handed_on)), None
        )
