"""Differentiable communication of a split group, each operation with its adjoint.

                 forward                           backward
    enter        nothing                           all-reduce         whole -> used whole by parts
    part         the own part                      all-gather         whole -> cut
    gather       all-gather                        the own part       cut -> whole
    collect      all-gather                        reduce-scatter     cut -> used whole by parts
    exchange     all-to-all                        all-to-all         cut -> cut along another axis
    leave        all-reduce                        nothing            sum -> whole
    scatter      reduce-scatter                    all-gather         sum -> cut

Whole values, and their gradients, are equal on all devices. The group, and a name for errors, are arguments, so that programs hold no
state. `start` and `finish` are the two ends of each operation, for programs that compute something in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.program.shard.collectives import Pending, all_gather, all_reduce, all_to_all, gathered, ready, reduce_scatter
from whale.runtime.program.shard.group import Group
from whale.runtime.program.shard.slots import Slots

__all__ = [
    "OPERATIONS", "Group", "collect", "enter", "exchange", "finish", "gather", "gathered",
    "largest", "leave", "leave_each", "part", "scatter", "smallest", "start",
]  # fmt: skip


class _Move(NamedTuple):
    """An operation on a value, and on its gradient."""

    forward: Callable[[Tensor], Pending]
    backward: Callable[[Tensor], Pending]


def _enter(group: Group, what: str) -> _Move:
    # Not a view for autograd, so that in-place ops of the model may follow.
    return _Move(lambda value: ready(value.detach()), partial(all_reduce, group=group, what=what, of_gradient=True))


def _leave(group: Group, what: str) -> _Move:
    return _Move(partial(all_reduce, group=group, what=what), ready)


def _part(slots: Slots, group: Group, what: str) -> _Move:
    def own(value: Tensor) -> Pending:
        return ready(slots.own(value).clone(memory_format=torch.contiguous_format))

    return _Move(own, partial(all_gather, slots=slots, group=group, what=what, of_gradient=True))


def _gather(slots: Slots, group: Group, what: str) -> _Move:
    forward = partial(all_gather, slots=slots, group=group, what=what)
    return _Move(forward, lambda gradient: ready(slots.own(gradient).contiguous()))


def _collect(slots: Slots, group: Group, what: str) -> _Move:
    forward, backward = (partial(move, slots=slots, group=group, what=what) for move in (all_gather, reduce_scatter))
    return _Move(forward, partial(backward, of_gradient=True))


def _scatter(slots: Slots, group: Group, what: str) -> _Move:
    forward, backward = (partial(move, slots=slots, group=group, what=what) for move in (reduce_scatter, all_gather))
    return _Move(forward, partial(backward, of_gradient=True))


def _exchange(leaving: Slots, arriving: Slots, group: Group, what: str) -> _Move:
    forward = partial(all_to_all, leaving=leaving, arriving=arriving, group=group, what=what)
    return _Move(forward, partial(all_to_all, leaving=arriving, arriving=leaving, group=group, what=what, of_gradient=True))


class _Moved(torch.autograd.Function):
    """An operation that waits at once."""

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
    """A whole tensor for users that work on parts: their gradients are partial, and summed."""
    return _moved(value, _enter(group, what))


def leave(value: Tensor, group: Group, what: str = "leave") -> Tensor:
    """The sum of the devices' partial results."""
    return _moved(value, _leave(group, what))


def leave_each(values: Sequence[Tensor], group: Group, what: str = "leave") -> tuple[Tensor, ...]:
    """`leave` for each result of an op with several."""
    return tuple(leave(value, group, what) for value in values)


def part(value: Tensor, slots: Slots, group: Group, what: str = "part") -> Tensor:
    """The own part of a whole tensor; gradients of the parts are gathered."""
    return _moved(value, _part(slots, group, what))


def gather(value: Tensor, slots: Slots, group: Group, what: str = "gather") -> Tensor:
    """The whole tensor from its parts, for users that work on all of it, so that their gradients are whole."""
    return _moved(value, _gather(slots, group, what))


def collect(value: Tensor, slots: Slots, group: Group, what: str = "collect") -> Tensor:
    """The whole tensor from its parts, for users that work on parts of another axis: gradients are summed and cut at once."""
    return _moved(value, _collect(slots, group, what))


def scatter(value: Tensor, slots: Slots, group: Group, what: str = "scatter") -> Tensor:
    """The own part of the sum of the devices' partial results."""
    return _moved(value, _scatter(slots, group, what))


def exchange(value: Tensor, leaving: Slots, arriving: Slots, group: Group, what: str = "exchange") -> Tensor:
    """Parts along one axis as parts along another; arguments as in `all_to_all`."""
    return _moved(value, _exchange(leaving, arriving, group, what))


OPERATIONS: Mapping[Callable[..., Tensor], str] = {
    operation: operation.__name__ for operation in (enter, leave, part, gather, collect, scatter, exchange)
}
"""The operations that `start` and `finish` divide, with their names."""

_MOVES: Mapping[str, Callable[..., _Move]] = {
    "enter": _enter, "leave": _leave, "part": _part, "gather": _gather, "collect": _collect, "scatter": _scatter, "exchange": _exchange,
}  # fmt: skip


class _Way:
    """An operation in flight between its two ends, forward and later backward."""

    def __init__(self, move: _Move) -> None:
        self.move = move
        self.forward: Pending | None = None
        self.backward: Pending | None = None


InFlight = tuple[Tensor, _Way]
"""An empty tensor that links both ends in autograd, and the operation in flight."""


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


def start(operation: str, value: Tensor, *arguments: Any) -> InFlight:
    """Starts an operation forward, and ends it backward."""
    way = _Way(_MOVES[operation](*arguments))
    return _Start.apply(value, way), way  # type: ignore[no-untyped-call]


def finish(in_flight: InFlight) -> Tensor:
    """Ends an operation forward, and starts it backward."""
    moved: Tensor = _Finish.apply(*in_flight)  # type: ignore[no-untyped-call]
    return moved


def largest(value: Tensor, group: Group) -> Tensor:
    """Elementwise maximum over the devices, without gradient."""
    return all_reduce(value.detach(), group, "largest", dist.ReduceOp.MAX).wait()


def smallest(value: Tensor, group: Group) -> Tensor:
    """Elementwise minimum over the devices, without gradient."""
    return all_reduce(value.detach(), group, "smallest", dist.ReduceOp.MIN).wait()
