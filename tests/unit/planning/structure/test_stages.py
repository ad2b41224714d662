"""Stage assignment: what sinks, what is repeated, what stays together, what travels, and who holds what."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import ROWS, Graph, chain, cluster, scope, with_unread
from whale.config import Config
from whale.errors import AnnotationError, PlanError
from whale.ir.graph import LossTerm, ModelGraph, TensorSpec
from whale.ir.plan import Plan
from whale.ir.scope import ScopePath
from whale.planning import make_plan
from whale.planning.structure.structure import analyse

A, B = scope(0, 1, "a"), scope(1, 1, "b")


def plan_of(graph: ModelGraph) -> Plan:
    return make_plan(graph, cluster((1e9, 1e9)), Config())


def edges(plan: Plan) -> list[tuple[int, int, tuple[str, ...]]]:
    return [(edge.source, edge.target, edge.tensors) for edge in plan.replicas[0].edges]


def test_masks_and_sizes_are_repeated_not_sent() -> None:
    graph = Graph()
    rows = graph.rows()
    ids = graph.input("ids", dtype="int64")
    graph.path = (A,)
    graph.call("double", "operator.mul", rows, 2, outputs=(), tags=("reads_rows",), grad=False)
    graph.call("mask", "aten.ne.Scalar", ids, 0, grad=False)
    first = graph.call("first", "aten.mul.Tensor", graph.linear("layer0", ids), "mask")
    graph.path = (B,)
    second = graph.call("second", "aten.mul.Tensor", graph.linear("layer1", first), "mask")
    graph.call("shaped", "aten.view.default", second, "double", tags=("view",))
    graph.sum_loss("shaped")
    plan = plan_of(graph.build())
    assert edges(plan) == [(0, 1, ("first",))]
    assert plan.replicas[0].stages[0].ops == ("mask", "layer0", "first")
    assert plan.replicas[0].stages[1].ops == ("double", "mask", "layer1", "second", "shaped", "loss")


@pytest.mark.parametrize(("path", "stage"), [((A,), 0), ((B,), 1), ((scope(2, 1, "of outputs alone"),), 1), ((), 1)])
def test_what_only_outputs_read_is_kept_where_the_ops_of_its_scope_run(path: ScopePath, stage: int) -> None:
    plan = plan_of(with_unread(chain(2, [(A,), (B,)]), path, side=(8, 8)))
    assert [number for number, each in enumerate(plan.replicas[0].stages) if "side" in each.parameters] == [stage]


def test_random_ops_are_sent_not_repeated() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    graph.call("noise", "aten.rand_like.default", x, tags=("random",), grad=False)
    first = graph.call("first", "aten.mul.Tensor", graph.linear("layer0", x), "noise")
    graph.path = (B,)
    graph.sum_loss(graph.call("second", "aten.mul.Tensor", graph.linear("layer1", first), "noise"))
    assert edges(plan_of(graph.build())) == [(0, 1, ("first", "noise"))]


def test_an_in_place_op_its_base_and_its_views_share_a_stage() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    h = graph.linear("layer1", graph.linear("layer0", x))
    graph.path = (B,)
    graph.call("part", "aten.slice.Tensor", h, tags=("view",))
    graph.call("changed", "aten.mul_.Tensor", "part", 2, tags=("in_place",))
    graph.sum_loss(graph.linear("layer2", h))
    plan = plan_of(graph.build())
    assert [stage.ops for stage in plan.replicas[0].stages] == [("layer0",), ("layer1", "part", "changed", "layer2", "loss")]


def test_a_scope_whose_ops_are_all_bound_to_another_stage() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    h = graph.linear("layer0", x)
    graph.path = (B,)
    graph.call("changed", "aten.mul_.Tensor", h, 2, tags=("in_place",))
    graph.sum_loss(graph.linear("layer1", "changed"))
    with pytest.raises(AnnotationError, match=r"(?s)stage a has no op of its own.*model.py:1"):
        plan_of(graph.build())


def test_a_reader_before_a_change_stays_with_it() -> None:
    """Over a wire the reader would see the changed value."""
    graph = Graph()
    x = graph.input("x")
    h = graph.linear("layer0", x)
    graph.path = (B,)
    graph.call("early", "aten.sin.default", h)
    graph.linear("layer1", x)
    graph.path = (A,)
    graph.call("changed", "aten.mul_.Tensor", h, 2, tags=("in_place",))
    graph.path = ()
    graph.sum_loss(graph.call("both", "aten.add.Tensor", "early", "changed"))
    graph.sum_loss("layer1", "other_loss")
    plan = plan_of(graph.build())
    homes = {name: stage.index for stage in plan.replicas[0].stages for name in stage.ops}
    assert homes["early"] == homes["changed"] == homes["layer0"]


def test_readers_of_running_statistics_share_a_stage() -> None:
    graph = Graph()
    x = graph.input("x")
    mean = graph.parameter("mean", 8, kind="buffer", trainable=False)
    for index, path in enumerate(((A,), (B,))):
        graph.path = path
        x = graph.call(f"norm{index}", "aten.batch_norm.default", graph.linear(f"layer{index}", x), mean)
    graph.sum_loss(x)
    plan = plan_of(graph.build())
    assert [stage.parameters for stage in plan.replicas[0].stages] == [("layer0.weight",), ("mean", "layer1.weight")]


def test_ties_are_held_by_every_stage_that_reads_them_and_unused_parameters_by_the_last() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    x = graph.linear("layer0", x, "shared")
    graph.path = (B,)
    x = graph.linear("layer1", graph.linear("layer2", x), "shared")
    graph.sum_loss(x)
    graph.parameter("unused", 8)
    plan = plan_of(graph.build())
    assert [stage.parameters for stage in plan.replicas[0].stages] == [("shared",), ("shared", "layer2.weight", "unused")]
    assert plan.owners["shared"] == (0, 1)


def test_skips_are_direct_edges() -> None:
    graph = Graph()
    x = graph.input("x")
    values = [x]
    for index in range(3):
        graph.path = (scope(index, 1),)
        values.append(graph.linear(f"layer{index}", values[-1]))
    graph.sum_loss(graph.call("joined", "aten.add.Tensor", "layer0", "layer2"))
    plan = make_plan(graph.build(), cluster((1e9,) * 3), Config())
    assert edges(plan) == [(0, 1, ("layer0",)), (0, 2, ("layer0",)), (1, 2, ("layer1",))]


def test_items_of_a_tuple_live_with_it() -> None:
    graph = Graph()
    x = graph.input("x")
    spec = TensorSpec((ROWS, 4), "float32", (1, 0))
    graph.path = (A,)
    graph.call("halves", "aten.split.Tensor", graph.linear("layer0", x), 4, outputs=(spec, spec), tags=("view",))
    graph.path = (B,)
    graph.call("left", "operator.getitem", "halves", 0, width=4)
    graph.call("right", "operator.getitem", "halves", 1, width=4)
    graph.sum_loss(graph.linear("layer1", graph.call("joined", "aten.mul.Tensor", "left", "right", width=4), width=4))
    plan = plan_of(graph.build())
    homes = {name: stage.index for stage in plan.replicas[0].stages for name in stage.ops}
    assert homes["halves"] == homes["left"] == homes["right"]


def test_a_number_that_is_read_lives_with_what_computes_with_it() -> None:
    graph = Graph()
    x = graph.input("x")
    h = graph.call("linear", "aten.linear.default", x, flops=100)
    number = graph.call("item", "aten.item.default", h, outputs=())
    y = graph.call("relu", "aten.relu.default", h)
    graph.call("narrow", "aten.mul.Tensor", y, number)
    structure = analyse(graph.build())
    assert structure.atom_of["item"] == structure.atom_of["narrow"] != structure.atom_of["linear"]


def test_a_weight_that_derives_from_the_inputs_is_made_beside_its_sum() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.call("count", "aten.sum.default", x, width=None, grad=False)
    graph.path = (A,)
    h = graph.linear("layer0", x)
    graph.sum_loss(h, "early", weight="count")
    graph.path = (B,)
    graph.sum_loss(graph.linear("layer1", h), "late", weight="count")
    plan = plan_of(graph.build())
    assert [("count" in stage.ops, stage.ops[-1]) for stage in plan.replicas[0].stages] == [(True, "early"), (True, "late")]


def test_a_tensor_that_mixes_samples_cannot_travel() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    h = graph.linear("layer0", x)
    graph.call("pairs", "aten.mm.default", h, h, spec=TensorSpec((ROWS * ROWS,), "float32", (-1,)))
    graph.path = (B,)
    graph.sum_loss(graph.call("scaled", "aten.mul.Tensor", "pairs", graph.parameter("scale"), spec=TensorSpec((16,), "float32", (-1,))))
    with pytest.raises(PlanError, match=r"(?s)pairs.*mixes samples.*at model.py"):
        plan_of(graph.build())


def test_a_loss_over_inputs_alone_is_computed_once() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    h = graph.linear("layer0", x)
    graph.path = (B,)
    graph.sum_loss(graph.linear("layer1", h))
    graph.path = ()
    graph.call("constant", "aten.sum.default", x, width=None, grad=False)
    graph.loss.append(LossTerm(1.0, "constant", None))
    plan = plan_of(graph.build())
    assert ["constant" in stage.ops for stage in plan.replicas[0].stages] == [False, True]


def test_a_scope_with_nothing_but_cheap_ops_is_a_stage_all_the_same() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    graph.call("scaled", "aten.mul.Tensor", x, 2, grad=False)
    graph.path = (B,)
    graph.sum_loss(graph.linear("layer", "scaled"))
    plan = plan_of(graph.build())
    assert plan.replicas[0].stages[0].ops == ("scaled",)


def test_a_value_of_a_later_stage_is_an_error_even_through_unscoped_ops() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (A,)
    h = graph.linear("layer0", x)
    graph.path = (B,)
    h = graph.linear("layer1", h)
    graph.path = ()
    h = graph.call("between", "aten.sin.default", h)
    graph.path = (A,)
    graph.sum_loss(graph.linear("layer2", h))
    with pytest.raises(AnnotationError, match="layer2"):
        plan_of(graph.build())
