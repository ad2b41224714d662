"""Lowerings of ops with sizes among their arguments: views, expansions, factories, splits and slices.

Captured sizes are those of whole tensors. A size whose dimension is cut is rewritten to the part's: ``rows * 96`` becomes
``rows * 96 * held // 96``, so that any number of rows keeps working.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from whale.axes.values import Dimension
from whale.runtime.program.shard.call import Call
from whale.sharding.index_sets import count_below

aten = torch.ops.aten


def local_sizes(call: Call, sizes: Sequence[Any], dimensions: Sequence[Dimension]) -> list[Any]:
    """Sizes of whole dimensions as sizes of the parts, in the new graph; -1 stays."""
    return [_local_size(call, size, dimension) for size, dimension in zip(sizes, dimensions, strict=True)]


def _local_size(call: Call, size: Any, dimension: Dimension) -> Any:
    mapped = call.writer.raw(size)
    return mapped if isinstance(size, int) and size == -1 else _scaled_size(call, mapped, dimension)


def _scaled_size(call: Call, size: Any, dimension: Dimension) -> Any:
    if not call.is_sharded(dimension):
        return size
    held = call.held(dimension)
    if isinstance(size, int):
        return size * held.count // held.units
    product = call.emit(operator.mul, size, held.count, what="size")
    return call.emit(operator.floordiv, product, held.units, what="size")


def view(call: Call) -> fx.Node:
    """``view``, ``reshape`` and kin."""
    name = next((name for name in ("size", "shape") if name in call.raw), None)
    if name is None:  # view as another type
        return call.same()
    # a part is not always laid out as the whole: copy where needed, unless somebody writes through the view
    target = aten.view.default if call.writer.is_written_later(call.node) else aten.reshape.default
    return call.emit(target, call.value("self"), local_sizes(call, call.raw[name], call.result))


def view_as(call: Call) -> fx.Node:
    """``view_as``, ``reshape_as``: the result need not be cut like the tensor that gives the sizes."""
    other = call.value("other")
    if call.dimensions("other") == call.result:
        return call.same(other=other)
    sizes: list[Any] = []
    for dim, (size, factor) in enumerate(zip(call.op.outputs[0].shape, call.op.outputs[0].row_factors, strict=True)):
        whole = _whole_size(call, other, dim) if factor else size
        sizes.append(_scaled_size(call, whole, call.result[dim]))
    return call.emit(aten.reshape.default, call.value("self"), sizes)


def _whole_size(call: Call, other: fx.Node, dim: int) -> fx.Node:
    """The whole size of a dimension of a tensor of which this device may hold a part."""
    size, dimension = call.emit(aten.sym_size.int, other, dim, what="size"), call.dimensions("other")[dim]
    if not call.is_sharded(dimension):
        return size
    held = call.held(dimension)
    product = call.emit(operator.mul, size, held.units, what="size")
    return call.emit(operator.floordiv, product, held.count, what="size")


def unflatten(call: Call) -> fx.Node:
    sizes = call.raw["sizes"]
    first = call.raw["dim"] % len(call.dimensions("self"))
    return call.same(sizes=local_sizes(call, sizes, call.result[first : first + len(sizes)]))


def squeeze(call: Call) -> fx.Node:
    """``squeeze``: removes dimensions of size 1 in the whole tensor, not those of size 1 in this part."""
    source = call.writer.layout.model.by_name[call.raw["self"].name].outputs[0]
    rank = len(source.shape)
    chosen = call.raw.get("dim", list(range(rank)))
    dims = {dim % rank for dim in (chosen if isinstance(chosen, (list, tuple)) else [chosen])}
    gone = [dim for dim in sorted(dims) if source.shape[dim] == 1 and not source.row_factors[dim]]
    return call.emit(aten.squeeze.dims, call.value("self"), gone) if gone else call.emit(aten.alias.default, call.value("self"))


def placed(call: Call) -> fx.Node:
    """``affine_grid_generator``: the size is that of the images with channels; the result has their rows and space."""
    rows, *others = call.raw["size"]
    return call.same(size=[_local_size(call, rows, call.result[0]), *(call.writer.raw(size) for size in others)])


def sized(call: Call) -> fx.Node:
    """``expand``, ``zeros``, ``new_full`` ...: all sizes of the result are given."""
    return call.same(size=local_sizes(call, call.raw["size"], call.result))


def made_whole(call: Call) -> fx.Node:
    """``arange``, ``randn``, ``eye`` ...: made whole, as values depend on the position, and cut."""
    args = call.writer.raw(call.node.args)
    kwargs = call.writer.raw(call.node.kwargs)
    return call.writer.part(call.node, call.emit(call.node.target, *args, what="whole", **kwargs), call.axis)


def repeat(call: Call) -> fx.Node:
    """``repeat``, ``tile``: the number of copies may be cut."""
    name = "repeats" if "repeats" in call.raw else "dims"
    repeats = call.raw[name]
    sources = call.dimensions("self")
    first = len(call.result) - len(repeats)
    lead = len(call.result) - len(sources)
    local = [
        _copies(call, number, sources[first + index - lead] if first + index >= lead else (), call.result[first + index])
        for index, number in enumerate(repeats)
    ]
    return call.same(**{name: local})


def repeat_interleave(call: Call) -> fx.Node:
    """``repeat_interleave`` by a number."""
    dim = call.raw["dim"]
    return call.same(repeats=_copies(call, call.raw["repeats"], call.dimensions("self")[dim], call.result[dim]), output_size=None)


def _copies(call: Call, number: Any, source: Dimension, made: Dimension) -> Any:
    """A number of copies for this part."""
    if not call.is_sharded(made):
        return call.writer.raw(number)
    before, after = call.held(source), call.held(made)
    factor, divisor = after.count * before.units, after.units * before.count
    if isinstance(number, int) or factor == divisor:
        return number * factor // divisor if isinstance(number, int) else call.writer.raw(number)
    product = call.emit(operator.mul, call.writer.raw(number), factor, what="copies")
    return call.emit(operator.floordiv, product, divisor, what="copies")


def pixel_shuffle(call: Call) -> fx.Node:
    """``pixel_shuffle``: the factors that move into space may be cut."""
    factor, source, made = call.raw["upscale_factor"], call.dimensions("self"), call.result
    factors = [_copies(call, factor, source[dim], made[dim]) for dim in (-2, -1)]
    return call.emit(shuffled_pixels, call.value("self"), *factors)


def shuffled_pixels(value: torch.Tensor, vertical: int, horizontal: int) -> torch.Tensor:
    """``pixel_shuffle`` with a factor for each direction."""
    *lead, channels, height, width = value.shape
    split = value.reshape(*lead, channels // (vertical * horizontal), vertical, horizontal, height, width)
    moved = split.movedim((-4, -3), (-3, -1))  # [channels height vertical width horizontal]
    return moved.reshape(*lead, -1, height * vertical, width * horizontal)


def split(call: Call) -> fx.Node:
    """``split``, ``chunk`` and kin, with the sizes of the pieces of this part."""
    dimensions = call.dimensions("self")
    dim = call.raw["dim"] % len(dimensions)
    if not call.is_sharded(dimensions[dim]):
        return call.same()
    held = call.held(dimensions[dim])
    if held.has_rows:
        call.refuse("it splits a dimension that holds the batch too")
    ends = [count_below(held.runs, end) for end in accumulate((call.shape_of(spec)[dim] for spec in call.op.outputs), initial=0)]
    sizes = [stop - start for start, stop in pairwise(ends)]
    return call.emit(aten.split_with_sizes.default, call.value("self"), sizes, dim)


def slice_(call: Call) -> fx.Node:
    """``slice``, ``narrow``: all of a dimension, or an interval of it."""
    dimensions = call.dimensions("self")
    dim = call.raw["dim"] % len(dimensions)
    if not call.is_sharded(dimensions[dim]):
        return call.same()
    if dimensions[dim] == call.result[dim]:
        return call.emit(aten.alias.default, call.value("self"))
    held = call.held(dimensions[dim])
    start = call.raw["start"] or 0
    if held.has_rows or not isinstance(start, int) or call.raw.get("step", 1) != 1:
        call.refuse("its bounds are computed or it skips positions")
    begin = min(start if start >= 0 else max(start + held.units, 0), held.units)
    bounds = [count_below(held.runs, bound) for bound in (begin, begin + call.shape_of(call.op.outputs[0])[dim])]
    return call.emit(aten.slice.Tensor, call.value("self"), dim, *bounds)
