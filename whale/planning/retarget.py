"""Carries a plan over to another capture of its model: evaluation, prediction, other sizes.

Ops go where the parameters they read are held; for other sizes the same ops stay on the same stages:

train, 16 tokens      %linear [b, 16, 64] on stage 0      shard of 16 positions 8:8
train, 24 tokens      %linear [b, 24, 64] on stage 0      shard of 24 positions 12:12

Axes are the same where they are the same dimension of a parameter: their names depend on the graph's use of them, so an
axis may have another name where the loss is missing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from whale.axes import Axes, discover
from whale.axes.labels import label
from whale.axes.values import Concatenation, Dimension
from whale.errors import PlanError, WhaleError, raise_faults
from whale.estimate import Line, spec_line
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH, Edge, Plan, Replica, Shard, Stage, TaskGraph, program_of
from whale.ir.writes import MemoryWrites, written_buffers
from whale.planning.pipeline.segments import find_ground
from whale.planning.replicas.joining import cut_rows
from whale.planning.shard.write import OpCuts, carried, with_work
from whale.planning.structure.stages import Assignment, Late, Wish, assign, crossing_faults, find_batch_axes
from whale.planning.structure.structure import Structure, analyse, floating_ops
from whale.planning.verify.shards import shard_faults
from whale.planning.verify.verify import update_faults
from whale.sharding.parameters import ParameterShardings, Pattern

__all__ = ["carry_plan", "retarget_plan"]


def retarget_plan(plan: Plan, train_graph: ModelGraph, other: ModelGraph) -> Plan:
    """A plan with the devices, shares and parameters of `plan` for the ops of `other`.

    An op that reads parameters runs on the first stage that holds them all and is not before its producers. What is computed
    from these stays with its producers, or with its readers if it cannot be sent; what is computed from the batch alone goes
    where it is read. Where nothing is trained and there is no such stage, the parameters are lent to a later one, which then
    holds more than in training.

    Args:
        plan: made for `train_graph`.
        other: another capture of the model: evaluation, prediction, or other rows.

    Raises:
        PlanError: the captures have different parameters, or an op has no stage where it is trained or writes a lent parameter.
    """
    own = {parameter.name for parameter in train_graph.parameters}
    unknown = sorted(parameter.name for parameter in other.parameters if parameter.name not in own)
    if unknown:
        raise PlanError(f"the capture for {other.mode} has parameters that the training does not have: {', '.join(unknown)}")
    structure = _structure(other, plan)
    axes = discover(other) if plan.is_sharded else None
    ours = discover(train_graph) if axes else None
    names = same_axes(ours, axes) if ours and axes else {}
    assignments: dict[tuple[tuple[str, ...], ...], Assignment] = {}
    replicas = []
    for replica, micro_batches in zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True):
        held = tuple(stage.parameters for stage in replica.stages)
        if held not in assignments:
            assignments[held] = _assign_by_holders(other, structure, held)
        start, stop = micro_batches[0]
        carried_replica = _carry_replica(replica, other, assignments[held], stop - start, ours, axes, names)
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
    """The structure in which a cheap op is repeated only if every stage holds the buffers it reads, and only what can be sent is."""
    bonds = [(op.name, user) for op in graph.ops if op.has_own_size for user in graph.users[op.name]]
    structure = analyse(graph, bonds=bonds)
    everywhere = set.intersection(*(set(stage.parameters) for replica in plan.replicas for stage in replica.stages))
    pinned = [
        name
        for name in structure.repeatable
        if any(
            source.kind == "buffer" and graph.parameter_by_name[source.target].name not in everywhere
            for source in map(graph.by_name.__getitem__, structure.inputs[name])
        )
    ]
    return analyse(graph, frozenset(pinned), bonds) if pinned else structure


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
            faults.append(PlanError(f"in {graph.mode}, stage {stage} trains or writes {', '.join(odd)}, which it does not hold"))
    raise_faults(faults)
    return assignment


def _lent(graph: ModelGraph, ops: tuple[str, ...], held: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters and buffers that ops of a stage read and it does not hold."""
    return tuple(sorted(graph.parameters_read(ops).difference(held)))


def _fault(graph: ModelGraph, late: Late) -> PlanError:
    return PlanError(
        f"in {graph.mode}, {late.op} reads parameters of stage {late.stage} and a value of the later stage {late.needed_stage}",
        where=graph.by_name[late.op].where,
        hint="keep the order of the modules the same in all captures; a part that the first does not run is on the last stage: give "
        "parallelize a batch that runs it, or put it under a scope",
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
    edges = tuple(_edge(*ends, tensors, graph, num_rows) for ends, tensors in assignment.edges.items())
    return dataclasses.replace(replica, stages=tuple(stages), edges=edges)


def _edge(source: int, target: int, tensors: tuple[str, ...], graph: ModelGraph, num_rows: int) -> Edge:
    """An edge with the bytes of a micro-batch of so many rows."""
    payload = Line.sum(spec_line(spec, graph.num_rows) for name in tensors for spec in graph.by_name[name].outputs)
    return Edge(source, target, tensors, round(payload.at(num_rows)))


def _with_rows_cut(carried: Replica, replica: Replica, graph: ModelGraph, axes: Axes) -> Replica:
    """Divides the rows of stages whose rows joined replicas divide."""
    cuts = [stage.row_shard if len(stage.shards) == 1 else None for stage in replica.stages]
    stages = tuple(
        dataclasses.replace(stage, shards=(Shard(BATCH, cut.sizes),)) if cut and stage.ops else stage
        for stage, cut in zip(carried.stages, cuts, strict=True)
    )
    return dataclasses.replace(carried, stages=cut_rows(stages, carried.edges, graph, axes))


def _task_graphs(plan: Plan, graph: ModelGraph, assignment: Assignment) -> tuple[TaskGraph, ...]:
    """The TaskGraphs with the other graph's ops: those of a stage go to its first TaskGraph."""
    first = [stage.task_graphs[0] for stage in plan.replicas[0].stages]
    members: dict[str, list[str]] = {task_graph.name: [] for task_graph in plan.task_graphs}
    for op in graph.ops:
        if op.kind == "call":
            members[first[assignment.stage_of.get(op.name, 0)]].append(op.name)
    return tuple(dataclasses.replace(task_graph, ops=tuple(members[task_graph.name])) for task_graph in plan.task_graphs)


def carry_plan(plan: Plan, graph: ModelGraph, other: ModelGraph, *, same_loss: bool = False) -> Plan:
    """A training plan for another training capture of the same model: of other sizes, plain values or constants of the batch.

    It may train other parameters: those that it does not reach get no gradient.

    Where both captures run the same ops and can be cut equally, everything stays: cuts, shards, recomputation. Else ops go
    where their parameters are, as in evaluation.

    Args:
        plan: made for `graph`.
        graph: captured for training.
        other: the other capture.
        same_loss: whether all ranks must sum the same terms of the loss in both.

    Raises:
        PlanError: the loss has other terms, or the model cannot be divided as the plan says.
    """
    if same_loss and _loss_of(graph) != _loss_of(other):
        raise PlanError(
            "the loss has other terms in this capture than in the first, and ranks that the plan leaves idle have no batch to tell them so",
            where=other.loss[0].where if other.loss else None,
            hint="start as many ranks as the plan uses, or give step() global batches",
        )
    recomputes = any(segment.recompute for replica in plan.replicas for stage in replica.stages for segment in stage.program)
    if _ops_of(graph) == _ops_of(other):
        try:
            return _as_it_is(plan, graph, other)
        except PlanError:
            if recomputes:
                raise
    carried = retarget_plan(plan, graph, other)
    return _with_recomputation(carried, plan, graph, other) if recomputes else carried


def _with_recomputation(carried: Plan, plan: Plan, graph: ModelGraph, other: ModelGraph) -> Plan:
    """Recomputes the runs of ops of the plan that are there in the other capture, with what lies between them now.

    Ops are the same if they have the same module and operator, and the same number among such.
    """
    own, theirs = _numbered(graph), {number: name for name, number in _numbered(other).items()}
    replicas = []
    for before, replica in zip(plan.replicas, carried.replicas, strict=True):
        stages = []
        for then, stage in zip(before.stages, replica.stages, strict=True):
            position, ground = {name: index for index, name in enumerate(stage.ops)}, find_ground(other, stage.ops)
            runs, start = list[tuple[str, str]](), 0
            for run in then.recomputed:
                places = [position[name] for each in run if (name := theirs.get(own[each], "")) in position]
                first, last = max(start, min(places, default=start)), max(places, default=-1)
                if first <= last and ground.obstacle(first, last + 1) is None:
                    runs.append((stage.ops[first], stage.ops[last]))
                    start = last + 1
            stages.append(replace(stage, program=program_of(stage.ops, runs, offload=stage.offloads)))
        replicas.append(replace(replica, stages=tuple(stages)))
    return replace(carried, replicas=tuple(replicas))


def _numbered(graph: ModelGraph) -> dict[str, tuple[str, str, int]]:
    """Per op its module, its operator, and its number among the ops with both."""
    counts = Counter[tuple[str, str]]()
    found = {}
    for op in graph.ops:
        found[op.name] = (op.module, op.target, counts[op.module, op.target])
        counts[op.module, op.target] += 1
    return found


def _as_it_is(plan: Plan, graph: ModelGraph, other: ModelGraph) -> Plan:
    axes = discover(other) if plan.is_sharded else None
    ours = discover(graph) if axes else None
    names = same_axes(ours, axes) if ours and axes else {}
    divided = zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True)
    replicas = tuple(_resize_replica(replica, stop - start, other, ours, axes, names) for replica, ((start, stop), *_) in divided)
    batch_axes = find_batch_axes(other, replicas)
    carried = dataclasses.replace(plan, model=other.fingerprint, replicas=replicas, batch_axes=batch_axes, choices=())
    if axes is not None:
        raise_faults(list(shard_faults(carried, other, axes)))
    return carried


def _ops_of(graph: ModelGraph) -> list[tuple[str, str, str]]:
    return [(op.name, op.kind, op.target) for op in graph.ops]


def _loss_of(graph: ModelGraph) -> list[tuple[bool, bool, bool]]:
    """Per term, whether it has a weight, whether the batch alone decides it, and whether it is a number of rows."""
    weights = [term.weight for term in graph.loss]
    counted = [weight is not None and not graph.by_name[weight].outputs for weight in weights]
    return [(term.weight is None, term.weight_from_inputs, count) for term, count in zip(graph.loss, counted, strict=True)]


def _resize_replica(
    replica: Replica, num_rows: int, graph: ModelGraph, ours: Axes | None, axes: Axes | None, names: Mapping[str, str]
) -> Replica:
    edges = tuple(_edge(edge.source, edge.target, edge.tensors, graph, num_rows) for edge in replica.edges)
    stages = replica.stages
    if ours and axes:
        stages = tuple(_carry_stage(stage, ours, axes, names) for stage in stages)
    return dataclasses.replace(replica, stages=stages, edges=edges)


def _carry_stage(stage: Stage, ours: Axes, axes: Axes, names: Mapping[str, str]) -> Stage:
    shards = carried(stage.shards, names, axes)
    if len(shards) < len(stage.shards):
        lost = ", ".join(shard.axis for shard in stage.shards if not carried([shard], names, axes))
        raise PlanError(f"axis {lost or 'of two names'} is cut, but does not exist at this size of the batch, or is too short")
    return dataclasses.replace(stage, shards=as_held(stage, ours, shards, axes))


def same_axes(ours: Axes, theirs: Axes) -> dict[str, str]:
    """Per axis of one capture its name in the other: by the parameters that have it, else by name and size."""
    names: dict[str, str] = {}
    for parameter, dimensions in ours.parameters.items():
        for own, other in zip(dimensions, theirs.parameters.get(parameter, ()), strict=False):
            for axis, name in _pairs(own, other):
                names.setdefault(axis, name)
    for known in ours.axes:
        like = theirs.by_name.get(known.name)
        if like is not None and like.size == known.size:
            names.setdefault(known.name, known.name)
    return names


def _pairs(own: Dimension, other: Dimension) -> Iterator[tuple[str, str]]:
    if len(own) != len(other):
        return
    for a, b in zip(own, other, strict=True):
        if isinstance(a, str) and isinstance(b, str):
            yield a, b
        elif isinstance(a, Concatenation) and isinstance(b, Concatenation) and len(a.pieces) == len(b.pieces):
            for piece, partner in zip(a.pieces, b.pieces, strict=True):
                yield from _pairs(piece, partner)


def retarget_shards(
    stage: Stage, ours: Axes, names: Mapping[str, str], graph: ModelGraph, axes: Axes, ops: Sequence[str], lent: Sequence[str] = ()
) -> tuple[Shard, ...]:
    """Cuts for the ops of another capture: known axes are cut, parameters stay as they are, ops are labelled anew.

    Args:
        stage: in the first capture.
        ours: its axes.
        names: per axis there, its name here.
        graph: the other capture.
        axes: its axes.
        ops: of the stage, in graph order.
        lent: parameters that its ops read and it does not hold; they are gathered whole.
    """
    cuts = carried((shard for shard in stage.shards if shard.axis != BATCH), names, axes)  # rows arrive whole there
    shards = as_held(stage, ours, tuple(Shard(cut.axis, cut.sizes) for cut in cuts), axes, lent)
    return with_work(shards, OpCuts(work=_Labelling(graph, axes, ops, shards).work()), axes, ops)


def as_held(stage: Stage, ours: Axes, shards: tuple[Shard, ...], axes: Axes, lent: Sequence[str] = ()) -> tuple[Shard, ...]:
    """Cuts along which only those parameters lie in parts that the stage holds in exactly these parts; its program gathers the others.

    What devices hold and sum is fixed by training: a parameter held in other parts, or along an axis that does not exist here,
    is gathered; of one held whole each device uses its part. `lent` parameters are whole.
    """
    held, known = (ParameterShardings((), each, ()) for each in (ours, axes))
    own = Pattern(stage.parameters, stage.split, stage.shards)

    def lies_so(name: str, shard: Shard) -> bool:
        parts = known.parts(Pattern((name,), stage.split, (replace(shard, whole_parameters=()),)), name)
        return name not in lent and parts is not None and parts == held.parts(own, name)

    names = (*stage.parameters, *lent)
    having = {shard.axis: [name for name in names if shard.axis in axes.in_parameters.get(name, ())] for shard in shards}
    return tuple(
        replace(shard, whole_parameters=tuple(name for name in having[shard.axis] if not lies_so(name, shard))) for shard in shards
    )


class _Labelling:
    """Labels ops in order: each works along the axis of its parameter's parts, else of its first operand's."""

    def __init__(self, graph: ModelGraph, axes: Axes, ops: Sequence[str], shards: tuple[Shard, ...]) -> None:
        self._graph, self._axes, self._ops = graph, axes, ops
        self._sources = label(graph, axes, ops, shards)
        self._writes = MemoryWrites(graph, ops)
        self._cut = [shard.axis for shard in shards]
        self._anywhere = [axis for axis in self._cut if self._all_may(axis)]

    def work(self) -> dict[str, str]:
        """Per op that works on parts, the axis. Memory that is written in place and would lie in two ways stays whole."""
        whole: set[str] = set()
        while True:
            work, clash = self._go_through(whole)
            if clash is None:
                return work
            whole.add(clash)

    def _go_through(self, whole: Collection[str]) -> tuple[dict[str, str], str | None]:
        work: dict[str, str] = {}
        for name in self._ops:
            op = self._graph.by_name[name]
            axis = self._choose(op, work) if self._graph.storage[name] not in whole else None
            if axis is not None:
                work[name] = axis
            for operand in op.inputs:
                if op.target == "operator.getitem" or not self._writes.need_same(operand, name):
                    continue
                lies = self._held(operand, work)
                if lies != (axis if axis in self._sources.axes_in(operand) else None) and self._graph.storage[operand] not in whole:
                    return work, self._graph.storage[operand]
        return work, None

    def _choose(self, op: Op, work: Mapping[str, str]) -> str | None:
        if op.name not in self._axes.ops:
            return None
        roles = self._axes.ops[op.name].roles
        may = [axis for axis in self._cut if axis in roles and roles[axis].kind != "whole"]
        if op.target == "operator.getitem":
            return next((axis for axis in may if axis == work.get(op.inputs[0])), None)
        sources = sorted(op.inputs, key=lambda name: self._graph.by_name[name].kind == "call")
        lying = [self._held(name, work) for name in sources]
        return next((axis for axis in (*lying, *self._anywhere) if axis in may), None)

    def _held(self, name: str, work: Mapping[str, str]) -> str | None:
        """The axis along which a tensor lies in parts."""
        if self._graph.by_name[name].kind != "call":
            return self._sources.held(name)
        axis = work.get(name)
        return axis if axis in self._sources.axes_in(name) else None

    def _all_may(self, axis: str) -> bool:
        met = (self._axes.ops[name].roles.get(axis) for name in self._ops if name in self._axes.ops)
        return all(role is None or role.kind != "whole" for role in met)
