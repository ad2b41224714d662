"""Checks a plan against its graph and cluster: everything is computed, held, handed on and fits; all faults at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from whale.axes import Axes, discover
from whale.axes.updates import Update, buffer_updates, num_parts
from whale.errors import ConfigError, OutOfMemory, PlanError, WhaleError, first_few, raise_faults
from whale.estimate import Costs, StepEstimate, estimate
from whale.estimate.step.step import DeviceEstimate
from whale.hardware import half_types
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica, Stage, devices_of
from whale.planning.pipeline.segments import find_ground
from whale.planning.pricing import host_faults
from whale.planning.shard.overlapping import overlap_faults
from whale.planning.structure.stages import batch_axis_faults, crossing_faults
from whale.planning.verify.shards import holding_faults, shard_faults, state_faults, uncut_faults
from whale.schedules import count_recomputed, edge_pairs, training_schedule
from whale.units import format_bytes


def name_faults(plan: Plan, graph: ModelGraph) -> list[PlanError]:
    """Names in a plan that the model lacks; of equal replicas the first is reported."""
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
        yield PlanError(f"{place} names {what} that the model does not have: {first_few(wrong)}")


def shape_faults(plan: Plan) -> list[WhaleError]:
    """Faults in the numbers of a plan's replicas, stages, edges and rows."""
    faults: list[WhaleError] = []
    if not plan.replicas:
        faults.append(PlanError("the plan has no replica"))
    if [replica.index for replica in plan.replicas] != list(range(len(plan.replicas))):
        faults.append(PlanError(f"replicas are not numbered in order: {', '.join(str(replica.index) for replica in plan.replicas)}"))
    scheduled: dict[tuple[object, ...], None] = {}
    for replica in plan.replicas:
        wrong = [*_stages(replica), *_edges(replica)]
        key = replica.pipeline, edge_pairs(replica)
        if not wrong and key not in scheduled:  # equal pipelines have equal schedules
            scheduled[key] = None
            wrong += _schedule(replica)
        faults += wrong
    needed = sum(pipeline.num_micro_batch for pipeline in plan.pipelines)
    if plan.planned_rows < needed:
        faults.append(PlanError(f"too few rows: {plan.planned_rows} for {needed} micro-batches of all replicas"))
    return faults


def _stages(replica: Replica) -> Iterator[PlanError]:
    pipeline, name = replica.pipeline, f"replica {replica.index}"
    if [stage.index for stage in replica.stages] != list(range(len(replica.stages))):
        yield PlanError(f"stages of {name} are not numbered in order: {', '.join(str(stage.index) for stage in replica.stages)}")
    if len(replica.stages) != pipeline.num_stages:
        yield PlanError(f"{name} has {len(replica.stages)} stages; its pipeline has {pipeline.num_stages}")
    if sorted(set(pipeline.stage_rank)) != list(range(len(set(pipeline.stage_rank)))) or not pipeline.stage_rank:
        yield PlanError(f"virtual devices of {name} are not numbered from 0: {' '.join(map(str, pipeline.stage_rank)) or 'none'}")
    if replica.share < 1:
        yield PlanError(f"{name} has a share of {replica.share} of the rows; it must be at least 1")
    if pipeline.num_micro_batch < 1:
        yield PlanError(f"{name} has {pipeline.num_micro_batch} micro-batches; it must have at least 1")


def _edges(replica: Replica) -> Iterator[PlanError]:
    last = len(replica.stages) - 1
    pairs = [(edge.source, edge.target) for edge in replica.edges]
    for pair in sorted({pair for pair in pairs if pairs.count(pair) > 1}):
        yield PlanError(f"edge {pair[0]} -> {pair[1]} of replica {replica.index} is listed {pairs.count(pair)} times")
    for edge in replica.edges:
        twice = sorted({name for name in edge.tensors if edge.tensors.count(name) > 1})
        if twice:
            yield PlanError(f"edge {edge.source} -> {edge.target} of replica {replica.index} lists tensors twice: {', '.join(twice)}")
        if not 0 <= edge.source < edge.target <= last:
            yield PlanError(
                f"edge {edge.source} -> {edge.target} of replica {replica.index} does not lead to a later stage (the last is {last})"
            )


def _schedule(replica: Replica) -> Iterator[PlanError]:
    try:
        training_schedule(replica.pipeline, edge_pairs(replica))
    except WhaleError as error:
        yield PlanError(f"{error.message} (replica {replica.index}: {replica.pipeline.order})", hint=error.hint)


def verify(
    plan: Plan,
    graph: ModelGraph,
    cluster: Cluster,
    axes: Axes | None = None,
    *,
    costs: Costs | None = None,
    step: StepEstimate | None = None,
) -> StepEstimate:
    """Checks a plan, memory last, and returns the estimate of its step.

    Args:
        plan: the plan.
        graph: the model that it is for.
        cluster: the devices that it names.
        axes: of the graph, where already known.
        costs: of estimates; None for the defaults.
        step: the estimate of its step, where already known.

    Raises:
        PlanError: all its faults.
    """
    axes = check(plan, graph, cluster, axes)
    found = estimate(plan, graph, cluster, costs, axes=axes) if step is None else step
    raise_faults([*_setting_faults(plan, costs), *memory_faults(found, cluster)])
    return found


def _setting_faults(plan: Plan, costs: Costs | None) -> Iterator[WhaleError]:
    """Where a plan computes another training than settings say."""
    if plan.rounds is None or costs is None:
        return
    if replace(plan.rounds, groups=()) != costs.rounds:
        said = "gradients are summed in each step" if costs.rounds is None else str(costs.rounds)
        yield PlanError(
            f"by the plan {plan.rounds}, by the settings {said}: these are other trainings",
            hint=f"set communication.sync_steps: {plan.rounds.num_steps}, outer_rate: {plan.rounds.rate:g} and outer_momentum: "
            f"{plan.rounds.momentum:g}, or plan anew",
        )
    if costs.copies_every:
        yield ConfigError(
            f"memory.redundancy does not work with communication.sync_steps: {plan.rounds.num_steps}: hosts have other weights within a "
            "round, so none has a copy of another's",
            hint="leave out one of them",
        )


def check(plan: Plan, graph: ModelGraph, cluster: Cluster, axes: Axes | None = None) -> Axes | None:
    """Checks all of a plan but its memory; returns the axes of the graph if they were needed. Arguments and errors as of `verify`."""
    faults: list[WhaleError] = []
    if plan.model != graph.fingerprint:
        faults.append(PlanError(f"the plan was made for another model (plan: {plan.model}, this model: {graph.fingerprint})"))
        raise_faults(faults)
    faults += shape_faults(plan)
    faults += name_faults(plan, graph)
    raise_faults(faults)  # the rest takes shape and names for granted
    faults += _devices(plan, graph, cluster)
    faults += state_faults(plan, graph)
    seen: dict[tuple[object, ...], None] = {}
    for replica in plan.replicas:
        faults += _shares(graph, replica)
        key = tuple((stage.ops, stage.parameters, stage.program) for stage in replica.stages), replica.edges, replica.pipeline
        if key not in seen:  # equal replicas have equal faults
            seen[key] = None
            faults += [fault for check in _CHECKS for fault in check(plan, graph, replica)]
    if axes is None and needs_axes(plan):
        axes = discover(graph)
    if axes is not None:
        faults += [*uncut_faults(plan), *shard_faults(plan, graph, axes), *holding_faults(plan, axes)]
        faults += batch_axis_faults(plan, graph, axes)
    faults += overlap_faults(plan, graph, axes)
    faults += update_faults(graph, plan.replicas)
    faults += crossing_faults(graph, plan.replicas, dict(plan.batch_axes))
    raise_faults(faults)
    return axes


def needs_axes(plan: Plan) -> bool:
    """Whether checking a plan needs the axes of its model: it cuts tensors, or names their batch axes."""
    is_split = any(stage.split > 1 for replica in plan.replicas for stage in replica.stages)
    return is_split or plan.is_sharded or bool(plan.batch_axes)


def _devices(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Iterator[WhaleError]:
    unknown = sorted({name for name in plan.devices if name not in cluster.by_name})
    if unknown:
        yield PlanError(
            f"the plan names devices that are not in cluster {cluster.name!r}: {', '.join(unknown)}",
            hint="pass the cluster that the plan was made for (--cluster, cluster=, or cluster: in the recipe), or plan again for this one",
        )
    else:  # a plan for another cluster has other idle devices too
        yield from _models(plan, cluster)
        yield from _half_types(plan, graph, cluster)
        idle = sorted(set(plan.idle_devices) & set(plan.devices) | (set(plan.idle_devices) - cluster.by_name.keys()))
        if idle:
            yield PlanError(f"idle devices of the plan are in use or not in cluster {cluster.name!r}: {', '.join(idle)}")
    used = devices_of(plan.replicas)
    twice = sorted({name for name in used if used.count(name) > 1}) if len(set(used)) < len(used) else []
    if twice:
        yield PlanError(f"devices in several virtual devices or replicas of the plan: {', '.join(twice)}")
    if set(used) != set(plan.devices) or len(set(plan.devices)) < len(plan.devices):
        yield PlanError(f"the plan lists {len(plan.devices)} devices, its replicas have {len(set(used))}")
    for replica in plan.replicas:
        firsts = replica.first_stages
        if any(
            stage.virtual_device != firsts[rank].virtual_device
            for stage, rank in zip(replica.stages, replica.pipeline.stage_rank, strict=True)
        ):
            yield PlanError(f"stages of one rank are on different virtual devices (replica {replica.index})")


def _models(plan: Plan, cluster: Cluster) -> Iterator[WhaleError]:
    """Devices of the same names but other types: rows, cuts and recomputation were chosen for those of the plan."""
    there = zip(plan.devices, plan.device_models, cluster.models_of(plan.devices), strict=False)
    others = Counter((planned, own) for _, planned, own in there if planned != own)
    if others:
        others_text = ", ".join(f"{count} x {planned} in the plan, {own} in {cluster.name}" for (planned, own), count in others.items())
        yield PlanError(
            f"the plan was made for other device types ({others_text})",
            hint="plan again for this cluster; a plan in YAML (whale plan --output FILE.yaml) works for any device types",
        )


def _half_types(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Iterator[WhaleError]:
    """Devices that compute in another half-precision type than the plan says."""
    try:
        known = half_types(graph, cluster, plan.devices)
    except ConfigError as error:
        yield error
        return
    if plan.half_types != known:
        pairs = zip_longest(plan.devices, plan.half_types, known, fillvalue="no type")
        odd = [f"{device}: {planned} in the plan, {own} in {cluster.name}" for device, planned, own in pairs if planned != own]
        yield PlanError(
            f"the plan has other half-precision types than the devices ({first_few(odd)})",
            hint="plan again for this cluster; half-precision types follow from the devices' speeds (flops in the cluster file)",
        )


def _shares(graph: ModelGraph, replica: Replica) -> Iterator[WhaleError]:
    for stage in replica.stages:
        groups = "device" if stage.split == 1 else f"group of {stage.split} devices"
        if len(stage.shares) * stage.split != len(stage.virtual_device.devices) or any(share < 1 for share in stage.shares):
            yield PlanError(f"{_name(replica, stage)} has shares {stage.shares} for {stage.virtual_device}; every {groups} needs one")
        if not stage.ops and graph.mode == "train":
            yield PlanError(f"{_name(replica, stage)} has no op", hint="fewer stages (pipeline.num_stages)")


def _values(plan: Plan, graph: ModelGraph, replica: Replica) -> Iterator[WhaleError]:
    """Every stage has the values that its ops read."""
    made = [set(stage.ops) for stage in replica.stages]
    arriving: list[set[str]] = [set() for _ in replica.stages]
    for edge in replica.edges:
        absent = [name for name in edge.tensors if name not in made[edge.source]]
        if absent:
            yield PlanError(f"stage {edge.source} of replica {replica.index} sends what it does not have: {', '.join(absent)}")
        arriving[edge.target].update(edge.tensors)
    for stage in replica.stages:
        at_hand = made[stage.index] | arriving[stage.index]
        for name in stage.ops:
            op = graph.by_name[name]
            missing = [source for source in op.inputs if graph.by_name[source].kind == "call" and source not in at_hand]
            if missing:
                yield PlanError(
                    f"{name} in {_name(replica, stage)} reads what the stage does not have: {', '.join(missing)}", where=op.where
                )


def _computed(plan: Plan, graph: ModelGraph, replica: Replica) -> Iterator[WhaleError]:
    """What the loss and the outputs need is computed; a term of the loss exactly once."""
    made = [set(stage.ops) for stage in replica.stages]
    everything = set().union(*made)
    for name in dict.fromkeys((*(term.sum for term in graph.loss), *graph.outputs)):
        if name not in everything and graph.by_name[name].kind == "call":
            yield PlanError(f"no stage of replica {replica.index} computes {name}", where=graph.by_name[name].where)
    for term in graph.loss:
        places = [index for index, ops in enumerate(made) if term.sum in ops]
        if len(places) > 1:
            yield PlanError(f"loss term {term.sum} of replica {replica.index} is computed in stages {places}, not in one", where=term.where)
        if places and term.weight is not None and graph.by_name[term.weight].kind == "call" and term.weight not in made[places[0]]:
            yield PlanError(
                f"weight {term.weight} of a loss term is computed in another stage than the term (replica {replica.index})",
                where=term.where,
            )


def _held(plan: Plan, graph: ModelGraph, replica: Replica) -> Iterator[WhaleError]:
    """Every parameter is held where it is read, and somewhere."""
    for stage in replica.stages:
        missing = sorted(graph.parameters_read(stage.ops).difference(stage.parameters))
        if missing:
            yield PlanError(f"{_name(replica, stage)} reads parameters that it does not hold: {', '.join(missing)}")
    held = {name for stage in replica.stages for name in stage.parameters}
    nowhere = sorted({parameter.name for parameter in graph.parameters} - held)
    if nowhere:
        yield PlanError(f"no stage of replica {replica.index} holds {', '.join(nowhere)}")


def _program(plan: Plan, graph: ModelGraph, replica: Replica) -> Iterator[WhaleError]:
    """Segments cover the ops of a stage; none recomputes where the whole stage does, nor what must not be computed twice."""
    in_parts = any(own.recompute for stage in replica.stages for own in stage.program)
    as_a_whole = count_recomputed(training_schedule(replica.pipeline, edge_pairs(replica))) if in_parts else ()
    for stage in replica.stages:
        position = {name: index for index, name in enumerate(stage.ops)}
        ends = [(position.get(own.first, -1), position.get(own.last, -1)) for own in stage.program]
        starts = [0, *(last + 1 for _, last in ends)]
        if [first for first, _ in ends] != starts[:-1] or starts[-1] != len(stage.ops) or any(first > last for first, last in ends):
            yield PlanError(
                f"segments of {_name(replica, stage)} do not cover its {len(stage.ops)} ops in order, each once: "
                f"{', '.join(f'{own.first} .. {own.last}' for own in stage.program) or 'no segment'}"
            )
        elif len({own.offload for own in stage.program}) > 1:
            yield PlanError(f"some segments of {_name(replica, stage)} offload their activations and others do not")
        elif stage.recomputed and as_a_whole[stage.index]:
            yield PlanError(
                f"{_name(replica, stage)} is recomputed both as a whole (schedule {replica.pipeline.order}) and in parts",
                hint="use full for the stages that the schedule recomputes and parts for others; or a schedule without recomputation",
            )
        elif stage.recomputed:
            yield from _recomputed(graph, replica, stage)


def _recomputed(graph: ModelGraph, replica: Replica, stage: Stage) -> Iterator[WhaleError]:
    """What is recomputed writes no memory from elsewhere, and nothing else writes into its results."""
    ground, position = find_ground(graph, stage.ops), {name: index for index, name in enumerate(stage.ops)}
    for own in stage.program:
        found = ground.obstacle(position[own.first], position[own.last] + 1) if own.recompute else None
        if found is not None:
            yield PlanError(
                f"{own.first} .. {own.last} of {_name(replica, stage)} cannot be recomputed: {found} writes a buffer, or memory shared "
                "with ops outside",
                where=graph.by_name[found].where,
                hint="let the run begin or end elsewhere, or recompute the whole stage",
            )


def memory_faults(step: StepEstimate, cluster: Cluster) -> Iterator[WhaleError]:
    """Devices and hosts on which a step does not fit in memory."""
    for each, short in overfull(step):
        yield memory_fault(each, short)
    yield from host_faults(step, cluster)


def memory_fault(each: DeviceEstimate, short: int) -> OutOfMemory:
    return OutOfMemory(
        f"out of memory on {each.name}: the plan needs {format_bytes(each.capacity + short)}, {format_bytes(each.capacity)} usable: "
        f"{format_bytes(short)} short ({each.peak})",
        hint="more micro-batches (pipeline.num_micro_batch), fewer rows, or other devices",
    )


def overfull(step: StepEstimate) -> Iterator[tuple[DeviceEstimate, int]]:
    """The devices on which a step does not fit in memory, and by how many bytes."""
    for each in step.devices:
        short = round(each.peak.total) - each.capacity
        if short > 0:
            yield each, short


def _name(replica: Replica, stage: Stage) -> str:
    return f"replica {replica.index}, stage {stage.index}"


_CHECKS: tuple[Callable[[Plan, ModelGraph, Replica], Iterator[WhaleError]], ...] = (_values, _computed, _held, _program)


def update_faults(graph: ModelGraph, replicas: Sequence[Replica]) -> list[WhaleError]:
    """The buffers that cannot be updated from parts of the batch, with their lines."""
    faults: list[WhaleError] = []
    for name, update in buffer_updates(graph).items():
        count = num_parts(name, replicas)
        reason = _why_apart(name, update, replicas) if update.derivation is not None else update.reason
        if reason and count > 1:
            text = f"buffer {name} cannot be written from a batch in {count} parts: it must hold sums or means over rows"
            faults.append(
                PlanError(
                    f"{text} ({reason})",
                    where=update.where,
                    hint="write buffer += x.sum(0) or buffer.lerp_(x.mean(0), 0.1), or run one replica with one micro-batch",
                )
            )
    return faults


def _why_apart(name: str, update: Update, replicas: Sequence[Replica]) -> str:
    """Why a device cannot compute a buffer from others; "" if it has all of them."""
    assert update.derivation is not None
    others = sorted(set(update.derivation.given.values()))
    for stage in (stage for replica in replicas for stage in replica.stages if name in stage.parameters):
        if stage.split > 1:
            return f"it is computed from {first_few(others)}, in a split"
        if missing := [other for other in others if other not in stage.parameters]:
            return f"it is computed from {first_few(missing)}, which another stage writes"
    return ""
