"""Assigns ops to stages, ``stage = max(own wish, producers)`` (unbound ops move to their first consumer), and finds what crosses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale.axes import Axes, batch_axes, discover
from whale.axes.batch import batch_axis
from whale.errors import PlanError, WhaleError
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph, Parameter
from whale.ir.plan import BatchAxis, Plan, Replica
from whale.planning.structure.structure import Structure


@dataclass(frozen=True, slots=True)
class Wish:
    """Where an op wants to run."""

    stages: tuple[int, ...]  # that it may run on, ascending
    firm: bool = False  # whether it may not move to a later stage


@dataclass(frozen=True, slots=True)
class Late:
    """An op that needs a value which only a later stage makes."""

    op: str
    needs: str
    stage: int
    needed_stage: int


@dataclass(frozen=True)
class Assignment:
    """The ops of all stages; `stage_of` has every op that is not repeated."""

    stage_of: Mapping[str, int]
    parts: tuple[Part, ...]

    @property
    def edges(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Tensors that are sent, by (source, target)."""
        found = {(source, target): tensors for target, part in enumerate(self.parts) for source, tensors in part.received}
        return dict(sorted(found.items()))


def assign(graph: ModelGraph, structure: Structure, wishes: Mapping[str, Wish], num_stages: int) -> tuple[Assignment, list[Late]]:
    """Assigns every op to a stage.

    Args:
        wishes: of the ops that have one; the others follow their consumers, or else their producers.

    Returns:
        The assignment, and the ops whose firm wish could not be met (they run on a later stage).
    """
    wish_of = [_common_wish(wishes, names) for names in structure.atoms]
    stage, late = _earliest_stages(structure, wish_of)
    _sink(structure, wish_of, stage)
    stage_of = {name: stage[atom] for name, atom in structure.atom_of.items()}
    faults = [fault for atom in late for fault in _explain_late(structure, wishes, stage_of, atom)]
    return Assignment(stage_of, _parts(graph, structure, stage_of, num_stages)), faults


def _common_wish(wishes: Mapping[str, Wish], names: tuple[str, ...]) -> Wish | None:
    """The wish of an atom: what all its ops allow, else the latest that one of them asks for."""
    if len(names) == 1:
        return wishes.get(names[0])
    own = [wishes[name] for name in names if name in wishes]
    if not own:
        return None
    common = set(own[0].stages).intersection(*(wish.stages for wish in own[1:]))
    if common:
        return Wish(tuple(sorted(common)), any(wish.firm for wish in own))
    return Wish((max(wish.stages[0] for wish in own),), any(wish.firm for wish in own))


def _earliest_stages(structure: Structure, wish_of: list[Wish | None]) -> tuple[list[int], list[int]]:
    stage = [0] * len(structure.atoms)
    late = []
    for atom in structure.order:
        earliest = max((stage[source] for source in structure.producers[atom]), default=0)
        wish = wish_of[atom]
        fitting = [s for s in wish.stages if s >= earliest] if wish else []
        stage[atom] = fitting[0] if fitting else earliest
        if wish and wish.firm and not fitting:
            late.append(atom)
    return stage, late


def _sink(structure: Structure, wish_of: list[Wish | None], stage: list[int]) -> None:
    """Moves ops without a wish to the first stage that reads them."""
    first: dict[int, int] = {}
    for atom in reversed(structure.order):
        if wish_of[atom] is None and atom in first:
            stage[atom] = first[atom]
        for source in structure.producers[atom]:
            first[source] = min(first.get(source, stage[atom]), stage[atom])


def _explain_late(structure: Structure, wishes: Mapping[str, Wish], stage_of: Mapping[str, int], atom: int) -> Iterable[Late]:
    for name in structure.atoms[atom]:
        if name not in wishes or not wishes[name].firm:
            continue
        asked = wishes[name].stages[-1]
        needs = [source for source in structure.inputs[name] if stage_of.get(source, -1) > asked and structure.atom_of[source] != atom]
        if needs:
            yield Late(name, needs[0], asked, stage_of[needs[0]])
            return
    name = next(name for name in structure.atoms[atom] if name in wishes)
    source = max((s for member in structure.atoms[atom] for s in structure.inputs[member] if s in stage_of), key=lambda s: stage_of[s])
    yield Late(name, source, wishes[name].stages[-1], stage_of[source])


def _parts(graph: ModelGraph, structure: Structure, stage_of: Mapping[str, int], num_stages: int) -> tuple[Part, ...]:
    members: list[set[str]] = [set() for _ in range(num_stages)]
    for name, stage in stage_of.items():
        members[stage].add(name)
    for name in _wanted_repeats(graph, structure):
        members[num_stages - 1].add(name)
    for term in graph.loss:
        if term.weight in structure.repeatable and term.sum in stage_of:
            members[stage_of[term.sum]].add(term.weight)
    for own in members:
        _add_repeats(own, structure)
    return parts_of(graph, stage_of, [tuple(sorted(own, key=graph.position.__getitem__)) for own in members])


def parts_of(graph: ModelGraph, stage_of: Mapping[str, int], ordered: Sequence[tuple[str, ...]]) -> tuple[Part, ...]:
    """The parts of the stages, with their parameters and what they receive and hand on.

    Args:
        stage_of: the stage of every op that is not repeated.
        ordered: per stage its ops in graph order, with repeated ones.
    """
    held = [graph.parameters_read(ops) for ops in ordered]
    for parameter in graph.parameters:
        if not any(parameter.name in own for own in held):
            held[_keeper(graph, stage_of, parameter)].add(parameter.name)
    received = [_received(graph, stage_of, ops, stage) for stage, ops in enumerate(ordered)]
    handed_on: list[dict[str, None]] = [{} for _ in ordered]
    for source, tensors in (arriving for own in received for arriving in own):
        handed_on[source] |= dict.fromkeys(tensors)
    return tuple(
        Part(ops, tuple(each.name for each in graph.parameters if each.name in held[stage]), received[stage], tuple(handed_on[stage]))
        for stage, ops in enumerate(ordered)
    )


def _keeper(graph: ModelGraph, stage_of: Mapping[str, int], parameter: Parameter) -> int:
    """The stage of a parameter that only outputs may read: the last that runs ops of its scopes, else the last of all."""
    keys = [scope.key for scope in parameter.scope]
    own = (stage_of.get(op.name, -1) for op in graph.ops if keys and keys == [scope.key for scope in op.scope])
    return max(own, default=-1)


def _wanted_repeats(graph: ModelGraph, structure: Structure) -> Iterable[str]:
    """Repeatable results of the whole graph: the last stage makes them."""
    wanted = [*graph.outputs, *(term.sum for term in graph.loss)]
    wanted += [term.weight for term in graph.loss if term.weight is not None and term.sum in structure.repeatable]
    return [name for name in wanted if name in structure.repeatable]


def _add_repeats(own: set[str], structure: Structure) -> None:
    waiting = list(own)
    while waiting:
        for source in structure.inputs[waiting.pop()]:
            if source in structure.repeatable and source not in own:
                own.add(source)
                waiting.append(source)


def _received(graph: ModelGraph, stage_of: Mapping[str, int], ops: tuple[str, ...], stage: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    found: dict[int, dict[str, None]] = {}
    for name in ops:
        for source in graph.by_name[name].inputs:
            if stage_of.get(source, stage) != stage:
                found.setdefault(stage_of[source], {})[source] = None
    return tuple((source, tuple(tensors)) for source, tensors in sorted(found.items()))


def crossing(replicas: Iterable[Replica]) -> dict[str, bool]:
    """The tensors that are sent, and whether one of their ends is a stage of several devices."""
    found: dict[str, bool] = {}
    for replica in replicas:
        for edge in replica.edges:
            wide = any(len(replica.stages[end].virtual_device.devices) > 1 for end in (edge.source, edge.target))
            for name in edge.tensors:
                found[name] = found.get(name, False) or wide
    return found


def batch_axis_faults(plan: Plan, graph: ModelGraph, axes: Axes) -> Iterator[PlanError]:
    """Tensors whose batch axis in the plan is wrong."""
    found = batch_axes(graph, axes)
    for name, given in plan.batch_axes:
        if name not in graph.by_name:
            yield PlanError(f"batch axes of the plan name {name}, which is not a tensor of the model")
        elif found.get(name) != given:
            known = str(found[name]) if name in found else "it has none"
            yield PlanError(f"the batch axis of {name} is {given} in the plan, {known} in the model", where=graph.by_name[name].where)


def crossing_faults(graph: ModelGraph, replicas: Iterable[Replica], batch_axes: Mapping[str, BatchAxis]) -> list[WhaleError]:
    """The tensors that cannot be sent, with their lines."""
    faults: list[WhaleError] = []
    for name, wide in crossing(replicas).items():
        op = graph.by_name[name]
        if len(op.outputs) != 1:
            faults.append(PlanError(f"{name} is sent between stages, but has {len(op.outputs)} results, not one tensor", where=op.where))
        elif op.has_own_size:
            faults.append(
                PlanError(
                    f"{name} is sent between stages, but {op.outputs[0]} mixes samples: its size is not in proportion to the rows",
                    where=op.where,
                    hint="put the ops that make and read it under one scope",
                )
            )
        elif wide and op.outputs[0].has_rows and name not in batch_axes:
            faults.append(
                PlanError(
                    f"{name} is sent between stages of several devices, but {op.outputs[0]} has no known batch axis",
                    where=op.where,
                    hint="give both stages one device, or put the ops that make and read it under one scope",
                )
            )
    return faults


def find_batch_axes(graph: ModelGraph, replicas: Sequence[Replica], prices: Prices | None = None) -> tuple[tuple[str, BatchAxis], ...]:
    """The batch axes of the tensors that are sent."""
    travelling = crossing(replicas)
    if not travelling:
        return ()
    axes = prices.axes if prices else discover(graph)
    found = ((name, batch_axis(graph.by_name[name], axes)) for name in travelling)
    return tuple((name, axis) for name, axis in found if axis is not None)
