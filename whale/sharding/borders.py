"""How a tensor that crosses from stage to stage lies on the devices of a stage, and its gradient likewise.

    stage 0 (5:3 rows)            stage 1 (groups of 2, all rows, in parts of hidden)
    rank 0   batch[0:5]           rank 2   batch[0:8] hidden[0:6]
    rank 1   batch[5:8]           rank 3   batch[0:8] hidden[6:8]

Values are final on every device that holds them, and so are the gradients of their rows. A tensor without a batch axis is
held by every split group. Its gradient is a sum of which each group has one term, since each saw other rows; the terms stay
apart on the way back, and gradient synchronisation adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whale.axes.values import Dimension
from whale.ir.division import divide, intervals
from whale.ir.graph import TensorSpec
from whale.ir.plan import BATCH, BatchAxis, Stage
from whale.sharding.index_space import IndexSpace
from whale.sharding.regions import Region
from whale.sharding.sharding import Sharding


def border_sharding(stage: Stage, devices: Sequence[int], tensor: str, num_rows: int | None) -> Sharding:
    """Where a tensor lies that a stage is handed or hands on.

    Args:
        stage: either end.
        devices: its virtual device.
        tensor: op name.
        num_rows: of a micro-batch; None for a tensor without a batch axis.

    Raises:
        ValueError: there is less than one row per device that takes rows of its own.
    """
    held: list[dict[str, tuple[int, int]]] = [{} for _ in devices]
    if num_rows is not None:
        for own, rows in zip(held, _rows(stage, tensor, num_rows), strict=True):
            own[BATCH] = rows
    shard = stage.border_shard(tensor)
    if shard is not None:
        parts = intervals(shard.sizes)
        for index, own in enumerate(held):
            own[shard.axis] = parts[index % stage.split]
    return Sharding(tuple(devices), tuple(map(Region.of, held)))


def border_gradient(stage: Stage, devices: Sequence[int], tensor: str, num_rows: int | None) -> Sharding:
    """Where the gradient of such a tensor lies; takes and raises what `border_sharding` does."""
    value = border_sharding(stage, devices, tensor, num_rows)
    groups = tuple(index // stage.split for index in range(len(devices)))
    return replace(value, terms=groups) if num_rows is None else value


def _rows(stage: Stage, tensor: str, num_rows: int) -> Sequence[tuple[int, int]]:
    """Per device, the rows that it has: those of its group, or its own of them."""
    whole, shard = stage.row_intervals(num_rows), stage.row_shard
    if shard is None or (tensor not in shard.arriving and tensor not in shard.handed_on):
        return whole
    groups = whole[:: stage.split]
    return [part for start, stop in groups for part in intervals(divide(stop - start, shard.sizes, minimum=1), start)]


def row_space(spec: TensorSpec, axis: BatchAxis | None, num_rows: int) -> IndexSpace:
    """Where rows lie in a tensor of which only the batch is known.

    Args:
        spec: of the tensor.
        axis: where its batch is; None where it has none, or none that can be told apart.
        num_rows: of all of it.
    """
    sizes = {f"dim {dim}": size for dim, size in enumerate(spec.shape_at(num_rows))}
    dimensions: list[Dimension] = [(name,) for name in sizes]
    if axis is not None:
        dimensions[axis.dim] = ("outer", BATCH, "inner")
        sizes |= {"outer": axis.outer, BATCH: num_rows, "inner": axis.inner}
    return IndexSpace(tuple(dimensions), sizes)


def shard_space(dimensions: tuple[Dimension, ...], sizes: Mapping[str, int], num_rows: int) -> IndexSpace:
    """Where the elements of a tensor lie whose axes are known.

    Args:
        dimensions: of the tensor.
        sizes: of the axes.
        num_rows: of a micro-batch.
    """
    return IndexSpace(dimensions, {**sizes, BATCH: num_rows})
