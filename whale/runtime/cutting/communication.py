"""What the devices of a split group exchange inside a stage, each with its adjoint.

    enter    whole -> used by parts      forward: nothing          backward: sum over the group
    leave    partial -> whole            forward: sum              backward: nothing
    gather   cut -> whole                forward: all-gather       backward: the own part of the gradient
    part     whole -> cut                forward: the own part     backward: zeros around it (an `enter` sums them)

Whole values, and their gradients, are equal on all devices of the group. The group is an argument, so the programs
that call these hold no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.axes.index_sets import Runs, count
from whale.runtime.cutting.pieces import as_index

Group = dist.ProcessGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.detach()  # not a view for autograd, so in-place ops of the model may follow

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return _reduced(gradients[0], ctx.group, dist.ReduceOp.SUM), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        return _reduced(value, group, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, parts: tuple[Runs, ...], position: int, group: Group) -> Tensor:
        ctx.dim, ctx.runs = dim, parts[position]
        counts = [count(runs) for runs in parts]
        front = value.movedim(dim, 0)
        padded = front.new_zeros((max(counts), *front.shape[1:]))
        padded[: counts[position]] = front
        received = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(received, padded, group=group)
        whole = front.new_empty((sum(counts), *front.shape[1:]))
        for piece, runs, number in zip(received, parts, counts, strict=True):
            whole[as_index(runs)] = piece[:number]
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return take(gradients[0], ctx.dim, ctx.runs).contiguous(), None, None, None, None


def enter(value: Tensor, group: Group) -> Tensor:
    """A whole tensor as its parts' consumers use it: their gradients are partial, and summed on the way back."""
    entered: Tensor = _Enter.apply(value, group)  # type: ignore[no-untyped-call]
    return entered


def leave(value: Tensor, group: Group) -> Tensor:
    """The sum of what the devices of the group computed from their parts."""
    whole: Tensor = _Leave.apply(value, group)  # type: ignore[no-untyped-call]
    return whole


def leave_each(values: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """`leave` for each result of an op that has several."""
    return tuple(leave(value, group) for value in values)


def gather(value: Tensor, dim: int, units: int, rows_outside: bool, parts: tuple[Runs, ...], position: int, group: Group) -> Tensor:
    """The whole tensor, on every device, from its parts.

    Args:
        value: the own part.
        dim: the dimension that is cut.
        units: size of that dimension, the rows of the batch left out.
        rows_outside: where the dimension also holds the batch, whether that is the outer factor.
        parts: per device, its positions among the units.
        position: of this device.
        group: the split group.
    """
    split, at = _unfolded(value, dim, count(parts[position]), rows_outside)
    whole: Tensor = _Gather.apply(split, at, parts, position, group)  # type: ignore[no-untyped-call]
    return whole.flatten(dim, dim + 2)


def part(value: Tensor, dim: int, units: int, rows_outside: bool, runs: Runs) -> Tensor:
    """The own part of a whole tensor; arguments as in `gather`, `runs` being the own positions."""
    split, at = _unfolded(value, dim, units, rows_outside)
    return take(split, at, runs).flatten(dim, dim + 2)


def _unfolded(value: Tensor, dim: int, units: int, rows_outside: bool) -> tuple[Tensor, int]:
    """A dimension as ``outer x units x inner``, and where the units are."""
    rest = value.shape[dim] // units if units else 1
    shape = (rest, units, 1) if rows_outside else (1, units, rest)
    return value.reshape(*value.shape[:dim], *shape, *value.shape[dim + 1 :]), dim + 1


def take(value: Tensor, dim: int, runs: Runs) -> Tensor:
    """Positions of one dimension."""
    place = as_index(runs)
    if isinstance(place, slice):
        return value.narrow(dim, place.start, place.stop - place.start)
    return value.index_select(dim, place.to(value.device))


def largest(value: Tensor, group: Group) -> Tensor:
    """The largest of the devices' values, element by element, without a gradient."""
    return _reduced(value.detach(), group, dist.ReduceOp.MAX)


def smallest(value: Tensor, group: Group) -> Tensor:
    """The smallest of the devices' values, element by element, without a gradient."""
    return _reduced(value.detach(), group, dist.ReduceOp.MIN)


def gathered(value: Tensor, group: Group) -> list[Tensor]:
    """The devices' values, which have one shape, in order of position, without a gradient."""
    own = value.detach().contiguous()
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    return received


def _reduced(value: Tensor, group: Group, how: Any) -> Tensor:
    wire = torch.uint8 if value.dtype is torch.bool else value.dtype
    whole = value.to(wire).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, op=how, group=group)
    return whole.to(value.dtype)
