"""The same plan for another capture: ops follow the parameters that their stage holds."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import ROWS, Graph, chain, cluster, scope
from whale.config import Config
from whale.errors import PlanError
from whale.ir.graph import ModelGraph, TensorSpec
from whale.planning import make_plan, retarget_plan
from whale.planning.verify import verify

TWO = Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2})


def prediction(num_layers: int) -> ModelGraph:
    """The chain's output instead of its loss, with an op before and one after that no stage claims."""
    graph = Graph()
    value = graph.input("x")
    value = graph.call("before", "aten.sin.default", value)
    for index in range(num_layers):
        value = graph.linear(f"eval{index}", value, f"layer{index}.weight")
    graph.outputs = (graph.call("after", "aten.cos.default", value),)
    return graph.build(mode="predict")


def test_ops_go_where_their_parameters_are() -> None:
    train, other, there = chain(4), prediction(4), cluster((3e9, 1e9))
    plan = make_plan(train, there, TWO)
    carried = retarget_plan(plan, train, other)
    verify(carried, other, there)
    for mine, theirs in zip(plan.replicas[0].stages, carried.replicas[0].stages, strict=True):
        assert theirs.parameters == mine.parameters and theirs.shares == mine.shares
        assert {op.replace("eval", "layer") for op in theirs.ops if "eval" in op} == {op for op in mine.ops if "layer" in op}
    assert carried.replicas[0].stages[0].ops[0] == "before" and carried.replicas[0].stages[1].ops[-1] == "after"
    assert carried.model == other.fingerprint and carried.devices == plan.devices
    assert sorted(op for task_graph in carried.task_graphs for op in task_graph.ops) == sorted(
        op.name for op in other.ops if op.kind == "call"
    )


def test_a_shared_parameter_is_read_on_the_smallest_holder_that_can() -> None:
    def build(mode: str) -> ModelGraph:
        graph = Graph()
        value = graph.input("x")
        for index, name in enumerate(("shared", "middle", "shared")):
            graph.path = (scope(min(index, 1), 1),) if mode == "train" else ()
            value = graph.linear(f"layer{index}", value, name)
        graph.sum_loss(value)
        return graph.build(mode=mode)

    train, there = build("train"), cluster((1e9, 1e9))
    plan = make_plan(train, there, Config())
    carried = retarget_plan(plan, train, build("eval"))
    assert [stage.ops for stage in carried.replicas[0].stages] == [("layer0",), ("layer1", "layer2", "loss")]


def test_cheap_ops_on_a_buffer_that_one_stage_holds_are_sent() -> None:
    def build(mode: str, readers: tuple[int, ...]) -> ModelGraph:
        graph = Graph()
        value = graph.input("x")
        buffer = graph.parameter("table", 8, trainable=False, kind="buffer")
        graph.path = (scope(0, 1),) if mode == "train" else ()
        graph.call("read", "aten.mul.Tensor", "x", buffer, grad=False)
        for index in range(2):
            graph.path = (scope(index, 1),) if mode == "train" else ()
            value = graph.linear(f"layer{index}", value)
            if index in readers:
                value = graph.call(f"sum{index}", "aten.mul.Tensor", value, "read")
        graph.sum_loss(value)
        return graph.build(mode=mode)

    train, other = build("train", (0,)), build("eval", (0, 1))
    plan = make_plan(train, cluster((1e9, 1e9)), Config())
    carried = retarget_plan(plan, train, other)
    assert [edge.tensors for edge in carried.replicas[0].edges] == [("sum0", "read")]


def test_what_a_mask_selects_stays_with_its_readers() -> None:
    def build(mode: str) -> ModelGraph:
        graph = Graph()
        value = graph.input("x")
        graph.path = (scope(0, 1),) if mode == "train" else ()
        value = graph.linear("gate", value)
        graph.path = (scope(1, 1),) if mode == "train" else ()
        value = graph.call("select", "own.select.default", value, spec=TensorSpec((ROWS, 8), "float32", (-1, 0)))
        graph.sum_loss(graph.linear("expert", value))
        return graph.build(mode=mode)

    train, there = build("train"), cluster((1e9, 1e9))
    carried = retarget_plan(make_plan(train, there, Config()), train, build("eval"))
    assert [stage.ops for stage in carried.replicas[0].stages] == [("gate",), ("select", "expert", "loss")]
    assert [edge.tensors for edge in carried.replicas[0].edges] == [("gate",)]


def test_an_order_that_the_placement_cannot_serve_is_lent_parameters_unless_it_trains_them() -> None:
    train, there = chain(2), cluster((1e9, 1e9))
    plan = make_plan(train, there, TWO)
    graph = Graph()
    value = graph.input("x")
    for index in (1, 0):
        value = graph.linear(f"eval{index}", value, f"layer{index}.weight")
    graph.outputs = (value,)
    lent = retarget_plan(plan, train, graph.build(mode="predict")).replicas[0].stages
    assert [stage.parameters for stage in lent] == [("layer0.weight",), ("layer1.weight", "layer0.weight")]
    with pytest.raises(PlanError, match=r"eval0 reads parameters of stage 0 and a value of the later stage 1"):
        retarget_plan(plan, train, graph.build(mode="train"))


def test_unlike_parameters() -> None:
    train, there = chain(2), cluster((1e9,))
    with pytest.raises(PlanError, match="parameters that the training does not have"):
        retarget_plan(make_plan(train, there, Config()), train, chain(3))
