"""The plan of a whole model on the only device, with nothing to decide: no pricing, no estimate."""

from __future__ import annotations

from whale.config import Config
from whale.hardware import half_types
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Pipeline, Plan, Replica, Stage, TaskGraph, VirtualDevice, program_of, states_of
from whale.planning.structure.stages import assign
from whale.planning.structure.structure import analyse

# prefixes of keys that require planning, or may be refused, where they are set
DECIDING = ("pipeline.", "replicas", "recompute.", "planning.", "memory.zero", "memory.offload", "gradient.dtype", "cluster.profile")

MEMORY_MARGIN = 10  # multiple of all weights and all results of ops that surely exceeds the memory of a step


def whole_plan(graph: ModelGraph, cluster: Cluster, config: Config) -> Plan | None:
    """The plan of `make_plan` without figures and reasons; None where something is to be decided."""
    if len(cluster.devices) != 1 or graph.mode != "train" or any(name.startswith(DECIDING) for name in config.explicit):
        return None
    if any(op.scope or op.region for op in graph.ops) or not _has_ample_memory(graph, cluster, config):
        return None
    (part,) = assign(graph, analyse(graph), {}, 1)[0].parts
    if not part.ops:
        return None
    device, pipeline = cluster.devices[0].name, Pipeline(config.pipeline.schedule, 1, (0,))
    stage = Stage(0, ("model",), part.ops, VirtualDevice((device,)), (graph.num_rows,), part.parameters, program=program_of(part.ops))
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.name,
        devices=(device,),
        idle_devices=(),
        task_graphs=(TaskGraph(0, "model", "replicate", tuple(op.name for op in graph.ops if op.kind == "call")),),
        replicas=(Replica(0, graph.num_rows, pipeline, (stage,), ()),),
        batch_axes=(),
        planned_rows=graph.num_rows,
        parameter_states=states_of(graph.parameters, config.memory.optimizer_states),
        device_models=cluster.models_of((device,)),
        half_types=half_types(graph, cluster, (device,)),
    )


def _has_ample_memory(graph: ModelGraph, cluster: Cluster, config: Config) -> bool:
    weights = sum(parameter.spec.num_bytes for parameter in graph.parameters)
    results = sum(spec.num_bytes for op in graph.ops for spec in op.outputs)
    needed = weights * (MEMORY_MARGIN + config.memory.optimizer_states) + results * MEMORY_MARGIN
    return needed <= cluster.devices[0].memory * config.memory.fraction
