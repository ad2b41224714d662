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
that call these hold no state; so is what it is for, which an error names. `start` and `finish` are the two ends of any
of them, for programs that compute something else in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.program.shard.collectives import Pending, all_gather, all_reduce, all_to_all, at_hand, gathered, reduce_scatter
from whale.runtime.program.shard.group import Group
from whale.runtime.program.shard.slots import Slots

__all__ = [
    "OPERATIONS", "Group", "collect", "enter", "exchange", "finish", "gather", "gathered",
    "largest", "leave", "leave_each", "part", "scatter", "smallest", "start",
]  # fmt: skip


class _Move(NamedTuple):
    """What an operation does with a value, and with its gradient."""

    forward: Callable[[Tensor], Pending]
    backward: Callable[[Tensor], Pending]


def _enter(group: Group, what: str) -> _Move:
    # Not a view for autograd, so in-place ops of the model may follow.
    return _Move(lambda value: at_hand(value.detach()), partial(all_reduce, group=group, what=what))


def _leave(group: Group, what: str) -> _Move:
    return _Move(partial(all_reduce, group=group, what=what), at_hand)


def _part(slots: Slots, group: Group, what: str) -> _Move:
    def own(value: Tensor) -> Pending:
        return at_hand(slots.own(value).clone(memory_format=torch.contiguous_format))

    return _Move(own, partial(all_gather, slots=slots, group=group, what=what))


def _gather(slots: Slots, group: Group, what: str) -> _Move:
    forward = partial(all_gather, slots=slots, group=group, what=what)
    return _Move(forward, lambda gradient: at_hand(slots.own(gradient).contiguous()))


def _collect(slots: Slots, group: Group, what: str) -> _Move:
    return _Move(partial(all_gather, slots=slots, group=group, what=what), partial(reduce_scatter, slots=slots, group=group, what=what))


def _scatter(slots: Slots, group: Group, what: str) -> _Move:
    return _Move(partial(reduce_scatter, slots=slots, group=group, what=what), partial(all_gather, slots=slots, group=group, what=what))


def _exchange(leaving: Slots, arriving: Slots, group: Group, what: str) -> _Move:
    forward = partial(all_to_all, leaving=leaving, arriving=arriving, group=group, what=what)
    return _Move(forward, partial(all_to_all, leaving=arriving, arriving=leaving, group=group, what=what))


class _Moved(torch.autograd.Function):
    """An operation all at once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, move: _Move) -> Tensor:
        ctx.move = move
        return move.forward(value).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.move.backward(gradients[0]).wait(), None


def _moved(value: Tensor, move: _Move) -> Tensor:
    moved: Tensor = _Moved.apply(value, move)  # type: ignore[no-untyped-call]
    return moved


def enter(value: Tensor, group: Group, what: str = "enter") -> Tensor:
    """A whole tensor as its parts' consumers use it: their gradients are partial, and summed on the way back."""
    return _moved(value, _enter(group, what))


def leave(value: Tensor, group: Group, what: str = "leave") -> Tensor:
    """The sum of what the devices of the group computed from their parts."""
    return _moved(value, _leave(group, what))


def leave_each(values: Sequence[Tensor], group: Group, what: str = "leave") -> tuple[Tensor, ...]:
    """`leave` for each result of an op that has several."""
    return tuple(leave(value, group, what) for value in values)


def part(value: Tensor, slots: Slots, group: Group, what: str = "part") -> Tensor:
    """The own part of a whole tensor; the parts' gradients are brought together."""
    return _moved(value, _part(slots, group, what))


def gather(value: Tensor, slots: Slots, group: Group, what: str = "gather") -> Tensor:
    """The whole tensor, on every device, from its parts; its users work on all of it, so gradients are whole."""
    return _moved(value, _gather(slots, group, what))


def collect(value: Tensor, slots: Slots, group: Group, what: str = "collect") -> Tensor:
    """The whole tensor from its parts, for users that work on parts of another axis: gradients are summed and cut at once."""
    return _moved(value, _collect(slots, group, what))


def scatter(value: Tensor, slots: Slots, group: Group, what: str = "scatter") -> Tensor:
    """The own part of the sum of what the devices computed."""
    return _moved(value, _scatter(slots, group, what))


def exchange(value: Tensor, leaving: Slots, arriving: Slots, group: Group, what: str = "exchange") -> Tensor:
    """Parts along one axis as parts along another.

    Args:
        value: the own part.
        leaving: what of it every device gets.
        arriving: where in the new part what every device sends belongs.
        group: the split group.
        what: it is for.
    """
    return _moved(value, _exchange(leaving, arriving, group, what))


OPERATIONS: Mapping[Callable[..., Tensor], str] = {
    operation: operation.__name__ for operation in (enter, leave, part, gather, collect, scatter, exchange)
}
"""The operations that `start` and `finish` are the ends of, with their names."""

_MOVES: Mapping[str, Callable[..., _Move]] = {
    "enter": _enter, "leave": _leave, "part": _part, "gather": _gather, "collect": _collect, "scatter": _scatter, "exchange": _exchange,
}  # fmt: skip


class _Way:
    """What is between the two ends of an operation: on its way forward, later backward."""

    def __init__(self, move: _Move) -> None:
        self.move = move
        self.forward: Pending | None = None
        self.backward: Pending | None = None


OnItsWay = tuple[Tensor, _Way]
"""A value between the ends of an operation, and the empty tensor by which autograd knows that one end needs the other."""


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.forward = way.move.forward(value)
        return value.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pending, ctx.way.backward = ctx.way.backward, None
        return pending.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        assert way.forward is not None
        pending, way.forward = way.forward, None
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.way.backward = ctx.way.move.backward(gradients[0])
        return gradients[0].new_empty(0), None


def start(operation: str, value: Tensor, *arguments: Any) -> OnItsWay:
    """Begins an operation forward, and ends it backward.

    Args:
        operation: its name.
        value: what it is called with,
        arguments: and the rest.
    """
    way = _Way(_MOVES[operation](*arguments))
    return _Start.apply(value, way), way  # type: ignore[no-untyped-call]


def finish(on_its_way: OnItsWay) -> Tensor:
    """Ends an operation forward, and begins it backward."""
    moved: Tensor = _Finish.apply(*on_its_way)  # type: ignore[no-untyped-call]
    return moved


def largest(value: Tensor, group: Group) -> Tensor:
    """The largest of the devices' values, element by element, without a gradient."""
    return all_reduce(value.detach(), group, "largest", dist.ReduceOp.MAX).wait()


def smallest(value: Tensor, group: Group) -> Tensor:
    """The smallest of the devices' values, element by element, without a gradient."""
    return all_reduce(value.detach(), group, "smallest", dist.ReduceOp.MIN).wait()
