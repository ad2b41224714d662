"""Lookups in a table of which a device holds a part: zeros for rows of others, and the sum over the group is the whole answer.

table rows held: 4 .. 8           indices   2  5  7  9
                                  local     -  1  3  -
                                  answer    0  x  x  0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale.sharding.index_sets import Runs, count_below

aten = torch.ops.aten


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


def part_embedding(table: Tensor, indices: Tensor, padding: int, by_frequency: bool, sparse: bool, runs: Runs, size: int) -> Tensor:
    """``embedding`` in a part of the table; `padding` is a row of the whole table, or negative for none."""
    local, held = localize(indices, runs, size)
    own = next((count_below(runs, start) + padding - start for start, stop in runs if start <= padding < stop), -1)
    if by_frequency:  # indices of other devices must not count: they look up an extra row
        local = torch.where(held, local, table.shape[0])
        table = torch.cat([table, table.new_zeros(1, *table.shape[1:])])
    found: Tensor = aten.embedding.default(table, local, own, by_frequency, sparse)
    return _masked(found, held, 1)


def part_index(source: Tensor, indices: Sequence[Tensor | None], dim: int, trailing: int, runs: Runs, size: int) -> Tensor:
    """``source[indices]`` where the indexed dimension `dim` is cut; `trailing` dimensions follow those of the indices."""
    mine = list(indices)
    chosen = mine[dim]
    assert chosen is not None
    mine[dim], held = localize(chosen, runs, size)
    found: Tensor = aten.index.Tensor(source, mine)
    return _masked(found, held, trailing)


def part_index_select(source: Tensor, dim: int, index: Tensor, runs: Runs, size: int) -> Tensor:
    """``index_select`` along a cut dimension."""
    local, held = localize(index, runs, size)
    return _masked(source.index_select(dim, local), held.reshape(-1), source.dim() - 1 - dim % source.dim())


def part_gather(source: Tensor, dim: int, index: Tensor, runs: Runs, size: int) -> Tensor:
    """``gather`` along a cut dimension."""
    local, held = localize(index, runs, size)
    return _masked(source.gather(dim, local), held, 0)


def local_positions(index: Tensor, runs: Runs, size: int) -> Tensor:
    """Positions of a cut dimension, all of them held, as positions in the part."""
    return localize(index, runs, size)[0]


def part_one_hot(indices: Tensor, runs: Runs, size: int) -> Tensor:
    """The held columns of ``one_hot``."""
    local, held = localize(indices, runs, size)
    columns = torch.arange(sum(stop - start for start, stop in runs), device=indices.device)
    return ((local.unsqueeze(-1) == columns) & held.unsqueeze(-1)).to(indices.dtype)


def _masked(found: Tensor, held: Tensor, trailing: int) -> Tensor:
    shape = (*held.shape, *(1,) * trailing)
    return found.masked_fill(~held.reshape(shape), 0)
