"""Checks that a plan names what its model has: ops, tensors that travel, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from whale.errors import PlanError, first_few
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica


def name_faults(plan: Plan, graph: ModelGraph) -> list[PlanError]:
    """Every name of a plan that is none of the model; of equal replicas the first is named."""
    found: dict[object, list[PlanError]] = {}
    for replica in plan.replicas:
        key = tuple((stage.ops, stage.parameters) for stage in replica.stages), replica.edges
        if key not in found:
            found[key] = list(_of_replica(replica, graph))
    return [fault for faults in found.values() for fault in faults]


def _of_replica(replica: Replica, graph: ModelGraph) -> Iterator[PlanError]:
    parameters = {parameter.name for parameter in graph.parameters}
    for stage in replica.stages:
        place = f"replica {replica.index}, stage {stage.index}"
        yield from _unknown("ops", place, stage.ops, graph.by_name)
        yield from _unknown("parameters and buffers", place, stage.parameters, parameters)
    for edge in replica.edges:
        yield from _unknown("tensors", f"replica {replica.index}, edge {edge.source} -> {edge.target}", edge.tensors, graph.by_name)


def _unknown(what: str, place: str, names: Iterable[str], known: Iterable[str]) -> Iterator[PlanError]:
    wrong = sorted(set(names) - set(known))
    if wrong:
        yield PlanError(f"a plan names {what} of its model ({place}: {first_few(wrong)} are none)")
