"""The pass that makes a stage's graph compute on the parts of one device of a split group.

    whole x ---> layer_norm ---> enter ---> linear (own columns) ---> gelu ---> linear (own rows) ---> leave + bias

    x cut along the sequence ---> layer_norm ---> collect ---> linear (own columns) ---> ... ---> scatter + bias

Inputs and outputs of the stage are whole, unless the plan says otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

import whale.runtime.program.shard.contractions as contractions
import whale.runtime.program.shard.shapes as shapes
import whale.runtime.program.shard.tables as tables
from whale.axes.operators import operator_of
from whale.axes.values import Axes, Dimension
from whale.errors import PlanError, raise_faults
from whale.ir.graph import ModelGraph, storages
from whale.ir.plan import Shard
from whale.ir.writes import MemoryWrites
from whale.runtime.program.shard.call import Call
from whale.runtime.program.shard.layout import ShardLayout
from whale.runtime.program.shard.slots import Slots
from whale.runtime.program.shard.writer import GROUP, Writer


@dataclass(frozen=True)
class ShardProgram:
    """A stage's graph on the parts of one device."""

    graph: fx.Graph  # takes the split group (`GROUP`) and then the inputs of the old graph; returns the same, whole
    # per parameter and buffer of which the device holds a part, the dimensions of the whole one
    parameters: Mapping[str, tuple[Dimension, ...]]
    # whole parameters whose gradients must be summed over the split group. Gradients of all other whole parameters are complete, and equal
    # on all devices of the group
    partial: frozenset[str]


def lower_shards(
    graph: fx.Graph,  # of the stage, its nodes named as the ops; not changed
    model: ModelGraph,
    axes: Axes,
    shards: Sequence[Shard],
    position: int,  # of this device in its split group
    *,
    # parameters whose gradients must be complete, since another program on the device adds complete ones to them, or the gradient sums are
    # settled
    complete: Collection[str] = (),
    # parameters and buffers that these cuts read whole though the device holds a part, and where the parts belong
    gathered: Mapping[str, Slots] = MappingProxyType({}),
    num_rows: int = 0,  # rows of the group; needed where the batch is cut
) -> ShardProgram:
    """Rewrites a stage's graph so that it computes on parts. Raises PlanError, at the user's line, if an op cannot be cut so."""
    known = [node for node in graph.nodes if node.name in model.by_name]
    ops = [node.name for node in known if node.op != "placeholder"]
    layout = ShardLayout(model, axes, tuple(shards), position, ops, num_rows)
    roots = {node.name: node.name for node in graph.nodes} | storages(map(model.by_name.__getitem__, ops))
    writes = MemoryWrites(model, ops)
    raise_faults([*layout.faults(ops), *_memory_faults(ops, layout, writes)])
    partial = layout.labels.partial_parameters - frozenset(complete)
    names = {node.name for node in known if _parameter(model, node.name) in partial}
    writer = Writer(layout, roots, writes, frozenset(names))
    for node in graph.nodes:
        _write(node, writer)
        is_held = node.op == "placeholder" and node.name in model.by_name
        if is_held and (slots := gathered.get(_parameter(model, node.name))) is not None:
            writer.gather_whole(node, slots)
    shard = [node.name for node in known if _parameter(model, node.name) and layout.labels.held(node.name)]
    parameters = {_parameter(model, name): layout.dimensions(name) for name in shard}
    writer.graph.lint()
    return ShardProgram(writer.graph, parameters, partial)


def _write(node: fx.Node, writer: Writer) -> None:
    """Writes one node of the old graph."""
    layout, op = writer.layout, writer.layout.model.by_name.get(node.name)
    if node.op == "output":
        writer.graph.output(fx.node.map_arg(node.args[0], lambda value: writer.form(value, layout.labels.returned(value.name))))
        return
    axis = layout.labels.work.get(node.name)
    if op is None or node.op == "placeholder" or node.target is operator.getitem:
        writer.copy(node, raw=True)
    elif axis is None:
        writer.copy(node)
    else:
        call = Call(writer, node, op, axis)
        writer.copies[node] = _lower(call)
    if op is not None and "in_place" in op.tags:
        writer.wrote(node)


def _lower(call: Call) -> fx.Node:
    """Writes a cut call as the entry of its operator says.
    Raises PlanError if it has no lowering: sizes and positions among its arguments would stay those of the whole.
    """
    name = operator_of(call.op).on_parts
    if name is None:
        call.refuse("it has no lowering", hint=f"leave {call.axis} whole")
    file, _, function = name.partition(".")
    made: fx.Node = getattr({"contractions": contractions, "shapes": shapes, "tables": tables}[file], function)(call)
    return made


def _memory_faults(ops: Sequence[str], layout: ShardLayout, writes: MemoryWrites) -> list[PlanError]:
    """Memory that is written in place needs one layout for all that see it: a bridge between them would be a copy."""
    faults, labels = [], layout.labels
    for name in ops:
        op = layout.model.by_name[name]
        for operand in op.inputs if op.target != "operator.getitem" else ():
            if labels.held(operand) != labels.use(name, operand).axis and writes.need_same(operand, name):
                text = f"{op.target} (%{name}) shares memory that is written in place, so it is cut as %{operand} is"
                faults.append(PlanError(text, where=op.where))
    return faults


def _parameter(model: ModelGraph, name: str) -> str:
    """The first name of the parameter or buffer of a placeholder; "" for any other node."""
    op = model.by_name[name]
    return model.parameter_by_name[op.target].name if op.kind in ("parameter", "buffer") else ""


__all__ = ["GROUP", "ShardProgram", "lower_shards"]
