"""Lookups in a cut table: zeros for rows of other devices; the sum over the group is the whole answer.

table rows held: 4 .. 8           indices   2  5  7  9
                                  local     -  1  3  -
                                  answer    0  x  x  0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from whale.runtime.program.shard.call import Call
from whale.runtime.program.shard.contractions import same
from whale.runtime.program.shard.layout import Held
from whale.runtime.program.shard.pieces import localize
from whale.sharding.index_sets import Runs, count_below

aten = torch.ops.aten


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


aten = torch.ops.aten


def _is_lookup(call: Call) -> bool:
    return call.role.kind == "contracted" and call.role.combine == "lookup"


def _held(call: Call, name: str, dim: int) -> Held:
    held = call.held(call.dimensions(name)[dim])
    if held.has_rows:
        call.refuse("it looks up in a dimension that holds the batch too")
    return held


def embedding(call: Call) -> fx.Node:
    """``embedding`` with its rows, columns or indices cut."""
    if not _is_lookup(call):
        if call.raw["scale_grad_by_freq"] and not call.has_part(call.raw["weight"]):
            call.refuse("gradients scaled by frequency need all indices")
        return same(call)
    held = _held(call, "weight", 0)
    options = [call.raw[name] for name in ("padding_idx", "scale_grad_by_freq", "sparse")]
    return call.leave(call.emit(part_embedding, call.value("weight"), call.value("indices"), *options, held.runs, held.units))


def index(call: Call) -> fx.Node:
    """``x[i, :, j]``: a cut dimension that is indexed is looked up, unless all indexed positions are held."""
    dimensions = call.dimensions("self")
    dim = call.cut_dim(dimensions)
    indices = call.raw["indices"]
    if dim is None or dim >= len(indices) or indices[dim] is None:
        return call.same()
    held = _held(call, "self", dim)
    mine = call.value("indices")
    if not _is_lookup(call):
        found = call.emit(local_positions, mine[dim], held.runs, held.units, what="positions")
        return call.same(indices=[*mine[:dim], found, *mine[dim + 1 :]])
    taken = [place for place, item in enumerate(indices) if item is not None]
    is_block = taken == list(range(taken[0], taken[-1] + 1))
    trailing = len(dimensions) - (taken[-1] + 1 if is_block else len(taken))
    return call.leave(call.emit(part_index, call.value("self"), mine, dim, trailing, held.runs, held.units))


def index_select(call: Call) -> fx.Node:
    if not _is_lookup(call):
        return same(call)
    dim = call.raw["dim"]
    held = _held(call, "self", dim)
    return call.leave(call.emit(part_index_select, call.value("self"), dim, call.value("index"), held.runs, held.units))


def gather(call: Call) -> fx.Node:
    """``gather``, ``take_along_dim``."""
    if not _is_lookup(call):
        return same(call)
    dim = call.raw["dim"]
    held = _held(call, "self", dim)
    places = call.value("index" if "index" in call.raw else "indices")
    return call.leave(call.emit(part_gather, call.value("self"), dim, places, held.runs, held.units))


def one_hot(call: Call) -> fx.Node:
    """``one_hot``: the classes may be cut."""
    if not call.is_sharded(call.result[-1]):
        return same(call)
    held = call.held(call.result[-1])
    return call.emit(part_one_hot, call.value("self"), held.runs, held.units)
