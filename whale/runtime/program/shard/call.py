"""One call of the captured graph that is cut: its arguments by name, in the layout in which it needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import fx

from whale.axes.operators import gathered_operands, operator_of
from whale.axes.values import Dimension, Role, axes_of
from whale.errors import PlanError
from whale.ir.graph import Op, TensorSpec
from whale.runtime.program.shard.draws import draw
from whale.runtime.program.shard.layout import Held, ShardLayout
from whale.runtime.program.shard.writer import Writer
from whale.sharding.bridges import Bridge


@dataclass(frozen=True)
class Call:
    """A call that is cut along one axis."""

    writer: Writer
    node: fx.Node
    op: Op
    axis: str  # along which it is cut

    @property
    def layout(self) -> ShardLayout:
        return self.writer.layout

    @property
    def role(self) -> Role:
        """What the op does with the cut axis."""
        return self.layout.role(self.op.name, self.axis)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """Arguments of the old node by name, with defaults."""
        return named_arguments(self.node)

    @property
    def result(self) -> tuple[Dimension, ...]:
        """Dimensions of the only result."""
        return self.layout.dimensions(self.op.name)

    def dimensions(self, name: str) -> tuple[Dimension, ...]:
        """Dimensions of a tensor argument."""
        return self.layout.dimensions(self.raw[name].name)

    def shape_of(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of a whole tensor: at the group's rows where the batch is cut, else at the example's."""
        return spec.shape_at(self.layout.num_rows) if self.layout.num_rows else spec.shape

    def is_sharded(self, dimension: Dimension) -> bool:
        """Whether this call works on a part of a dimension."""
        return self.axis in axes_of(dimension)

    def held(self, dimension: Dimension) -> Held:
        """The part of a cut dimension that this call works on."""
        return self.layout.held(dimension, self.axis)

    def cut_dim(self, dimensions: Sequence[Dimension]) -> int | None:
        """Index of the dimension that is cut."""
        return next((index for index, dimension in enumerate(dimensions) if self.is_sharded(dimension)), None)

    def has_part(self, node: fx.Node) -> bool:
        """Whether an operand has the axis, so that this call reads a part of it."""
        return self.axis in self.layout.labels.axes_in(node.name)

    def value(self, name: str) -> Any:
        """An argument in the new graph, in the layout in which this call needs it."""
        if self.role.kind == "contracted" and (operator_of(self.op).added or ("",))[0] == name:
            return self.added(self.raw[name])
        return self._mapped(self.raw[name])

    def _mapped(self, argument: Any) -> Any:
        return self.writer.mapped(argument, self.axis, self._gathered)

    @cached_property
    def _gathered(self) -> frozenset[str]:
        """The operands that this call needs whole, though it works on a part of an axis that they may have."""
        return gathered_operands(self.op, self.role)

    def added(self, argument: Any) -> Any:
        """An operand that is added to the sum, in the layout of the sum."""
        return self.writer.mapped(argument, self.layout.labels.scattered.get(self.op.name))

    def emit(self, target: Any, *args: Any, what: str = "", **kwargs: Any) -> fx.Node:
        """A new node for this call, or for a step of it."""
        return self.writer.emit(self.node, target, args, kwargs, what)

    def same(self, **changes: Any) -> fx.Node:
        """The same op on the parts, with some arguments replaced; a user's autograd function takes no replacements."""
        if not isinstance(self.node.target, torch._ops.OpOverload):
            return self.emit(self.node.target, *self._mapped(self.node.args))
        schema = self.node.target._schema.arguments
        values = {item.name: changes[item.name] if item.name in changes else self.value(item.name) for item in schema}
        args = [values[item.name] for item in schema if not item.kwarg_only]
        given = [item for item in schema if not item.kwarg_only]
        while args and given[-1].has_default_value() and _is(args[-1], given[-1].default_value):
            args.pop()
            given.pop()
        kwargs = {i.name: values[i.name] for i in schema if i.kwarg_only and not _is(values[i.name], i.default_value)}
        if "random" in self.op.tags and not self._noise_is_whole():
            return self.emit(draw, 0, self.layout.position, self.node.target, *args, **kwargs)
        return self.emit(self.node.target, *args, **kwargs)

    def _noise_is_whole(self) -> bool:
        """Whether the noise lacks the cut dimension: dropping channels draws one number for all positions."""
        return self.op.operator == "feature_dropout" and (self.cut_dim(self.result) or 0) > 1

    def leave(self, partial: fx.Node) -> fx.Node:
        """The sum of the devices' partial results: whole, or this device's part of it."""
        target = self.layout.labels.scattered.get(self.op.name)
        return self.writer.bridge(self.node, partial, Bridge(self.op.name, None, target, is_sum=True))

    def refuse(self, why: str, hint: str | None = None) -> NoReturn:
        """Raises `PlanError`: this call cannot be cut along this axis."""
        message = f"{self.op.target} (%{self.op.name}) cannot be cut along {self.axis}: {why}"
        raise PlanError(message, where=self.op.where, hint=hint)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call of an operator by name, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    schema = node.target._schema.arguments
    found = {item.name: item.default_value for item in schema}
    found.update({item.name: value for item, value in zip((i for i in schema if not i.kwarg_only), node.args, strict=False)})
    found.update(node.kwargs)
    return found


def _is(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)
