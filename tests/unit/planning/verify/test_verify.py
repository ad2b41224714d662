"""Broken plans are refused, with everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.errors import PlanError
from whale.estimate import Costs, estimate
from whale.ir.plan import BatchAxis, Edge, Form, Plan, VirtualDevice
from whale.planning import make_plan
from whale.planning.verify import verify
from whale.planning.verify.shards import state_faults

GRAPH, THERE = chain(4), cluster((1e9, 1e9))
PLAN = make_plan(GRAPH, THERE, Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}))


def with_stage(index: int, **fields: object) -> Plan:
    replica = PLAN.replicas[0]
    stages = tuple(replace(stage, **fields) if stage.index == index else stage for stage in replica.stages)  # type: ignore[arg-type]
    return replace(PLAN, replicas=(replace(replica, stages=stages),))


def with_pipeline(**fields: object) -> Plan:
    replica = PLAN.replicas[0]
    return replace(PLAN, replicas=(replace(replica, pipeline=replace(replica.pipeline, **fields)),))  # type: ignore[arg-type]


def with_state(**fields: object) -> Plan:
    return replace(PLAN, parameter_states=(replace(PLAN.parameter_states[0], **fields),))  # type: ignore[arg-type]


def with_edges(*edges: Edge) -> Plan:
    return replace(PLAN, replicas=(replace(PLAN.replicas[0], edges=edges),))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: replace(PLAN, model="other"), "a plan is for one model"),
        (lambda: replace(PLAN, devices=("h0/0", "nowhere")), "nowhere not in test"),
        (lambda: with_edges(), "layer2 lacks layer1"),
        (
            lambda: replace(PLAN, batch_axes=(("layer1", BatchAxis(1, 1, 1)),)),
            r"where the batch is in what travels \(layer1: BatchAxis\(dim=1",
        ),
        (lambda: replace(PLAN, batch_axes=(("layer9", BatchAxis(0, 1, 1)),)), r"names tensors of its model \(batch axes: layer9 is none\)"),
        (lambda: with_edges(Edge(1, 0, ("layer2",), 1), *PLAN.replicas[0].edges), "travel to later stages"),
        (lambda: with_edges(Edge(1, 2, ("layer2",), 1), *PLAN.replicas[0].edges), r"edge 1 -> 2, the last stage: 1"),
        (lambda: with_pipeline(stage_rank=(0,)), "every stage of its pipeline .replica 0: 2 of 1"),
        (lambda: with_pipeline(stage_rank=(0, 2)), "numbered from 0 .replica 0: 0 2"),
        (
            lambda: with_pipeline(stage_rank=(1, 0)),
            r"which virtual device runs which stage \(0 1 for 2, the pipeline: 1 0\) \(replica 0: 1f1b",
        ),
        (lambda: with_pipeline(schedule="1F1B"), "a schedule is one of .*replica 0: 1F1B, 2 micro-batch"),
        (lambda: with_pipeline(num_micro_batch=0), "has a micro-batch .replica 0: 0"),
        (lambda: with_pipeline(num_micro_batch=99), "micro-batches of all replicas: 99, rows: 4"),
        (lambda: with_edges(*PLAN.replicas[0].edges, *PLAN.replicas[0].edges), r"two stages have one edge .replica 0: 0 -> 1 2 times"),
        (
            lambda: with_edges(replace(PLAN.replicas[0].edges[0], tensors=PLAN.replicas[0].edges[0].tensors * 2)),
            "travels an edge once .replica 0, 0 -> 1: layer1 twice",
        ),
        (lambda: replace(PLAN, idle_devices=("h0/0",)), "idle devices are devices of the cluster that are not in use .h0/0"),
        (lambda: with_pipeline(group_size=2), "a group size is for interleaved"),
        (
            lambda: with_stage(0, ops=(*PLAN.replicas[0].stages[0].ops, "no_op")),
            r"names ops of its model \(replica 0, stage 0: no_op are none",
        ),
        (lambda: with_stage(1, parameters=("no_weight",)), r"names parameters and buffers of its model \(replica 0, stage 1: no_weight"),
        (lambda: with_edges(Edge(0, 1, ("no_value",), 1)), r"names tensors of its model \(replica 0, edge 0 -> 1: no_value"),
        (lambda: replace(PLAN, replicas=()), "a plan has a replica"),
        (lambda: with_state(gradient=Form("float32", home="host")), "gradients are made on the device .*home host"),
        (lambda: with_state(gradient=Form("int64")), r"type like the parameter's \(float64, float32, .*gradient: int64"),
        (lambda: with_state(optimizer=Form("float32", "nowhere")), "optimizer: float32, sharding nowhere"),  # type: ignore[arg-type]
        (lambda: with_state(gradient=Form("float32", "owners")), "gradients are shared out among owners with what the optimizer steps"),
        (lambda: with_state(compute=Form("bfloat16")), r"compute: bfloat16, .*the graph's: float32"),
        (lambda: with_state(compute=Form("float32", "owners")), "what ops read is shared out among owners with what the optimizer steps"),
        (lambda: with_state(compute=Form("float32", home="host")), r"lives on the host with what the optimizer steps.*kept: .*home device"),
        (lambda: with_state(compute=Form("float32", home="disk")), "from home device or host"),  # type: ignore[arg-type]
        (
            lambda: with_state(gradient=Form("float32", is_sparse=True)),
            r"gradient is sparse, and no other.*layer0.*, sparse, opt",
        ),
        (lambda: with_state(sum_dtype="int64"), r"summed in a type like the parameter's \(float64, float32, .*: int64"),
        (lambda: with_state(feeds_back=True), "fed back where there is such rounding"),
        (lambda: replace(PLAN, keeper_shares=(1, 0)), r"every rank has a weight .*2 ranks, weights: \[1, 0\]"),
        (lambda: with_state(gradient=None), r"what is trained has a gradient.*layer1.weight.*: compute, optimizer; 2 tensors"),
        (lambda: with_state(num_optimizer_tensors=-1), r"compute, gradient, optimizer; -1 tensors"),
        (lambda: with_state(parameters=()), r"one state for each parameter .*\(layer0.weight has 0, .* and 1 more\)"),
        (
            lambda: replace(PLAN, replicas=(replace(PLAN.replicas[0], index=1, share=0),)),
            "(?s)numbered in order .1.*has a share of the rows",
        ),
        (lambda: with_edges(Edge(0, 1, ("layer1", "layer3"), 1)), "carries what its source makes"),
        (lambda: with_stage(1, parameters=()), "holds the parameters it reads"),
        (lambda: with_stage(1, ops=("layer2", "layer3")), "computes every result"),
        (lambda: with_stage(0, shares=(0,)), "has a share"),
        (lambda: with_stage(1, virtual_device=VirtualDevice(("h0/0",))), "one virtual device of one replica"),
    ],
)
def test_faults(broken: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(broken(), GRAPH, THERE)


def test_error_feedback_needs_gradients_of_one_scale() -> None:
    graph = replace(GRAPH, loss=(replace(GRAPH.loss[0], weight="layer1", weight_from_inputs=False),))
    faults = [str(fault) for fault in state_faults(with_state(sum_dtype="bfloat16", feeds_back=True), graph)]
    assert len(faults) == 1 and "its weight depends on the parameters" in faults[0]


def test_all_faults_at_once() -> None:
    plan = with_stage(1, parameters=(), shares=(0,))
    with pytest.raises(PlanError, match=r"(?s)^\d faults.*has a share.*holds the parameters.*some stage holds every parameter"):
        verify(plan, GRAPH, THERE)


def test_no_plan_is_over_its_share_of_a_device() -> None:
    there = cluster((1e9, 1e9))
    plan = make_plan(
        chain(8),
        there,
        Config({"pipeline.schedule": "interleaved", "pipeline.num_stages": 2, "pipeline.num_chunks": 2, "pipeline.num_micro_batch": 2}),
    )
    need = round(max(each.peak.total for each in estimate(plan, chain(8), there).devices))
    verify(plan, chain(8), cluster((1e9, 1e9), memory=2 * need), costs=Costs(memory_fraction=0.5))
    with pytest.raises(PlanError, match="1 B short"):
        verify(plan, chain(8), cluster((1e9, 1e9), memory=2 * need - 2), costs=Costs(memory_fraction=0.5))


def test_a_plan_for_larger_memories_is_refused() -> None:
    small = cluster((1e9, 1e9), memory=1024)
    with pytest.raises(PlanError, match=r"(?s)out of memory on h0/0: the plan needs .*, 921 B usable: .* short \(.*optimizer"):
        verify(PLAN, GRAPH, small)
    verify(PLAN, GRAPH, small, costs=Costs(memory_fraction=100.0))
