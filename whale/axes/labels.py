"""The axis along which each op of a split stage works on parts, and how its results lie between ops.

          works along     its result
up        features        cut along features
gelu      features        cut along features
down      features        whole, after a sum; or cut along sequence, each device keeping its part of the sum
add       sequence        cut along sequence
norm      nothing         whole
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from whale.axes.operators import added_operand, gathered_operands
from whale.axes.values import Axes, may_lie_in_parts
from whale.errors import PlanError
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import Shard

SCATTERED = frozenset({"sum", "mean", "lookup"})  # ways to combine partial results that let a device keep its part of the sum


@dataclass(frozen=True, slots=True)
class Use:
    """How an op needs an operand."""

    axis: str | None = None  # along which it is cut; None if it is whole
    # whether it is whole while the op works on parts of an axis, which it lacks or is gathered along: its gradients are partial
    entered: bool = False


@dataclass(frozen=True)
class Labels:
    """The labels of one stage, of its calls (`ops`) and shards."""

    graph: ModelGraph
    axes: Axes
    ops: frozenset[str]
    shards: tuple[Shard, ...]

    @cached_property
    def calls(self) -> tuple[Op, ...]:
        """The calls of the stage, in graph order."""
        names = sorted(self.ops, key=self.graph.position.__getitem__)
        return tuple(op for op in map(self.graph.by_name.__getitem__, names) if op.kind == "call")

    @cached_property
    def work(self) -> Mapping[str, str]:
        """Per op that works on parts, the axis; `faults` makes sure that there are not two."""
        found: dict[str, str] = {}
        for shard in self.shards:
            whole = frozenset(shard.whole_in)
            for op in self.meeting[shard.axis]:
                if op not in whole:
                    found.setdefault(op, shard.axis)
        return self._with_items(found)

    def _with_items(self, work: dict[str, str]) -> dict[str, str]:
        """One result of several goes with the op that made it."""
        for op in self.calls:
            if op.target == "operator.getitem":
                axis = work.get(op.inputs[0])
                work.pop(op.name, None)
                if axis is not None and op.name in self.axes.ops and axis in self.axes.ops[op.name].roles:
                    work[op.name] = axis
        return work

    @cached_property
    def scattered(self) -> Mapping[str, str]:
        """Per op whose sum is scattered, the axis along which."""
        return {op: shard.axis for shard in self.shards for op in shard.scattered if op in self.ops}

    @cached_property
    def meeting(self) -> Mapping[str, tuple[str, ...]]:
        """Per cut axis, the calls of the stage that meet it."""
        found: dict[str, list[str]] = {shard.axis: [] for shard in self.shards}
        for op in self.calls:
            if op.name in self.axes.ops:
                for axis in self.axes.ops[op.name].roles:
                    if axis in found:
                        found[axis].append(op.name)
        return {axis: tuple(names) for axis, names in found.items()}

    def axes_in(self, op: str) -> frozenset[str]:
        return self.axes.in_results(op)

    def held(self, op: str) -> str | None:
        """The axis along which the results of an op are cut; None if they are whole."""
        if op not in self._held:
            self._held[op] = self._find_held(op)
        return self._held[op]

    @cached_property
    def _held(self) -> dict[str, str | None]:
        return {}

    def _find_held(self, op: str) -> str | None:
        known = self.graph.by_name[op]
        if known.kind in ("parameter", "buffer"):
            parameter = self.graph.parameter_by_name[known.target].name
            axes = (shard.axis for shard in self.shards if parameter not in shard.whole_parameters and shard.axis in self.axes_in(op))
            return next((axis for axis in axes if may_lie_in_parts(self.axes.ops[op].outputs[0], axis)), None)
        if op not in self.ops:
            return next((shard.axis for shard in self.shards if op in shard.arriving), None)
        axis = self.scattered.get(op, self.work.get(op))
        return axis if axis in self.axes_in(op) else None

    def is_summed(self, op: str) -> bool:
        """Whether an op's results for parts are combined over the group."""
        axis = self.work.get(op)
        return axis is not None and self.axes.ops[op].roles[axis].kind == "contracted"

    def use(self, op: str, operand: str) -> Use:
        """How an op needs an operand, which is one tensor."""
        axis = self.work.get(op)
        if axis is not None and self.is_summed(op) and added_operand(self.graph.by_name[op]) == operand:
            axis = self.scattered.get(op)
        role = None if axis is None else self.axes.ops[op].roles.get(axis)
        return self.use_along(axis, operand, frozenset() if role is None else gathered_operands(self.graph.by_name[op], role))

    def use_along(self, axis: str | None, operand: str, gathered: Set[str] = frozenset()) -> Use:
        """How an operand is needed for work along an axis, or for whole work, if some are gathered for it."""
        if axis is None:
            return Use()
        return Use(axis) if axis in self.axes_in(operand) and operand not in gathered else Use(entered=True)

    def returned(self, op: str) -> Use:
        """How the stage hands on a value: whole, unless the plan leaves it in parts."""
        return Use(next((shard.axis for shard in self.shards if op in shard.handed_on), None))

    @cached_property
    def partial_parameters(self) -> frozenset[str]:
        """Whole trainable parameters that only ops on parts read: their gradients are partial until the end of the step."""
        found: dict[str, bool] = {}
        for op in self.calls:
            for operand in op.inputs:
                source = self.graph.by_name[operand]
                if source.kind == "parameter" and self.held(operand) is None:
                    parameter, use = self.graph.parameter_by_name[source.target], self.use(op.name, operand)
                    is_partial = parameter.trainable and (use.entered or use.axis is not None)
                    found[parameter.name] = found.get(parameter.name, True) and is_partial
        return frozenset(name for name, is_partial in found.items() if is_partial)

    @cached_property
    def synchronized(self) -> tuple[str, ...]:
        """Ops of parameters whose gradients are summed over the group at the end of the step, not at its bridges."""
        names, partial = self.graph.parameter_by_name, self.partial_parameters
        return tuple(op.name for op in self.graph.ops if op.kind == "parameter" and names[op.target].name in partial)

    def faults(self) -> list[PlanError]:
        """Errors at the user's lines for ops that cannot work so: the first op per axis, or pair of axes."""
        found: dict[object, PlanError] = {}
        for op in self.calls:
            if op.name in self.axes.ops:
                for key, fault in self._op_faults(op):
                    found.setdefault(key, fault)
        return list(found.values())

    def _op_faults(self, op: Op) -> list[tuple[object, PlanError]]:
        roles = self.axes.ops[op.name].roles
        met = [shard.axis for shard in self.shards if shard.axis in roles and op.name not in shard.whole_in]
        found: list[tuple[object, PlanError]] = []
        for axis in met:
            if roles[axis].kind == "whole":
                text = f"{op.target} (%{op.name}) needs {axis} whole, which is cut: it {roles[axis].reason}"
                found.append((axis, PlanError(text, where=op.where)))
        if len(met) > 1:
            text = f"{op.target} (%{op.name}) meets two axes that are cut ({' and '.join(met)})"
            found.append((frozenset(met), PlanError(text, where=op.where)))
        unsaid = [shard.axis for shard in self.shards if shard.axis not in roles and shard.axis in self.axes_in(op.name)]
        for axis in unsaid:
            text = f"{op.target} (%{op.name}) has no rule for {axis}, which is cut"
            found.append(((axis, "unsaid"), PlanError(text, where=op.where)))
        target = self.scattered.get(op.name)
        if target is not None and not self._may_scatter(op, target):
            text = f"{op.target} (%{op.name}) cannot be scattered along {target}: only a sum over another axis can"
            found.append(((target, "scattered"), PlanError(text, where=op.where)))
        return found

    def _may_scatter(self, op: Op, target: str) -> bool:
        axis = self.work.get(op.name)
        return axis is not None and may_scatter(op, self.axes, axis, target)


def may_scatter(op: Op, axes: Axes, axis: str, target: str) -> bool:
    """Whether the sum that an op makes over parts of one axis may be scattered along another, which it has and keeps."""
    roles = axes.ops[op.name].roles
    role, other = roles.get(axis), roles.get(target)
    is_sum = role is not None and role.kind == "contracted" and role.combine in SCATTERED
    is_kept = other is not None and other.kind in ("kept", "broadcast") and target != axis
    return is_sum and is_kept and len(op.outputs) == 1 and "in_place" not in op.tags


def label(graph: ModelGraph, axes: Axes, ops: Collection[str], shards: Sequence[Shard]) -> Labels:
    return Labels(graph, axes, frozenset(ops), tuple(shards))
