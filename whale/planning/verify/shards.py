"""Checks the cuts of a plan against the axes of its model, and the states of its parameters.

Sizes add up, ops can work so, tensors lie in one way; each parameter has a state that the runtime supports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from whale.axes import Axes
from whale.axes.labels import label
from whale.errors import PlanError, first_few
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Form, ParameterState, Plan, Replica, Shard, Stage, devices_of
from whale.ir.writes import MemoryWrites


def shard_faults(plan: Plan, graph: ModelGraph, axes: Axes) -> Iterator[PlanError]:
    """Faults of the cuts of a plan."""
    if all(stage.split == 1 and not stage.shards for replica in plan.replicas for stage in replica.stages):
        return
    seen: dict[tuple[object, ...], None] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            key = stage.index, stage.split, stage.shards, stage.ops
            if key not in seen:  # equal stages of other replicas have equal faults
                seen[key] = None
                yield from _stage(stage, graph, axes, f"replica {replica.index}, stage {stage.index}")


def holding_faults(plan: Plan, axes: Axes) -> Iterator[PlanError]:
    """Parameters that devices would hold in two ways; a plan carried over to another capture may have them, for it decides no holdings."""
    for replica in plan.replicas:
        yield from _held_twice(replica, axes)


def uncut_faults(plan: Plan) -> Iterator[PlanError]:
    """Split stages that divide nothing; only a plan carried over to another capture, without these axes, may have them."""
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.split > 1 and not stage.shards:
                name = f"replica {replica.index}, stage {stage.index}"
                yield PlanError(f"{name} has groups of {stage.split} devices, but cuts no axis")


def _stage(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    shard = [shard.axis for shard in stage.shards]
    for axis in sorted({axis for axis in shard if shard.count(axis) > 1}):
        yield PlanError(f"{name} cuts {axis} {shard.count(axis)} times, not once")
    for each in stage.shards:
        yield from _sizes(each, stage, axes, name, training=graph.mode == "train")
    yield from _names(stage, graph, axes, name)
    yield from _ops(stage, graph, axes, name)


def _sizes(shard: Shard, stage: Stage, axes: Axes, name: str, *, training: bool) -> Iterator[PlanError]:
    axis = axes.by_name.get(shard.axis)
    if axis is None:
        yield PlanError(f"{name} cuts {shard.axis}, which is not an axis of the model", hint="whale doctor --axes lists them")
        return
    if shard.axis == BATCH and training and not (shard.arriving or shard.handed_on or axes.mixing):
        yield PlanError(f"{name} cuts the batch; rows are divided by shares")
    if len(shard.sizes) != stage.split:
        yield PlanError(f"{name} cuts {shard} for {stage.split} devices; each needs one size")
    if any(size < 1 for size in shard.sizes):
        yield PlanError(f"{name} cuts {shard}: a device has no part")
    if sum(shard.sizes) != axis.size and shard.axis != BATCH:
        yield PlanError(f"{name} cuts {shard}: the sizes add up to {sum(shard.sizes)}, not {axis.size}")


def _ops(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    """The labels of the ops, and whether memory that is written in place lies in one way."""
    labels = label(graph, axes, stage.ops, [shard for shard in stage.shards if shard.axis in axes.by_name])
    for fault in labels.faults():
        yield PlanError(f"{fault.message} ({name})", where=fault.where)
    writes = MemoryWrites(graph, stage.ops)
    for op in stage.ops:
        if graph.by_name[op].target == "operator.getitem":
            continue
        for operand in graph.by_name[op].inputs:
            lies, needed = labels.held(operand), labels.use(op, operand).axis
            if lies != needed and writes.need_same(operand, op):
                yield PlanError(
                    f"{name} writes memory in place in two layouts (%{operand} {_along(lies)}, for %{op} {_along(needed)})",
                    where=graph.by_name[op].where,
                )


def _names(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    """The ops and parameters that cuts name, and how parameters are held."""
    ops, parameters = set(stage.ops), set(graph.parameter_by_name)
    read = {source for op in stage.ops for source in graph.by_name[op].inputs} - ops
    for shard in stage.shards:
        for field, listed, known in (
            ("whole_in", shard.whole_in, ops),
            ("whole_parameters", shard.whole_parameters, parameters),
            ("scattered", shard.scattered, ops),
            ("arriving", shard.arriving, read),
            ("handed_on", shard.handed_on, ops),
        ):
            unknown = sorted(set(listed) - known)
            if unknown:
                yield PlanError(f"{name} does not have what its cut of {shard.axis} names ({field}: {', '.join(unknown)})")
    for parameter, shards in _held(stage, axes).items():
        if len(shards) > 1:
            along = " and ".join(shard.axis for shard in shards)
            yield PlanError(f"{name} holds {parameter} in parts along several axes ({along})")


def _held(stage: Stage, axes: Axes) -> dict[str, tuple[Shard, ...]]:
    """Per parameter that is held in parts, its cuts."""
    held: dict[str, tuple[Shard, ...]] = {}
    own = set(stage.parameters)
    for shard in stage.shards:
        for holder in dict.fromkeys(holder.rpartition(":")[0] for holder in axes.held_by.get(shard.axis, ())):
            if holder in own and holder not in shard.whole_parameters:
                held[holder] = (*held.get(holder, ()), shard)
    return held


def _along(axis: str | None) -> str:
    return f"cut along {axis}" if axis else "whole"


def _held_twice(replica: Replica, axes: Axes) -> Iterator[PlanError]:
    """Two stages on one virtual device must hold a parameter in the same way."""
    if len(set(replica.pipeline.stage_rank)) == replica.pipeline.num_stages:
        return  # every stage has devices of its own
    first: dict[tuple[int, str], tuple[int, Sequence[Shard]]] = {}
    for stage in replica.stages[: replica.pipeline.num_stages]:
        held = _held(stage, axes)
        for parameter in stage.parameters:
            own = held.get(parameter, ())
            other, shards = first.setdefault((replica.pipeline.stage_rank[stage.index], parameter), (stage.index, own))
            if _ways(shards) != _ways(own):
                yield PlanError(
                    f"replica {replica.index} holds {parameter} in two ways on one device (stage {other}: {_show(shards)}, stage "
                    f"{stage.index}: {_show(own)})"
                )


def _ways(shards: Sequence[Shard]) -> list[tuple[str, tuple[int, ...]]]:
    return [(shard.axis, shard.sizes) for shard in shards]


def _show(shards: Sequence[Shard]) -> str:
    return "cut along " + ", ".join(map(str, shards)) if shards else "whole"


_KINDS = (("float64", "float32", "bfloat16", "float16"), ("complex128", "complex64"))  # dtypes that may replace one another


def state_faults(plan: Plan, graph: ModelGraph) -> Iterator[PlanError]:
    """Faults of the parameter states of a plan."""
    counts = Counter(name for state in plan.parameter_states for name in state.parameters)
    odd = [f"{own.name} has {counts[own.name]}" for own in graph.parameters if counts[own.name] != 1]
    odd += [f"{name} is none" for name in counts if name not in graph.parameter_by_name]
    if odd:
        yield PlanError(f"parameters and buffers without exactly one state in the plan: {first_few(odd)}")
        return
    if plan.keeper_shares and (len(plan.keeper_shares) != len(plan.devices) or min(plan.keeper_shares) < 1):
        yield PlanError(
            f"state is shared out by weights {list(plan.keeper_shares)} over {len(plan.devices)} ranks; each needs a weight of at least 1"
        )
    yield from _group_faults(plan)
    yield from _sync_faults(plan)
    corrected = [term for term in graph.loss if term.weight is not None and not term.weight_from_inputs and not term.metric]
    if corrected and any(state.feeds_back for state in plan.parameter_states):
        yield PlanError(
            "gradient.error_feedback does not work with this loss: its weight depends on the parameters, so gradients of two steps have "
            "different scales until they are summed",
            where=corrected[0].where,
            hint="leave out gradient.error_feedback, or take a weight that is computed from the batch",
        )
    for state in plan.parameter_states:
        named = graph.parameter_by_name
        trained = [name for name in state.parameters if named[name].kind == "parameter" and named[name].trainable]
        fixed = [name for name in state.parameters if name not in set(trained)]
        yield from _trained_faults(state, trained) if trained else ()
        yield from _fixed_faults(state, fixed) if fixed else ()
        yield from _buffer_faults(state, [name for name in state.parameters if named[name].kind != "parameter"])
        yield from _sparse_faults(state, [name for name in trained if named[name].num_lookups], len(trained))
        yield from _form_faults(state, {named[name].read_as or named[name].spec.dtype for name in state.parameters})


def _sync_faults(plan: Plan) -> Iterator[PlanError]:
    """Faults of groups that step on their own: each has whole replicas, and keeps its own copy of what is sharded."""
    if plan.rounds is None:
        return
    groups = plan.rounds.groups
    if not (plan.rounds.rate > 0 and 0 <= plan.rounds.momentum < 1):
        yield PlanError(f"{plan.rounds}: the rate is above 0, and the momentum at least 0 and below 1")
    if plan.rounds.num_steps < 1 or len(groups) != len(plan.devices):
        yield PlanError(
            f"{plan.rounds}, by groups that are given for {len(groups)} ranks ({list(groups)}) of {len(plan.devices)}",
            hint="give each rank a group, and a round one step or more; or leave rounds out",
        )
        return
    if len(set(groups)) == 1:
        yield PlanError(f"all {len(groups)} ranks are in one sync group, so there is nothing to average", hint="leave rounds out")
    for replica in plan.replicas:
        own = {device: groups[plan.rank_of[device]] for device in devices_of([replica])}
        if len(set(own.values())) > 1:
            yield PlanError(
                f"replica {replica.index} lies in several groups that step on their own ({own}): each needs whole replicas",
                hint="give the devices of a replica one number",
            )
            return
    shared = [name for state in plan.parameter_states if state.kept.sharding == "owners" for name in state.parameters]
    together: dict[int, set[int]] = {}
    for group, keeper in zip(groups, plan.keeper_groups or (0,) * len(groups), strict=False):
        together.setdefault(keeper, set()).add(group)
    if shared and any(len(members) > 1 for members in together.values()):
        yield PlanError(
            f"groups that step on their own ({list(groups)}) keep state together ({first_few(shared)}; keeper_groups: "
            f"{list(plan.keeper_groups) or 'one of all ranks'}): their weights differ within a round",
            hint="give each rank a keeper group inside its sync group",
        )


def _group_faults(plan: Plan) -> Iterator[PlanError]:
    groups = plan.keeper_groups
    if groups and len(groups) != len(plan.devices):
        yield PlanError(
            f"groups that keep copies of sharded state are given for {len(groups)} ranks ({list(groups)}) of {len(plan.devices)}"
        )
        return
    for stage in (stage for replica in plan.replicas for stage in replica.stages) if groups else ():
        for devices in stage.groups:
            own = {device: groups[plan.rank_of[device]] for device in devices}
            if len(set(own.values())) > 1:
                yield PlanError(
                    f"a split group lies in several groups that keep copies of sharded state ({own}): each group must hold all of a "
                    "parameter that it holds",
                    hint="give the devices of a split group one number, or leave keeper_groups empty",
                )
                return


def _trained_faults(state: ParameterState, trained: list[str]) -> Iterator[PlanError]:
    forms = dict(state.forms)
    if "gradient" not in forms or "optimizer" not in forms or state.num_optimizer_tensors < 0:
        yield PlanError(
            f"trained parameters lack a gradient or an optimizer form ({first_few(trained)}: {', '.join(forms)}; "
            f"{state.num_optimizer_tensors} tensors)"
        )


def _sparse_faults(state: ParameterState, sparse: list[str], num_trained: int) -> Iterator[PlanError]:
    """Sparse gradients are summed and stepped as values and indices, by all holders of the parameter."""
    gradient, own = state.gradient, Form(state.compute.dtype)
    is_whole = (state.compute, gradient, state.optimizer, state.sum_dtype) == (own, Form(own.dtype, is_sparse=True), own, None)
    if (sparse or (gradient is not None and gradient.is_sparse)) and not (is_whole and len(sparse) == num_trained):
        yield PlanError(
            f"the state of {first_few(list(state.parameters))} does not fit its gradient (gradient: {state.gradient}, optimizer: "
            f"{state.optimizer}): a sparse gradient, and no other, is kept as values and indices, in the parameter's type, whole on each "
            "device",
            hint="plan again; or sparse=False in its lookup",
        )


def _fixed_faults(state: ParameterState, fixed: list[str]) -> Iterator[PlanError]:
    if len(state.forms) > 1 or state.num_optimizer_tensors or state.sum_dtype:
        yield PlanError(f"{first_few(fixed)} is not trained, but has a gradient or optimizer state ({', '.join(dict(state.forms))})")


def _buffer_faults(state: ParameterState, buffers: list[str]) -> Iterator[PlanError]:
    if buffers and state.is_gathered:
        yield PlanError(
            f"buffers are shared out or on the host ({first_few(buffers)}, compute: {state.compute}); they must be on the devices of "
            "their stages"
        )


def _form_faults(state: ParameterState, dtypes: set[str]) -> Iterator[PlanError]:
    """Ops read the dtype that the graph says; gradients and optimizer state may have another."""
    named, own = first_few(list(state.parameters)), state.compute
    if dtypes != {own.dtype} or own.sharding not in ("stage", "owners") or own.home not in ("device", "host"):
        yield PlanError(
            f"the compute form of {named} is {own}; ops read it as {', '.join(sorted(dtypes))}, of sharding stage or owners, home device "
            "or host"
        )
    if own.sharding == "owners" and state.kept.sharding != "owners":
        yield PlanError(
            f"the compute form of {named} is shared out among owners, but the optimizer form is not (compute: {own}; optimizer: "
            f"{state.kept})"
        )
    if own.home == "host" and (state.kept.home, state.kept.sharding) != (own.home, own.sharding):
        yield PlanError(
            f"the compute form of {named} is on the host, but the optimizer form is elsewhere (compute: {own}; optimizer: {state.kept})"
        )
    types = next((kind for kind in _KINDS if own.dtype in kind), (own.dtype,))
    for name, form in state.forms[1:]:
        if form.dtype not in types or form.sharding not in ("stage", "owners") or form.home not in ("device", "host"):
            yield PlanError(
                f"the {name} form of {named} is {form}; it must be {' or '.join(types)}, of sharding stage or owners, home device or host"
            )
    if state.sum_dtype not in (None, *types):
        yield PlanError(f"gradients of {named} are summed in {state.sum_dtype}, not {' or '.join(types)}")
    if state.feeds_back and state.sum_dtype is None:
        yield PlanError(
            f"{named} has error feedback, but its gradients are summed in their own type, without rounding",
            hint="plan again with gradient.sum_dtype, or without gradient.error_feedback",
        )
    if state.gradient is not None and state.gradient.home == "host":
        yield PlanError(
            f"gradients of {named} are on the host ({state.gradient}); they must be on the device",
            hint="the optimizer form may live on the host",
        )
    if state.gradient is not None and state.gradient.sharding == "owners" and state.kept.sharding != "owners":
        yield PlanError(
            f"gradients of {named} are shared out among owners, but the optimizer form is not (gradient: {state.gradient}; optimizer: "
            f"{state.kept})"
        )
