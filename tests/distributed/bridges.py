"""What the bridges of a cut program move on one rank, counted on the wire, beside what the plan lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from tests.distributed.cutting import captured, everyone, part_of, run
from tests.wire import Counting
from whale.axes.labels import label
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import Shard
from whale.runtime.program.shard import ShardProgram, lower_shards
from whale.runtime.program.shard import communication as steps
from whale.runtime.program.shard.slots import own_part
from whale.sharding.bridges import Bridge, bridge_bytes, find_bridges

UNNAMED = ""
"""Stands for reductions that are no sums: their messages name no tensor."""

WRITTEN: dict[Any, str] = {
    steps.enter: "all-reduce of gradients",
    steps.part: "slice",
    own_part: "slice",
    steps.gather: "all-gather",
    steps.collect: "all-gather",
    steps.exchange: "all-to-all",
    steps.leave: "all-reduce",
    steps.leave_each: "all-reduce",
    steps.scatter: "reduce-scatter",
}
"""What each step of a program does forward; those that do nothing, backward."""

Moved = dict[tuple[str, str], int]
"""Bytes by phase and tensor."""


def compared(rank: int, num_ranks: int, builder: str, shards: Sequence[Shard]) -> tuple[int, int, list[str]]:
    """How a program's bridges differ from those that the plan lists.

    Args:
        rank, num_ranks, builder, cuts: as in `tests.distributed.cutting.errors`.

    Returns:
        Bridges compared, bytes that arrived here, and the differences.
    """
    whole = captured(builder, "train")
    model = _in_float64(whole.model)
    stage = whole.stage
    lowered = lower_shards(stage.module.graph, model, whole.axes, shards, rank)
    labels = label(model, whole.axes, [node.name for node in stage.module.graph.nodes if node.name in model.by_name], shards)
    listed = find_bridges(labels, frozenset(stage.outputs))
    group = everyone(Counting)
    tensors = {name: part_of(name, value, whole.axes, shards, rank) for name, value in whole.program.tensors.items()}
    run(_Forward(lowered, group), stage, model, whole.program, whole.batch, tensors, group)
    planned: Moved = {}
    for bridge in listed:
        bytes_ = bridge_bytes(bridge, model, whole.axes, shards, model.num_rows)[rank]
        for phase, moved in zip(("forward", "backward"), bytes_, strict=True):
            key = phase, UNNAMED if _is_no_sum(bridge) else bridge.tensor
            planned[key] = planned.get(key, 0) + moved
    differences = _unlike(_moved(group), planned) + _unlisted(lowered, listed)
    return len(listed), sum(message.received for message in group.messages), differences


class _Forward(nn.Module):
    """Runs a program, and notes when its forward pass is done."""

    def __init__(self, lowered: ShardProgram, group: Counting) -> None:
        super().__init__()
        self.module = fx.GraphModule(nn.Module(), lowered.graph)
        self.group = group

    def forward(self, *arguments: Any) -> Any:
        values = self.module(*arguments)
        self.group.enter_phase("backward")
        return values


def _in_float64(model: ModelGraph) -> ModelGraph:
    """The model as `captured` runs it."""

    def doubled(op: Op) -> Op:
        return replace(op, outputs=tuple(replace(s, dtype="float64") if s.dtype == "float32" else s for s in op.outputs))

    return replace(model, ops=tuple(map(doubled, model.ops)))


def _moved(group: Counting) -> Moved:
    found: Moved = {}
    for message in group.messages:
        key = message.phase, message.what.partition("%")[2]
        found[key] = found.get(key, 0) + message.received
    return found


def _unlike(measured: Moved, planned: Moved) -> list[str]:
    """All-reduces are counted in whole bytes, so sums of several may differ by some."""
    return [
        f"{phase} %{tensor}: {measured.get((phase, tensor), 0)} bytes arrived, {planned.get((phase, tensor), 0)} are planned"
        for phase, tensor in sorted(measured.keys() | planned.keys())
        if abs(measured.get((phase, tensor), 0) - planned.get((phase, tensor), 0)) > 2
    ]


def _is_no_sum(bridge: Bridge) -> bool:
    """Whether results of parts are combined by something that a step of another kind does, within the op."""
    return bridge.combine in ("softmax", "max", "min", "any", "all", "prod")


def _unlisted(lowered: ShardProgram, listed: Sequence[Bridge]) -> list[str]:
    """Bridges that are in the program or in the plan, but not in both."""
    planned = Counter(_text(bridge) for bridge in listed if not _is_no_sum(bridge))
    written: Counter[str] = Counter()
    for node in lowered.graph.nodes:
        if node.target in WRITTEN and not node.args[0].name.endswith("__whole"):  # values made whole on all, such as positions
            written[f"{node.name.rpartition('__')[0]}: {WRITTEN[node.target]}"] += 1
    return [
        f"{text}: {written[text]} in the program, {planned[text]} in the plan"
        for text in planned | written
        if planned[text] != written[text]
    ]


def _text(bridge: Bridge) -> str:
    return f"{bridge.tensor}: {bridge.forward or f'{bridge.backward} of gradients'}"
