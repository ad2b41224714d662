"""Plans written out in full: from a plan to its text, which reads back as the same plan. Nothing is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import yaml

from whale.config import Config, ReplicaBlock, StageBlock, did_you_mean
from whale.config.keys import Recomputation
from whale.config.replicas import MODEL, REPLICAS
from whale.config.stages import FULL, OpRange, show_range
from whale.errors import ConfigError, PlanError, WhaleError, raise_faults
from whale.estimate import Costs, StepEstimate
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Edge, Pipeline, Plan, Replica, Stage, VirtualDevice, devices_of, program_of
from whale.ir.profile import model_fingerprint
from whale.planning.annotations.taskgraphs import Annotations, read_scopes, task_graphs
from whale.planning.explain.choices import explain_step
from whale.planning.pipeline.scheduling import recomputed_stages, smallest_group
from whale.planning.pricing import bare_plan, with_estimate
from whale.planning.structure.stages import parts_of
from whale.planning.structure.structure import analyse
from whale.planning.verify.verify import check, memory_faults, needs_axes, shape_faults
from whale.schedules import placement

__all__ = ["state_plan", "write_plan"]


MAX_NAMES = 2000  # ops among which the nearest name is looked for


def state_plan(graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None = None) -> tuple[Plan, StepEstimate]:
    """The plan that the blocks of a configuration state in full, verified, and its estimate.

    Args:
        graph: the captured model.
        cluster: the devices that it names.
        config: whose ``replicas`` all have stages.
        rows: of the global batch; None for the sum of those of the replicas, else of the example.

    Raises:
        ConfigError: what is written contradicts itself, the model or the cluster; all at once.
        PlanError: the plan is invalid for another reason, or does not fit in memory.
    """
    found = _Written(graph, cluster, config)
    raise_faults(list(_other_models(graph, config)))
    faults: list[WhaleError] = []
    for block in config.replicas:
        with block.placed_here():
            faults += found.faults(block)
    raise_faults(faults)
    prices = Prices(graph, cluster, Costs.for_model(config, graph, cluster))
    replicas = tuple(found.replica(index, block) for index, block in enumerate(config.replicas))
    stated = sum(block.rows or 0 for block in config.replicas) or graph.num_rows
    first, used = config.replicas[0], set(devices_of(replicas))
    idle = tuple(device.name for device in cluster.devices if device.name not in used)
    graphs = task_graphs(graph, found.scopes(first), found.stage_of(first))
    bare = bare_plan(prices, replicas, graphs, stated if rows is None else rows, idle)
    plan = bare if shape_faults(bare) else _with_rows(bare, prices)
    try:
        check(plan, graph, cluster, prices.axes if needs_axes(plan) else None)
        plan, step = with_estimate(plan, prices)
        raise_faults(list(memory_faults(step, cluster)))
    except PlanError as fault:  # it may have a line of the model; where that plan is written comes behind it
        where = first.at() if fault.where is None else f"{fault.where}, in the plan at {first.at()}"
        raise type(fault)(fault.message, where=where, hint=fault.hint) from None
    written = Choice("plan", "everything", "as it is written", bound=f"the written plan at {first.at()}")
    return replace(plan, choices=(written, *plan.choices, *explain_step(step))), step


def _other_models(graph: ModelGraph, config: Config) -> Iterator[WhaleError]:
    """The other models that the plan was written for."""
    own = model_fingerprint(graph)
    for model, block in {block.model: block for block in reversed(config.replicas)}.items():
        if model not in (None, own):
            yield ConfigError(
                f"the plan was written for another model ({MODEL}: {model}, this model: {own})",
                where=block.at(MODEL),
                hint=f"write it again: whale plan ... --output FILE.yaml; without the line '{MODEL}' it works for any model with ops of "
                "these names",
            )


def _with_rows(plan: Plan, prices: Prices) -> Plan:
    """The plan with the rows of each replica, and the bytes on its edges."""
    replicas = []
    for replica, (start, stop) in zip(plan.replicas, plan.replica_rows(plan.planned_rows), strict=True):
        largest = -(-(stop - start) // replica.pipeline.num_micro_batch)
        edges = tuple(replace(edge, num_bytes=round(prices.payload(edge.tensors)[0].at(largest))) for edge in replica.edges)
        replicas.append(replace(replica, share=stop - start, edges=edges))
    return replace(plan, replicas=tuple(replicas))


class _Written:
    """What is written, checked against the model and the cluster."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, config: Config) -> None:
        self.graph, self.cluster, self.config = graph, cluster, config
        self._offloads = Costs.of(config).offloads_activations
        self._calls = tuple(op.name for op in graph.ops if op.kind == "call")
        self._position = {name: index for index, name in enumerate(self._calls)}
        self._repeatable = analyse(graph).repeatable
        self._parts: dict[tuple[tuple[OpRange, ...], ...], tuple[Part, ...]] = {}

    def faults(self, block: ReplicaBlock) -> Iterator[WhaleError]:
        """Faults of a block by itself, and against the model's scopes."""
        if not block.stages:
            yield ConfigError("this replica has no stages, and others have; give them for all or for none", where=block.at())
            return
        policy = block.recompute or "none"
        if policy not in ("none", "full"):
            yield ConfigError(
                f"recompute: {policy} cannot be given together with stages",
                where=block.at("recompute"),
                hint="use recompute: full, for whole stages by R actions; or recompute of each stage",
            )
        yield from self._settings_beside(block)
        for number, stage in enumerate(block.stages):
            yield from self._stage_faults(block, number, stage)
        scopes = self.scopes(block)
        if scopes is not None and scopes.num_stages != len(block.stages):
            yield ConfigError(
                f"the plan has {len(block.stages)} stages, the model's scopes make {scopes.num_stages}",
                where=block.at("stages"),
            )

    def _settings_beside(self, block: ReplicaBlock) -> Iterator[WhaleError]:
        """Settings of the pipeline that contradict what is written."""
        stated = {f"pipeline.{name}": value for name, value in block.pipeline}
        for name, value in self.config.explicit_items():
            if name in stated and value != stated[name]:
                yield ConfigError(
                    f"{name}: {value} contradicts the written plan ({stated[name]})",
                    where=block.at(name.partition(".")[2]),
                    hint="change it in the plan, or leave the setting out",
                )

    def _stage_faults(self, block: ReplicaBlock, number: int, stage: StageBlock) -> Iterator[WhaleError]:
        name = f"stage {number}"
        for device in stage.devices:
            if device not in self.cluster.by_name:
                yield ConfigError(
                    f"{name} runs on {device}, which is not in cluster {self.cluster.name!r}",
                    where=block.at("stages", number, "devices"),
                    hint=did_you_mean(device, self.cluster.by_name),
                )
        groups, rest = divmod(len(stage.devices), stage.split)
        if rest:
            yield ConfigError(
                f"split: {stage.split} of {name} does not divide its {len(stage.devices)} devices",
                where=block.at("stages", number, "split"),
            )
        elif stage.rows and len(stage.rows) != groups:
            yield ConfigError(
                f"rows of {name} has {len(stage.rows)} numbers for {groups} split groups",
                where=block.at("stages", number, "rows"),
            )
        for shard in stage.cut:
            if len(shard.sizes) != stage.split:
                yield ConfigError(
                    f"cut of {shard.axis} of {name} has {len(shard.sizes)} parts for split: {stage.split}",
                    where=block.at("stages", number, "cut", shard.axis),
                )
        runs_by_key = {"ops": stage.ops, "recompute": stage.recompute}
        faults = [
            fault
            for key, runs in runs_by_key.items()
            for run in runs
            for fault in self._run_faults(run, name, block.at("stages", number, key))
        ]
        yield from faults or self._recompute_faults(stage, name, block.at("stages", number, "recompute"))

    def _recompute_faults(self, stage: StageBlock, name: str, where: object) -> Iterator[WhaleError]:
        """Recomputed runs must be among the stage's ops, in order."""
        position = {op: index for index, op in enumerate(self._ops(stage.ops))}
        foreign = [op for op in dict.fromkeys(op for run in stage.recompute for op in run) if op not in position]
        for op in foreign:
            yield ConfigError(f"{name} recomputes {op}, which is not one of its ops", where=where)
        if foreign:
            return
        for before, run in pairwise(stage.recompute):
            if position[run[0]] <= position[before[1]]:
                yield ConfigError(
                    f"recomputed runs of {name} overlap or are out of order: {show_range(before)}, {show_range(run)}", where=where
                )

    def _run_faults(self, run: OpRange, name: str, where: object) -> Iterator[WhaleError]:
        unknown = [op for op in dict.fromkeys(run) if op not in self._position]
        for op in unknown:
            yield ConfigError(
                f"{name} names {op}, which is not an op of the model", where=where, hint=did_you_mean(op, self._calls[:MAX_NAMES])
            )
        if not unknown and self._position[run[0]] > self._position[run[1]]:
            yield ConfigError(f"{show_range(run)} of {name} ends before its start", where=where)

    def scopes(self, block: ReplicaBlock) -> Annotations | None:
        """The model's scopes on the devices of a block; None without."""
        return read_scopes(self.graph, self.config, len({name for stage in block.stages for name in stage.devices}))

    def _ops(self, runs: Sequence[OpRange]) -> tuple[str, ...]:
        found = {index for first, last in runs for index in range(self._position[first], self._position[last] + 1)}
        return tuple(self._calls[index] for index in sorted(found))

    def stage_of(self, block: ReplicaBlock) -> dict[str, int]:
        """The stage of every op that is not repeated."""
        found: dict[str, list[int]] = {}
        for number, stage in enumerate(block.stages):
            for name in self._ops(stage.ops):
                found.setdefault(name, []).append(number)
        return {name: stages[0] for name, stages in found.items() if len(stages) == 1 and name not in self._repeatable}

    def _parts_of(self, block: ReplicaBlock) -> tuple[Part, ...]:
        key = tuple(stage.ops for stage in block.stages)
        if key not in self._parts:
            self._parts[key] = parts_of(self.graph, self.stage_of(block), [self._ops(runs) for runs in key])
        return self._parts[key]

    def replica(self, index: int, block: ReplicaBlock) -> Replica:
        """A block as a replica of the plan, without what depends on its rows."""
        with block.placed_here():
            pipeline = self._pipeline(block)
        parts, scopes = self._parts_of(block), self.scopes(block)
        stages = []
        for number, (stage, part) in enumerate(zip(block.stages, parts, strict=True)):
            names = ("model",) if scopes is None else scopes.names_of(number)
            stages.append(
                Stage(
                    number,
                    names,
                    part.ops,
                    VirtualDevice(stage.devices),
                    stage.rows or (1,) * (len(stage.devices) // stage.split),
                    part.parameters,
                    split=stage.split,
                    shards=stage.cut,
                    program=program_of(part.ops, stage.recompute, in_halves=stage.halves, offload=self._offloads),
                )
            )
        edges = sorted(((source, target), tensors) for target, part in enumerate(parts) for source, tensors in part.received)
        return Replica(index, block.rows or 1, pipeline, tuple(stages), tuple(Edge(*ends, tensors, 0) for ends, tensors in edges))

    def _config(self, block: ReplicaBlock, policy: Recomputation) -> Config:
        return self.config.with_values({f"pipeline.{key}": value for key, value in block.pipeline} | {"recompute.policy": policy})

    def _pipeline(self, block: ReplicaBlock) -> Pipeline:
        full = tuple((number, FULL) for number, stage in enumerate(block.stages) if stage.recomputes_whole)
        own, stage_rank = self._config(block, FULL if block.recompute == FULL else full or "none"), _places(block)
        wanted = own.pipeline
        return Pipeline(
            wanted.schedule,
            wanted.num_micro_batch,
            stage_rank,
            len(placement(wanted.schedule, num_ranks=1, num_chunks=wanted.num_chunks)),
            smallest_group(own, max(stage_rank) + 1),
            recomputed_stages(own, stage_rank)[1],
            wanted.receive_early,
        )


def _places(block: ReplicaBlock) -> tuple[int, ...]:
    """Per stage, its position among the virtual devices."""
    places: dict[tuple[str, ...], int] = {}
    return tuple(places.setdefault(stage.devices, len(places)) for stage in block.stages)


WIDTH = 140


def write_plan(plan: Plan, graph: ModelGraph) -> str:
    """The plan as YAML, with the model's fingerprint; repeated parts appear once and are referred to.

    Raises:
        PlanError: state is sharded or offloaded, or hosts step on their own, which YAML cannot express.
    """
    if plan.rounds is not None:
        raise PlanError(
            f"{plan.rounds}, which YAML does not hold",
            hint="write it as JSON (--output FILE.json), or as YAML without communication.sync_steps and give that again",
        )
    stages = (stage for replica in plan.replicas for stage in replica.stages)
    if any(stage.offloads for stage in stages) or not all(form.is_plain for state in plan.parameter_states for _, form in state.forms):
        raise PlanError(
            "the plan shares out or offloads state, which YAML does not hold",
            hint="write it as JSON (--output FILE.json)",
        )
    replicas = [block.as_data() for block in written_replicas(plan, graph)]
    data = _shared({MODEL: model_fingerprint(graph), REPLICAS: replicas}, {})
    return str(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=WIDTH, allow_unicode=True)).rstrip()


def written_replicas(plan: Plan, graph: ModelGraph) -> tuple[ReplicaBlock, ...]:
    """What a written plan says of each replica: all that decides the step."""
    calls = [op.name for op in graph.ops if op.kind == "call"]
    position = {name: index for index, name in enumerate(calls)}
    return tuple(_block(replica, calls, position) for replica in plan.replicas)


def _block(replica: Replica, calls: Sequence[str], position: Mapping[str, int]) -> ReplicaBlock:
    pipeline = replica.pipeline
    return ReplicaBlock(
        rows=replica.share,
        pipeline=pipeline.settings,
        stages=tuple(_stage(stage, calls, position, stage.index in pipeline.recomputed_stages) for stage in replica.stages),
    )


def _stage(stage: Stage, calls: Sequence[str], position: Mapping[str, int], recomputes_whole: bool) -> StageBlock:
    return StageBlock(
        devices=stage.virtual_device.devices,
        ops=_runs(stage.ops, calls, position),
        split=stage.split,
        rows=stage.shares,
        cut=stage.shards,
        recompute=tuple((segment.first, segment.last) for segment in stage.program if segment.recompute),
        halves=stage.overlap,
        recomputes_whole=recomputes_whole,
    )


def _runs(ops: Sequence[str], calls: Sequence[str], position: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """The ops as runs of consecutive calls of the graph."""
    runs: list[list[int]] = []
    for index in (position[name] for name in ops):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return tuple((calls[first], calls[last]) for first, last in runs)


def _shared(value: Any, known: dict[str, Any]) -> Any:
    """The data with one object for all equal lists and mappings, which YAML then names and refers to."""
    if isinstance(value, dict):
        value = {name: _shared(each, known) for name, each in value.items()}
    elif isinstance(value, list):
        value = [_shared(each, known) for each in value]
    else:
        return value
    return known.setdefault(repr(value), value) if len(repr(value)) > WIDTH else value
