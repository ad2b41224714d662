"""The same plan for another capture of the same model: ops go where the parameters they read are held."""

from __future__ import annotations

import dataclasses

from whale.axes import Axes, discover
from whale.errors import PlanError, WhaleError, raise_faults
from whale.estimate import Line, spec_line
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Edge, Plan, Replica, Shard, TaskGraph, program_of
from whale.ir.writes import written_buffers
from whale.planning.replicas.joining import cut_rows
from whale.planning.retarget.shards import retarget_shards, same_axes
from whale.planning.structure.crossing import crossing_faults, find_batch_axes
from whale.planning.structure.stages import Assignment, Late, Wish, assign
from whale.planning.structure.structure import Structure, analyse, floating_ops
from whale.planning.structure.updates import update_faults
from whale.planning.verify.shards import shard_faults


def retarget_plan(plan: Plan, train_graph: ModelGraph, other: ModelGraph) -> Plan:
    """A plan with the devices, shares and parameters of `plan` for the ops of `other`.

    An op that reads parameters runs on the first stage that holds them all and is not before its producers. What is
    computed from these stays with its producers, what is computed from the batch alone goes where it is read. Where nothing is
    trained and there is no such stage, a later one is lent the parameters: it then has more of them than in training.

    Args:
        plan: made for `train_graph`.
        other: another capture of the model: evaluation, prediction, or other rows.

    Raises:
        PlanError: the captures have unlike parameters, or an op finds no stage where it is trained or writes what it would be lent.
    """
    own = {parameter.name for parameter in train_graph.parameters}
    unknown = sorted(parameter.name for parameter in other.parameters if parameter.name not in own)
    if unknown:
        raise PlanError(f"captures of one model have the same parameters (only in {other.mode}: {', '.join(unknown)})")
    structure = _structure(other, plan)
    axes = discover(other) if plan.is_sharded else None
    ours = discover(train_graph) if axes else None
    names = same_axes(ours, axes) if ours and axes else {}
    assignments: dict[tuple[tuple[str, ...], ...], Assignment] = {}
    replicas = []
    for replica in plan.replicas:
        held = tuple(stage.parameters for stage in replica.stages)
        if held not in assignments:
            assignments[held] = _assign_by_holders(other, structure, held)
        rows = plan.micro_batch_rows(replica.index, plan.planned_rows)[0]
        carried_replica = _carry_replica(replica, other, assignments[held], rows[1] - rows[0], ours, axes, names)
        replicas.append(_with_rows_cut(carried_replica, replica, other, axes) if axes else carried_replica)
    batch_axes = find_batch_axes(other, replicas)
    raise_faults([*crossing_faults(other, replicas, dict(batch_axes)), *update_faults(other, replicas)])
    first = next(iter(assignments.values()))
    carried = dataclasses.replace(
        plan,
        model=other.fingerprint,
        replicas=tuple(replicas),
        task_graphs=_task_graphs(plan, other, first),
        batch_axes=batch_axes,
        choices=(),
    )
    if axes is not None:
        raise_faults(list(shard_faults(carried, other, axes)))
    return carried


def _structure(graph: ModelGraph, plan: Plan) -> Structure:
    """The structure in which a cheap op is repeated only if every stage holds the buffers it reads."""
    structure = analyse(graph)
    everywhere = set.intersection(*(set(stage.parameters) for replica in plan.replicas for stage in replica.stages))
    pinned = [
        name
        for name in structure.repeatable
        if any(
            source.kind == "buffer" and graph.parameter_by_name[source.target].name not in everywhere
            for source in map(graph.by_name.__getitem__, structure.inputs[name])
        )
    ]
    return analyse(graph, frozenset(pinned)) if pinned else structure


def _assign_by_holders(graph: ModelGraph, structure: Structure, held: tuple[tuple[str, ...], ...]) -> Assignment:
    holders: dict[str, set[int]] = {}
    for stage, names in enumerate(held):
        for name in names:
            holders.setdefault(name, set()).add(stage)
    floating = floating_ops(graph, structure)
    anywhere = tuple(range(len(held)))
    wishes: dict[str, Wish] = {}
    for name in structure.atom_of:
        read = [parameter.name for parameter in graph.parameters_among(structure.inputs[name])]
        if read:
            common = set.intersection(*(holders[parameter] for parameter in read))
            wishes[name] = Wish(tuple(sorted(common)) or (len(held) - 1,), firm=True)
        elif name not in floating:
            wishes[name] = Wish(anywhere)
    assignment, late = assign(graph, structure, wishes, len(held))
    trains = graph.mode == "train"
    faults: list[WhaleError] = [_fault(graph, fault) for fault in late if trains]
    for stage, part in enumerate(assignment.parts):
        missing = _lent(graph, part.ops, held[stage])
        written = written_buffers(graph, frozenset(part.ops))
        if odd := [name for name in missing if trains or name in written]:
            faults.append(PlanError(f"in {graph.mode}, stage {stage} trains or writes what it does not hold ({', '.join(odd)})"))
    raise_faults(faults)
    return assignment


def _lent(graph: ModelGraph, ops: tuple[str, ...], held: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters and buffers that ops of a stage read and it does not hold."""
    return tuple(sorted(graph.parameters_read(ops).difference(held)))


def _fault(graph: ModelGraph, late: Late) -> PlanError:
    return PlanError(
        f"in {graph.mode}, an op finds its parameters where its values are ({late.op} reads parameters of stage {late.stage} "
        f"and a value of stage {late.needed_stage})",
        where=graph.by_name[late.op].where,
        hint="keep the order of the modules the same in training and in evaluation",
    )


def _carry_replica(
    replica: Replica,
    graph: ModelGraph,
    assignment: Assignment,
    num_rows: int,
    ours: Axes | None,
    axes: Axes | None,
    names: dict[str, str],
) -> Replica:
    stages = []
    for stage, part in zip(replica.stages, assignment.parts, strict=True):
        lent = _lent(graph, part.ops, stage.parameters)
        shards = retarget_shards(stage, ours, names, graph, axes, part.ops, lent) if ours and axes else ()
        parameters = (*stage.parameters, *lent)
        stages.append(
            dataclasses.replace(
                stage,
                ops=part.ops,
                parameters=parameters,
                estimates=(),
                program=program_of(part.ops, offload=stage.offloads),
                shards=shards,
            )
        )
    edges = []
    for (source, target), tensors in assignment.edges.items():
        payload = Line.sum(spec_line(spec, graph.num_rows) for name in tensors for spec in graph.by_name[name].outputs)
        edges.append(Edge(source, target, tensors, round(payload.at(num_rows))))
    return dataclasses.replace(replica, stages=tuple(stages), edges=tuple(edges))


def _with_rows_cut(carried: Replica, replica: Replica, graph: ModelGraph, axes: Axes) -> Replica:
    """The carried replica, where joined replicas divide the rows of a stage: so they do here."""
    cuts = [stage.row_shard if len(stage.shards) == 1 else None for stage in replica.stages]
    stages = tuple(
        dataclasses.replace(stage, shards=(Shard(BATCH, cut.sizes),)) if cut and stage.ops else stage
        for stage, cut in zip(carried.stages, cuts, strict=True)
    )
    return dataclasses.replace(carried, stages=cut_rows(stages, carried.edges, graph, axes))


def _task_graphs(plan: Plan, graph: ModelGraph, assignment: Assignment) -> tuple[TaskGraph, ...]:
    """The TaskGraphs with the other graph's ops: those of a stage go to the first TaskGraph of that stage."""
    first = [stage.task_graphs[0] for stage in plan.replicas[0].stages]
    members: dict[str, list[str]] = {task_graph.name: [] for task_graph in plan.task_graphs}
    for op in graph.ops:
        if op.kind == "call":
            members[first[assignment.stage_of.get(op.name, 0)]].append(op.name)
    return tuple(dataclasses.replace(task_graph, ops=tuple(members[task_graph.name])) for task_graph in plan.task_graphs)
