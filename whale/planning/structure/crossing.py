"""What crosses between stages: where the batch is in each tensor, and why a tensor may not cross."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from whale.axes import Axes, batch_axes, discover
from whale.axes.batch import batch_axis
from whale.errors import PlanError, WhaleError
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis, Plan, Replica


def crossing(replicas: Iterable[Replica]) -> dict[str, bool]:
    """The tensors that travel, and whether one of their ends is a stage of several devices."""
    found: dict[str, bool] = {}
    for replica in replicas:
        for edge in replica.edges:
            wide = any(len(replica.stages[end].virtual_device.devices) > 1 for end in (edge.source, edge.target))
            for name in edge.tensors:
                found[name] = found.get(name, False) or wide
    return found


def batch_axis_faults(plan: Plan, graph: ModelGraph, axes: Axes) -> Iterator[PlanError]:
    """Tensors of which a plan says wrongly where their batch is."""
    found = batch_axes(graph, axes)
    for name, given in plan.batch_axes:
        if name not in graph.by_name:
            yield PlanError(f"a plan names tensors of its model (batch axes: {name} is none)")
        elif found.get(name) != given:
            known = str(found[name]) if name in found else "it has none"
            yield PlanError(
                f"a plan says where the batch is in what travels ({name}: {given}; by the model: {known})", where=graph.by_name[name].where
            )


def crossing_faults(graph: ModelGraph, replicas: Iterable[Replica], batch_axes: Mapping[str, BatchAxis]) -> list[WhaleError]:
    """The tensors that cannot travel, with their lines."""
    faults: list[WhaleError] = []
    for name, wide in crossing(replicas).items():
        op = graph.by_name[name]
        if len(op.outputs) != 1:
            faults.append(PlanError(f"only tensors travel between stages ({name}: {len(op.outputs)} results)", where=op.where))
        elif any(factor < 0 for factor in op.outputs[0].row_factors):
            faults.append(
                PlanError(
                    f"a tensor that travels between stages grows in proportion to the rows ({name}: {op.outputs[0]} mixes samples)",
                    where=op.where,
                    hint="put the ops that make and read it under one scope",
                )
            )
        elif wide and op.outputs[0].has_rows and name not in batch_axes:
            faults.append(
                PlanError(
                    f"a tensor between stages of several devices has a known batch axis ({name}: {op.outputs[0]} has none)",
                    where=op.where,
                    hint="give both stages one device, or put the ops that make and read it under one scope",
                )
            )
    return faults


def find_batch_axes(graph: ModelGraph, replicas: Sequence[Replica], prices: Prices | None = None) -> tuple[tuple[str, BatchAxis], ...]:
    """Where the batch is in the tensors that travel."""
    travelling = crossing(replicas)
    if not travelling:
        return ()
    axes = prices.axes if prices else discover(graph)
    found = ((name, batch_axis(graph.by_name[name], axes)) for name in travelling)
    return tuple((name, axis) for name, axis in found if axis is not None)
