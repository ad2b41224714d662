"""A device's part of a whole tensor, read and written by index: for parameters, gradients, buffers and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale.sharding.index_sets import Runs, count_below

Index = slice | Tensor
"""Positions along one dimension: a slice if they are consecutive, else a LongTensor."""


def as_index(runs: Runs) -> Index:
    if not runs:
        return slice(0, 0)
    if len(runs) == 1:
        return slice(*runs[0])
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


def on_device(index: Sequence[Index], device: torch.device) -> tuple[Index, ...]:
    """An index on the device of its tensor: otherwise each use copies it, for which the host waits."""
    return tuple(place.to(device) if isinstance(place, Tensor) else place for place in index)


def part(whole: Tensor, index: Sequence[Index]) -> Tensor:
    """The elements at an index; a view if every place is a slice."""
    held = whole
    for dim, place in enumerate(index):
        if isinstance(place, slice):
            held = held.narrow(dim, place.start, place.stop - place.start)
        else:
            held = held.index_select(dim, place.to(held.device))
    return held


def write_part(whole: Tensor, index: Sequence[Index], held: Tensor, *, add: bool = False) -> None:
    """Writes to, or adds to, the elements at an index, without gradient."""
    target = whole
    for dim, place in enumerate(index):
        if isinstance(place, slice):
            target = target.narrow(dim, place.start, place.stop - place.start)
    combs = [(dim, place.to(target.device)) for dim, place in enumerate(index) if isinstance(place, Tensor)]
    if not combs:
        if add:
            target.add_(held)
        else:
            target.copy_(held)
    elif len(combs) == 1:
        (dim, place), own = combs[0], held.to(target)
        if add:
            target.index_add_(dim, place, own)
        else:
            target.index_copy_(dim, place, own)
    else:
        grids = torch.meshgrid(*(_positions(place, target, dim) for dim, place in enumerate(index)), indexing="ij")
        target.index_put_(grids, held.to(target), accumulate=add)


def _positions(place: Index, target: Tensor, dim: int) -> Tensor:
    return place.to(target.device) if isinstance(place, Tensor) else torch.arange(target.shape[dim], device=target.device)


def localize(indices: Tensor, runs: Runs, size: int) -> tuple[Tensor, Tensor]:
    """Indices into a whole dimension as indices into the held part, and which of them it holds.

    Args:
        indices: into the whole; negative ones count from its end.
        runs: the positions held.

    Returns:
        Local indices, 0 where a position is not held, and the mask of those that are.
    """
    positive = torch.where(indices < 0, indices + size, indices)
    local, held = torch.zeros_like(positive), torch.zeros_like(positive, dtype=torch.bool)
    for start, stop in runs:  # mostly one
        inside = (positive >= start) & (positive < stop)
        local = torch.where(inside, positive - start + count_below(runs, start), local)
        held = held | inside
    return local, held
