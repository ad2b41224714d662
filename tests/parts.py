"""A device's part of a whole tensor, cut out of it and put back by the shards of a stage: the plain way, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale.axes.values import Axes, Dimension
from whale.ir.plan import Shard
from whale.runtime.program.shard.pieces import Index, as_index, part, write_part
from whale.sharding.index_sets import axis_sizes, index_set, intervals


def local_indices(dimensions: Sequence[Dimension], axes: Axes, shards: Sequence[Shard], position: int) -> tuple[Index, ...]:
    """Per dimension of a tensor, the positions that one device of a split group holds.

    Args:
        dimensions: of the whole tensor, as products of axes.
        axes: of the model.
        shards: of the stage.
        position: of the device in its split group.
    """
    held = intervals(shards, position)
    return tuple(as_index(index_set(dimension, axis_sizes(axes), held, axes.folded)) for dimension in dimensions)


def local_shape(dimensions: Sequence[Dimension], axes: Axes, shards: Sequence[Shard], position: int) -> tuple[int, ...]:
    """The shape of a device's part of a tensor."""
    places = local_indices(dimensions, axes, shards, position)
    return tuple(place.stop - place.start if isinstance(place, slice) else len(place) for place in places)


def cut_out(whole: Tensor, dimensions: Sequence[Dimension], axes: Axes, shards: Sequence[Shard], position: int) -> Tensor:
    """A device's part of a whole tensor: contiguous, with memory of its own unless nothing is cut.

    Args:
        whole: the tensor.
        dimensions: its dimensions as products of axes (`Axes.parameters`).
        axes: of the model.
        shards: of the stage.
        position: of the device in its split group.
    """
    held = part(whole, local_indices(dimensions, axes, shards, position))
    return held if held.shape == whole.shape else held.clone(memory_format=torch.contiguous_format)


def put_in(whole: Tensor, held: Tensor, dimensions: Sequence[Dimension], axes: Axes, shards: Sequence[Shard], position: int) -> None:
    """The inverse of `cut_out`: writes a device's part into its place in the whole tensor."""
    write_part(whole.detach(), local_indices(dimensions, axes, shards, position), held.detach())
