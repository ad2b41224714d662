"""How long ops take by themselves, forward and backward, and the whole graph's passes, on this rank's device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from whale.deferred import WeightQueue
from whale.ir.graph import Op
from whale.measure.op_inputs import Inputs
from whale.measure.samples import Clock, own_time

Rounds = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OpRounds:
    """Seconds of an op's rounds on one rank; `backward` is empty where there is no gradient, both where some rank gives a reason."""

    forward: Rounds = ()
    backward: Rounds = ()
    reason: str = ""

    def stretched(self, factor: float) -> OpRounds:
        """The same, so many times longer."""
        return replace(self, forward=tuple(factor * each for each in self.forward), backward=tuple(factor * each for each in self.backward))


def time_op(clock: Clock, inputs: Inputs, op: Op, num_rows: int) -> OpRounds:
    """Times an op on all ranks at once, by the clock that is given.

    An op that cannot be run alone on some rank is timed on none: the reason is that of the first such rank.
    """
    reason = ""
    try:
        forward, backward = _calls(inputs, op, num_rows)
        forward()
        if backward is not None:
            backward()
    except Exception as error:  # whatever the operator raises: the op keeps the price that is worked out
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    reasons = [str(each) for each in clock.world.gather_objects(reason) if each]
    if reasons:
        return OpRounds(reason=reasons[0])
    return OpRounds(clock.rounds(forward), clock.rounds(backward) if backward is not None else ())


def _calls(inputs: Inputs, op: Op, num_rows: int) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """The op's forward and backward pass as calls."""
    arguments, keywords, leaves = inputs.of_op(op, num_rows)
    target = inputs.node_of[op.name].target
    assert callable(target), "an op that computes is a call of a function"
    forward: Callable[[], Any] = partial(target, *arguments, **keywords)
    if "in_place" in op.tags or not op.requires_grad:
        return partial(_without_gradient, forward), None
    made = [each for each in pytree.tree_leaves(forward()) if isinstance(each, Tensor) and each.requires_grad]
    gradients = [torch.ones_like(each) for each in made]
    return forward, partial(torch.autograd.grad, made, leaves, gradients, retain_graph=True, allow_unused=True)


def _without_gradient(forward: Callable[[], object]) -> None:
    with torch.no_grad():
        forward()


@dataclass(frozen=True, slots=True)
class PassRounds:
    """Seconds of the whole graph's rounds on one rank; empty where some rank has no room for it.

    Attributes:
        forward, both: passes: forward; forward and backward.
        stretch: seconds by the wall / by the rank's own time, of both: what waiting for its core adds.
        apart: by which both take longer, of the rank's own time, where weight gradients wait and are computed last; empty where none can.
    """

    forward: Rounds = ()
    both: Rounds = ()
    stretch: float = 1.0
    apart: Rounds = ()

    def joined(self, later: PassRounds) -> PassRounds:
        """These rounds and later ones; empty where one of them had no room."""
        if not self.forward or not later.forward:
            return PassRounds()
        first, second = len(self.both), len(later.both)
        stretch = (first * self.stretch + second * later.stretch) / (first + second)
        return PassRounds(self.forward + later.forward, self.both + later.both, stretch, self.apart + later.apart)


def time_passes(clock: Clock, inputs: Inputs, num_rows: int) -> PassRounds:
    """Times the whole graph on all ranks at once."""
    module, reason, apart = fx.GraphModule(nn.Module(), inputs.nodes), "", None
    try:
        arguments, parameters = inputs.of_graph(num_rows)
        both = partial(_forward_and_backward, module, arguments, parameters)
        both()
        if inputs.waiting is not None:
            apart = partial(_with_weights_apart, inputs.waiting, arguments, parameters)
            apart()
    except torch.OutOfMemoryError as error:
        reason = str(error)
    if any(clock.world.gather_objects(reason)):
        return PassRounds()
    watched = _Watched(both, own_time(clock.world.device))
    forward, together = clock.rounds(partial(module, *arguments)), clock.rounds(watched)
    added: Rounds = ()
    if apart is not None:
        own = replace(clock, now=own_time(clock.world.device))
        added = tuple(longer - shorter for longer, shorter in zip(own.rounds(apart), own.rounds(both), strict=True))
    return PassRounds(forward, together, watched.wall / max(watched.own, 1e-9), added)


class _Watched:
    """A call whose seconds are added up by two clocks.

    Attributes:
        wall, own: so far.
    """

    def __init__(self, call: Callable[[], object], own_time: Callable[[], float]) -> None:
        self._call, self._own_time = call, own_time
        self.wall = self.own = 0.0

    def __call__(self) -> None:
        wall, own = time.perf_counter(), self._own_time()
        self._call()
        self.wall += time.perf_counter() - wall
        self.own += self._own_time() - own


def _forward_and_backward(module: fx.GraphModule, arguments: list[Any], parameters: list[Tensor]) -> None:
    torch.autograd.grad(_total(module(*arguments)), parameters, allow_unused=True)


def _with_weights_apart(module: fx.GraphModule, arguments: list[Any], parameters: list[Tensor]) -> None:
    queue = WeightQueue()
    torch.autograd.grad(_total(module(queue, *arguments)), parameters, allow_unused=True)
    queue.run()
    for parameter in parameters:
        parameter.grad = None


def _total(outputs: Any) -> Tensor:
    made = [each for each in pytree.tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
    return sum(each.sum() for each in made)  # type: ignore[return-value]
