"""What the devices of a split group exchange inside a stage, each with its adjoint.

                 forward                           backward
    enter        nothing                           all-reduce         whole -> used whole by parts
    part         the own part                      all-gather         whole -> cut
    gather       all-gather                        the own part       cut -> whole
    collect      all-gather                        reduce-scatter     cut -> used whole by parts
    exchange     all-to-all                        all-to-all         cut -> cut along another axis
    leave        all-reduce                        nothing            sum -> whole
    scatter      reduce-scatter                    all-gather         sum -> cut

Whole values, and their gradients, are equal on all devices of the group. The group is an argument, so the programs
that call these hold no state; so is what it is for, which an error names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.cutting.collectives import all_gather, all_reduce, all_to_all, gathered, reduce_scatter
from whale.runtime.cutting.group import Group
from whale.runtime.cutting.slots import Slots

__all__ = ["Group", "collect", "enter", "exchange", "gather", "gathered", "largest", "leave", "leave_each", "part", "scatter", "smallest"]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return value.detach()  # not a view for autograd, so in-place ops of the model may follow

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(gradients[0], ctx.group, ctx.what), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, what: str) -> Tensor:
        return all_reduce(value, group, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, slots: Slots, group: Group, what: str) -> Tensor:
        ctx.slots, ctx.group, ctx.what = slots, group, what
        return slots.own(value).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(gradients[0], ctx.slots, ctx.group, ctx.what), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, slots: Slots, group: Group, what: str, used_by_parts: bool) -> Tensor:
        ctx.slots, ctx.group, ctx.what, ctx.used_by_parts = slots, group, what, used_by_parts
        return all_gather(value, slots, group, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used_by_parts:
            return reduce_scatter(gradients[0], ctx.slots, ctx.group, ctx.what), None, None, None, None
        return ctx.slots.own(gradients[0]).contiguous(), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, slots: Slots, group: Group, what: str) -> Tensor:
        ctx.slots, ctx.group, ctx.what = slots, group, what
        return reduce_scatter(value, slots, group, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(gradients[0], ctx.slots, ctx.group, ctx.what), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, leaving: Slots, arriving: Slots, group: Group, what: str) -> Tensor:
        ctx.leaving, ctx.arriving, ctx.group, ctx.what = leaving, arriving, group, what
        return all_to_all(value, leaving, arriving, group, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(gradients[0], ctx.arriving, ctx.leaving, ctx.group, ctx.what), None, None, None, None


def enter(value: Tensor, group: Group, what: str = "enter") -> Tensor:
    """A whole tensor as its parts' consumers use it: their gradients are partial, and summed on the way back."""
    entered: Tensor = _Enter.apply(value, group, what)  # type: ignore[no-untyped-call]
    return entered


def leave(value: Tensor, group: Group, what: str = "leave") -> Tensor:
    """The sum of what the devices of the group computed from their parts."""
    whole: Tensor = _Leave.apply(value, group, what)  # type: ignore[no-untyped-call]
    return whole


def leave_each(values: Sequence[Tensor], group: Group, what: str = "leave") -> tuple[Tensor, ...]:
    """`leave` for each result of an op that has several."""
    return tuple(leave(value, group, what) for value in values)


def part(value: Tensor, slots: Slots, group: Group, what: str = "part") -> Tensor:
    """The own part of a whole tensor; the parts' gradients are brought together."""
    own: Tensor = _Part.apply(value, slots, group, what)  # type: ignore[no-untyped-call]
    return own


def gather(value: Tensor, slots: Slots, group: Group, what: str = "gather") -> Tensor:
    """The whole tensor, on every device, from its parts; its users work on all of it, so gradients are whole."""
    whole: Tensor = _Gather.apply(value, slots, group, what, False)  # type: ignore[no-untyped-call]
    return whole


def collect(value: Tensor, slots: Slots, group: Group, what: str = "collect") -> Tensor:
    """The whole tensor from its parts, for users that work on parts of another axis: gradients are summed and cut at once."""
    whole: Tensor = _Gather.apply(value, slots, group, what, True)  # type: ignore[no-untyped-call]
    return whole


def scatter(value: Tensor, slots: Slots, group: Group, what: str = "scatter") -> Tensor:
    """The own part of the sum of what the devices computed."""
    own: Tensor = _Scatter.apply(value, slots, group, what)  # type: ignore[no-untyped-call]
    return own


def exchange(value: Tensor, leaving: Slots, arriving: Slots, group: Group, what: str = "exchange") -> Tensor:
    """Parts along one axis as parts along another.

    Args:
        value: the own part.
        leaving: what of it every device gets.
        arriving: where in the new part what every device sends belongs.
        group: the split group.
        what: it is for.
    """
    own: Tensor = _Exchange.apply(value, leaving, arriving, group, what)  # type: ignore[no-untyped-call]
    return own


def largest(value: Tensor, group: Group) -> Tensor:
    """The largest of the devices' values, element by element, without a gradient."""
    return all_reduce(value.detach(), group, "largest", dist.ReduceOp.MAX)


def smallest(value: Tensor, group: Group) -> Tensor:
    """The smallest of the devices' values, element by element, without a gradient."""
    return all_reduce(value.detach(), group, "smallest", dist.ReduceOp.MIN)
