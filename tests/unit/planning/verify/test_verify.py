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
    stages = tuple(replace(stage, **fields) if stage.index == index else stage for stage in replica.stages)
    return replace(PLAN, replicas=(replace(replica, stages=stages),))


def with_pipeline(**fields: object) -> Plan:
    replica = PLAN.replicas[0]
    return replace(PLAN, replicas=(replace(replica, pipeline=replace(replica.pipeline, **fields)),))


def with_state(**fields: object) -> Plan:
    return replace(PLAN, parameter_states=(replace(PLAN.parameter_states[0], **fields),))


def with_edges(*edges: Edge) -> Plan:
    return replace(PLAN, replicas=(replace(PLAN.replicas[0], edges=edges),))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: replace(PLAN, model="other"), "made for another model"),
        (lambda: replace(PLAN, devices=("h0/0", "nowhere")), "not in cluster 'test': nowhere"),
        (lambda: with_edges(), "layer2 in .* reads what the stage does not have: layer1"),
        (
            lambda: replace(PLAN, batch_axes=(("layer1", BatchAxis(1, 1, 1)),)),
            r"the batch axis of layer1 is BatchAxis\(dim=1",
        ),
        (lambda: replace(PLAN, batch_axes=(("layer9", BatchAxis(0, 1, 1)),)), "name layer9, which is not a tensor of the model"),
        (lambda: with_edges(Edge(1, 0, ("layer2",), 1), *PLAN.replicas[0].edges), "does not lead to a later stage"),
        (
            lambda: with_edges(Edge(1, 2, ("layer2",), 1), *PLAN.replicas[0].edges),
            r"edge 1 -> 2 .* does not lead to a later stage .the last is 1",
        ),
        (lambda: with_pipeline(stage_rank=(0,)), "replica 0 has 2 stages; its pipeline has 1"),
        (lambda: with_pipeline(stage_rank=(0, 2)), "of replica 0 are not numbered from 0: 0 2"),
        (
            lambda: with_pipeline(stage_rank=(1, 0)),
            r"virtual devices 1 0; schedule 1f1b needs 0 1 for 2 \(replica 0: 1f1b",
        ),
        (lambda: with_pipeline(schedule="1F1B"), "schedule '1F1B' is not one of .*replica 0: 1F1B, 2 micro-batch"),
        (lambda: with_pipeline(num_micro_batch=0), "replica 0 has 0 micro-batches"),
        (lambda: with_pipeline(num_micro_batch=99), "4 for 99 micro-batches of all replicas"),
        (lambda: with_edges(*PLAN.replicas[0].edges, *PLAN.replicas[0].edges), "edge 0 -> 1 of replica 0 is listed 2 times"),
        (
            lambda: with_edges(replace(PLAN.replicas[0].edges[0], tensors=PLAN.replicas[0].edges[0].tensors * 2)),
            "edge 0 -> 1 of replica 0 lists tensors twice: layer1",
        ),
        (lambda: replace(PLAN, idle_devices=("h0/0",)), "idle devices of the plan are in use or not in cluster .*: h0/0"),
        (lambda: with_pipeline(group_size=2), "group size 2 cannot be used with schedule"),
        (
            lambda: with_stage(0, ops=(*PLAN.replicas[0].stages[0].ops, "no_op")),
            r"replica 0, stage 0 names ops that the model does not have: no_op",
        ),
        (
            lambda: with_stage(1, parameters=("no_weight",)),
            "replica 0, stage 1 names parameters and buffers that the model does not have: no_weight",
        ),
        (lambda: with_edges(Edge(0, 1, ("no_value",), 1)), "replica 0, edge 0 -> 1 names tensors that the model does not have: no_value"),
        (lambda: replace(PLAN, replicas=()), "has no replica"),
        (lambda: with_state(gradient=Form("float32", home="host")), "are on the host .*home host"),
        (lambda: with_state(gradient=Form("int64")), "the gradient form of .* is int64.*must be float64 or float32"),
        (lambda: with_state(optimizer=Form("float32", "nowhere")), "the optimizer form of .* is float32, sharding nowhere"),
        (
            lambda: with_state(gradient=Form("float32", "owners")),
            "gradients of .* are shared out among owners, but the optimizer form is not",
        ),
        (lambda: with_state(compute=Form("bfloat16")), r"the compute form of .* is bfloat16, .*; ops read it as float32"),
        (
            lambda: with_state(compute=Form("float32", "owners")),
            "the compute form of .* is shared out among owners, but the optimizer form is not",
        ),
        (lambda: with_state(compute=Form("float32", home="host")), "the compute form of .* is on the host, but .*optimizer: .*home device"),
        (lambda: with_state(compute=Form("float32", home="disk")), "home device or host"),
        (
            lambda: with_state(gradient=Form("float32", is_sparse=True)),
            r"the state of .*layer0.* does not fit its gradient .*, sparse, opt",
        ),
        (lambda: with_state(sum_dtype="int64"), "are summed in int64, not float64 or float32"),
        (lambda: with_state(feeds_back=True), "has error feedback, but its gradients are summed in their own type"),
        (lambda: replace(PLAN, keeper_shares=(1, 0)), r"by weights \[1, 0\] over 2 ranks"),
        (lambda: with_state(gradient=None), r"trained parameters lack a gradient.*layer1.weight.*: compute, optimizer; 2 tensors"),
        (lambda: with_state(num_optimizer_tensors=-1), r"compute, gradient, optimizer; -1 tensors"),
        (lambda: with_state(parameters=()), r"without exactly one state in the plan: layer0.weight has 0, .* and 1 more"),
        (
            lambda: replace(PLAN, replicas=(replace(PLAN.replicas[0], index=1, share=0),)),
            "(?s)not numbered in order: 1.*has a share of",
        ),
        (lambda: with_edges(Edge(0, 1, ("layer1", "layer3"), 1)), "sends what it does not have"),
        (lambda: with_stage(1, parameters=()), "reads parameters that it does not hold"),
        (lambda: with_stage(1, ops=("layer2", "layer3")), "no stage of replica 0 computes"),
        (lambda: with_stage(0, shares=(0,)), "has shares .*; every device needs one"),
        (lambda: with_stage(1, virtual_device=VirtualDevice(("h0/0",))), "in several virtual devices or replicas"),
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
    with pytest.raises(PlanError, match=r"(?s)^\d faults.*has shares.*reads parameters that it does not hold.*no stage of replica 0 holds"):
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
