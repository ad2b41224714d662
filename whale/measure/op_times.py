"""Times of single ops, forward and backward, and of the whole graph's passes, on this rank's device, at any number of rows."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from whale.deferred import WeightQueue, defer_weights
from whale.ir.graph import ModelGraph, Op, TensorSpec
from whale.measure.samples import RoundTimer, own_time

Rounds = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OpRounds:
    """Seconds of an op's rounds on one rank; `backward` is empty without a gradient, both if some rank gives a reason."""

    forward: Rounds = ()
    backward: Rounds = ()
    reason: str = ""

    def stretched(self, factor: float) -> OpRounds:
        return replace(self, forward=tuple(factor * each for each in self.forward), backward=tuple(factor * each for each in self.backward))


def time_op(clock: RoundTimer, inputs: Inputs, op: Op, num_rows: int) -> OpRounds:
    """Times an op on all ranks at once.

    An op that cannot be run alone on some rank is timed on none, for the reason of the first such rank.
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
    """Seconds of the whole graph's rounds on one rank; empty if it does not fit on some rank."""

    forward: Rounds = ()  # the forward pass
    both: Rounds = ()  # forward and backward
    stretch: float = 1.0  # wall time / own time of `both`: what waiting for a core adds
    apart: Rounds = ()  # extra own time of `both` if weight gradients wait and are computed last; empty if none can

    def joined(self, later: PassRounds) -> PassRounds:
        """These rounds and later ones; empty if one of them did not fit."""
        if not self.forward or not later.forward:
            return PassRounds()
        first, second = len(self.both), len(later.both)
        stretch = (first * self.stretch + second * later.stretch) / (first + second)
        return PassRounds(self.forward + later.forward, self.both + later.both, stretch, self.apart + later.apart)


def time_passes(clock: RoundTimer, inputs: Inputs, num_rows: int) -> PassRounds:
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
    watched = _TwiceTimed(both, own_time(clock.world.device))
    forward, together = clock.rounds(partial(module, *arguments)), clock.rounds(watched)
    added: Rounds = ()
    if apart is not None:
        own = replace(clock, now=own_time(clock.world.device))
        added = tuple(longer - shorter for longer, shorter in zip(own.rounds(apart), own.rounds(both), strict=True))
    return PassRounds(forward, together, watched.wall / max(watched.own, 1e-9), added)


class _TwiceTimed:
    """A call whose seconds are summed by two clocks, wall time and own time."""

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


WEIGHT = 0.02  # scale of weights without values (of a meta model): about that of initial ones


@dataclass(eq=False)
class Inputs:
    """Arguments for single ops, and for the whole graph.

    Args:
        graph: the captured model.
        nodes: its executable form; nodes are named as the ops.
        values: per placeholder, its value for the whole example batch.
        device: of the tensors.
    """

    graph: ModelGraph
    nodes: fx.Graph
    values: Mapping[str, Any]
    device: torch.device
    _held: dict[str, Any] = field(default_factory=dict, init=False)

    @cached_property
    def node_of(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.nodes.nodes}

    @cached_property
    def waiting(self) -> fx.GraphModule | None:
        """The whole graph with weight gradients deferred to a queue, its first argument; None if none can be."""
        nodes = fx.Graph()
        queue = nodes.placeholder("weight_queue")
        nodes.output(nodes.graph_copy(self.nodes, {}))
        parameters = {op.name for op in self.graph.ops if op.kind == "parameter" and op.requires_grad}
        found = defer_weights(nodes, parameters, queue, self._num_dims)
        return fx.GraphModule(nn.Module(), nodes) if found else None

    def _num_dims(self, node: fx.Node) -> int:
        return len(self.graph.by_name[node.name].outputs[0].shape)

    def of_op(self, op: Op, num_rows: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Arguments (of arbitrary values) to call an op with, and those among them that have a gradient."""
        leaves: list[Tensor] = []
        made: dict[str, Any] = {}

        def value(source: fx.Node) -> Any:
            if source.name not in made:
                made[source.name] = self._alone(source, num_rows, leaves)
            return made[source.name]

        node = self.node_of[op.name]
        return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value), leaves

    def _alone(self, node: fx.Node, num_rows: int, leaves: list[Tensor]) -> Any:
        op = self.graph.by_name[node.name]
        if not op.outputs:
            return self._number(node, num_rows)
        tensors = [self._tensor(spec, num_rows) for spec in op.outputs]
        for tensor in tensors:
            if op.requires_grad and tensor.is_floating_point():
                leaves.append(tensor.requires_grad_())
        # Others read the items of a tuple, be it of one.
        return tensors[0] if len(tensors) == 1 and not any(user.target is operator.getitem for user in node.users) else tuple(tensors)

    def _number(self, node: fx.Node, num_rows: int) -> Any:
        """A size of a tensor, or what is computed from sizes."""
        if node.op == "placeholder":
            return num_rows

        def value(source: fx.Node) -> Any:
            outputs = self.graph.by_name[source.name].outputs
            return torch.empty(outputs[0].shape_at(num_rows), device="meta") if outputs else self._number(source, num_rows)

        return node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))  # type: ignore[operator]

    def _tensor(self, spec: TensorSpec, num_rows: int) -> Tensor:
        shape, dtype = spec.shape_at(num_rows), getattr(torch, spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.rand(shape, device=self.device).to(dtype)
        return torch.full(shape, dtype is torch.bool, dtype=dtype, device=self.device)  # 0 is a valid index anywhere

    def of_graph(self, num_rows: int) -> tuple[list[Any], list[Tensor]]:
        """The placeholders' values for this many rows of the example, and the parameters among them."""
        arguments = [self._whole(node.name, num_rows) for node in self.nodes.find_nodes(op="placeholder")]
        return arguments, [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]

    def _whole(self, name: str, num_rows: int) -> Any:
        op = self.graph.by_name[name]
        if not op.outputs:
            return num_rows
        (spec,) = op.outputs
        if op.kind == "input":
            value = self.values[name].to(self.device)
            for dimension, factor in enumerate(spec.row_factors):
                value = value.narrow(dimension, 0, factor * num_rows) if factor > 0 else value
            return value
        if name not in self._held:
            self._held[name] = self._weight(self.values[name], spec).requires_grad_(op.requires_grad)
        return self._held[name]

    def _weight(self, value: Tensor, spec: TensorSpec) -> Tensor:
        if value.is_meta:
            made = self._tensor(spec, self.graph.num_rows)
            return made * WEIGHT if made.is_floating_point() else made
        return value.detach().to(self.device, copy=True)
