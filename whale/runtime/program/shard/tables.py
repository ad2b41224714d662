"""Lowerings of lookups in a cut table: masked lookup, then the sum over the group."""

from __future__ import annotations

import torch
from torch import fx

from whale.runtime.program.shard.call import Call
from whale.runtime.program.shard.contractions import same
from whale.runtime.program.shard.layout import Held
from whale.runtime.program.shard.lookups import local_positions, part_embedding, part_gather, part_index, part_index_select, part_one_hot

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
