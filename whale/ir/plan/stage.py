"""What one virtual device of one model replica runs, and on which rows."""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.division import divide, intervals
from whale.ir.plan.segment import Segment
from whale.ir.plan.shard import BATCH, Shard


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
        activation_bytes: what the stage keeps beside them when the device's memory is fullest.
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
