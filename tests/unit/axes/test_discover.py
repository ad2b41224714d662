"""Discovery on small graphs: views, ties, masks, names, and where the batch is."""

from __future__ import annotations

import sys

import pytest

from tests.unit.axes.graphs import Build
from whale.axes import Axes, Mixing, batch_axes, discover, show_dimension
from whale.cli.doctor import describe_axes
from whale.ir.graph import ModelGraph, Ref
from whale.ir.plan import BatchAxis


def dims(axes: Axes, ref: Ref) -> str:
    return " ".join(show_dimension(d) for d in axes.ops[ref.op].outputs[0])


def mixing(graph: ModelGraph) -> list[tuple[str, str]]:
    return [(m.op.split("_")[0], m.kind) for m in discover(graph).mixing]


def test_discovery_needs_no_torch() -> None:
    import subprocess

    code = "import sys, whale.axes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_view_that_cuts_an_axis_refines_it_everywhere() -> None:
    build = Build()
    x, w = build.input("x", "b", 9, 5), build.parameter("w", 12, 5)
    y = build.call("linear.default", x, w, out=("b", 9, 12))
    z = build.call("view.default", y, (), out=("b", 9, 3, 4))
    axes = discover(build.graph())
    assert dims(axes, z) == "batch x:1 w:0.0 w:0.1"
    assert axes.parameters["w"][0] == ("w:0.0", "w:0.1")
    assert dims(axes, y) == "batch x:1 w:0.0*w:0.1"


def test_batch_and_a_constant_of_its_size_are_told_apart() -> None:
    build = Build()
    x = build.input("x", "b", 4, 4)
    flat = build.call("view.default", x, (), out=("4b", 4))
    back = build.call("view.default", flat, (), out=("b", 4, 2, 2))
    turned = build.call("transpose.int", x, 0, 1, out=(4, "b", 4))
    mixed = build.call("reshape.default", turned, (), out=("b", 4, 4))
    graph = build.graph()
    axes = discover(graph)
    found = batch_axes(graph, axes)
    assert found[flat.op] == BatchAxis(0, 1, 4)
    assert found[back.op] == BatchAxis(0, 1, 1)
    assert found[turned.op] == BatchAxis(1, 1, 1)
    assert mixed.op not in found
    assert [m.op for m in axes.mixing] == [mixed.op]


def test_batch_inside_a_dimension() -> None:
    build = Build()
    x = build.input("x", "b", 6, 5)
    turned = build.call("permute.default", x, (1, 0, 2), out=(6, "b", 5))
    flat = build.call("reshape.default", turned, (), out=("6b", 5))
    halves = build.call("view.default", flat, (), out=(2, "15b"))
    doubled = build.call("cat.default", (x, x), 0, out=("2b", 6, 5))
    graph = build.graph()
    found = batch_axes(graph, discover(graph))
    assert found[flat.op] == BatchAxis(0, 6, 1)
    assert found[halves.op] == BatchAxis(1, 3, 5)
    assert found[doubled.op] == BatchAxis(0, 2, 1)


def test_tied_names_are_one_parameter() -> None:
    build = Build()
    table = build.parameter("wte", 11, 5, ties=("head",))
    ids = build.input("ids", "b", 9, dtype="int64")
    h = build.call("embedding.default", table, ids, out=("b", 9, 5))
    head = build.parameter("head", 11, 5)
    logits = build.call("linear.default", h, head, out=("b", 9, 11))
    axes = discover(build.graph())
    assert dims(axes, logits) == "batch ids:1 vocabulary"
    assert axes.parameters == {"wte": (("vocabulary",), ("hidden",))}
    assert axes.by_name["vocabulary"].may_be_cut


def test_a_mask_looked_up_by_all_positions_keeps_its_axes() -> None:
    build = Build()
    mask = build.input("mask", "b", 9, dtype="bool")
    rows = build.call("arange.default", 4, out=("b",), dtype="int64")
    rows = build.call("slice.Tensor", rows, 0, 0, 2**63 - 1, out=("b",), dtype="int64")
    rows = build.call("unsqueeze.default", rows, 1, out=("b", 1), dtype="int64")
    columns = build.call("add.Tensor", build.call("arange.default", 9, out=(9,), dtype="int64"), 0, out=(9,), dtype="int64")
    found = build.call("index.Tensor", mask, (rows, columns), out=("b", 9), dtype="bool")
    graph = build.graph()
    axes = discover(graph)
    assert dims(axes, found) == "batch mask:1"
    assert not axes.mixing
    assert {rows.op, columns.op} <= axes.positions
    assert axes.by_name["mask:1"].may_be_cut


def test_names_are_unique_and_come_from_words_parameters_or_tensors() -> None:
    build = Build()
    build.module = "blocks.0.attention"
    x = build.input("x", "b", 9, 6)
    for number in range(2):
        build.module = f"blocks.{number}.attention"
        heads = build.call("view.default", x, (), out=("b", 9, 2, 3))
        heads = build.call("transpose.int", heads, 1, 2, out=("b", 2, 9, 3))
        x = build.call("scaled_dot_product_attention.default", heads, heads, heads, out=("b", 2, 9, 3))
        x = build.call("reshape.default", build.call("transpose.int", x, 1, 2, out=("b", 9, 2, 3)), (), out=("b", 9, 6))
        w = build.parameter(f"w{number}", 6, 6)
        x = build.call("linear.default", x, w, out=("b", 9, 6))
    axes = discover(build.graph())
    names = [axis.name for axis in axes.axes]
    assert len(set(names)) == len(names)
    assert {"batch", "blocks.0.attention.heads", "blocks.1.attention.heads", "blocks.sequence", "w1:0"} <= set(names)


@pytest.mark.parametrize(
    ("target", "args", "shape", "mixes"),
    [
        ("softmax.int", (0,), ("b", 5), True),
        ("softmax.int", (1,), ("b", 5), False),
        ("cumsum.default", (0,), ("b", 5), True),
        ("mean.dim", ((0,),), (5,), True),
        ("mean.dim", ((1,),), ("b",), False),
        ("select.int", (0, 0), (5,), True),
        ("sort.default", (0,), ("b", 5), True),
        ("relu.default", (), ("b", 5), False),
        ("flip.default", ((0,),), ("b", 5), True),
        ("var.correction", ((0,),), (5,), True),
    ],
)
def test_ops_that_mix_samples_are_found(target: str, args: tuple[object, ...], shape: tuple[int | str, ...], mixes: bool) -> None:
    build = Build()
    x = build.input("x", "b", 5)
    build.call(target, x, *args, out=shape)
    assert mixing(build.graph()) == ([(target.split(".")[0], "mixes")] if mixes else [])


def test_the_batch_met_twice_is_reported_once() -> None:
    build = Build()
    x = build.input("x", "b", 5)
    scores = build.call("mm.default", x, build.call("t.default", x, out=(5, "b")), out=("b", "b"))
    scores = build.call("mul.Tensor", scores, 0.5, out=("b", "b"))
    build.call("relu.default", scores, out=("b", "b"))
    assert mixing(build.graph()) == [("mm", "mixes")]
    assert scores.op not in batch_axes(build.graph(), discover(build.graph()))


def test_an_op_without_a_rule_cannot_be_judged_but_keeps_its_rows() -> None:
    build = Build()
    x = build.input("x", "b", 5)
    y = build.call("mine.twist.default", x, out=("b", 5))
    graph = build.graph()
    axes = discover(graph)
    assert axes.mixing == (Mixing(y.op, "mine.twist.default: no rule, cannot tell", graph.by_name[y.op].where, "no rule"),)
    assert batch_axes(graph, axes)[y.op] == BatchAxis(0, 1, 1)


def test_the_sums_of_the_loss_do_not_mix() -> None:
    build = Build()
    x, y = build.input("x", "b", 5), build.input("y", "b", 5)
    error = build.call("mse_loss.default", x, y, 2, out=())
    build.loss_term(build.call("mul.Tensor", error, 0.5, out=()))
    assert mixing(build.graph()) == []


def test_what_is_no_sum_in_the_loss_mixes() -> None:
    build = Build()
    x, y = build.input("x", "b", 5), build.input("y", "b", 5)
    error = build.call("mse_loss.default", x, y, 1, out=())
    build.loss_term(build.call("rsqrt.default", error, out=()), reason="rsqrt is no sum")
    assert [(str(m.where), m.reason) for m in discover(build.graph()).mixing] == [("model.py:4", "rsqrt is no sum")]


def test_a_mean_that_the_loss_adds_up_mixes_where_it_is_used_again() -> None:
    build = Build()
    x = build.input("x", "b", 5)
    mean = build.call("mean.default", x, out=())
    build.call("sub.Tensor", x, mean, out=("b", 5))
    build.loss_term(build.call("mul.Tensor", mean, 0.5, out=()))
    assert mixing(build.graph()) == [("mean", "mixes")]


def test_the_places_of_rows_mix_where_they_are_values_and_not_where_they_index_the_rows() -> None:
    build = Build()
    x, table = build.input("x", "b", 5), build.parameter("table", 9, 5)
    places, column = build.call("arange.default", 4, out=("b",), dtype="int64"), build.input("column", "b", dtype="int64")
    build.call("index.Tensor", x, (places, column), out=("b",))
    assert mixing(build.graph()) == []
    build.call("index.Tensor", table, (places,), out=("b", 5))
    build.call("mul.Tensor", column, places, out=("b",))
    build.call("eye.default", 4, out=("b", "b"))
    build.call("linspace.default", 0, 1, 4, out=("b",))
    build.call("sum.default", build.call("ones.default", (4,), out=("b",)), out=())
    assert mixing(build.graph()) == [(name, "mixes") for name in ("index", "mul", "eye", "linspace", "sum")]


def test_batch_normalisation_mixes_in_training_alone() -> None:
    for training in (True, False):
        build = Build()
        x = build.input("x", "b", 3, 5, 5)
        w = build.parameter("w", 3)
        y = build.call("batch_norm.default", x, w, w, w, w, training, 0.1, 1e-5, False, out=("b", 3, 5, 5))
        graph = build.graph()
        assert mixing(graph) == ([("batch", "mixes")] if training else [])
        assert batch_axes(graph, discover(graph))[y.op] == BatchAxis(0, 1, 1)
        assert discover(graph).by_name["channels"].may_be_cut


def test_rows_of_a_description() -> None:
    build = Build()
    x, w = build.input("x", "b", 5), build.parameter("w", 7, 5)
    y = build.call("linear.default", x, w, out=("b", 7))
    build.call("softmax.int", y, -1, out=("b", 7))
    graph = build.graph()
    rows = {row.axis: row for row in describe_axes(discover(graph), graph)}
    assert rows["w:0"].held_by == ("w:0",)
    assert rows["w:0"].why == "aten.softmax.int reads all of it at once at model.py:4"
    assert rows["batch"].may_be_cut


def test_an_empty_tensor_stops_nothing() -> None:
    build = Build()
    x = build.input("x", "b", 5)
    empty = build.call("slice.Tensor", x, 1, 0, 0, out=("b", 0))
    joined = build.call("cat.default", (empty, x), 1, out=("b", 5))
    assert dims(discover(build.graph()), joined) == "batch x:1"


def test_the_number_of_rows_as_a_value_mixes_and_as_a_size_does_not() -> None:
    build = Build()
    x = build.input("x", "b", 6)
    rows = build.input_rows()
    build.call("view.default", x, (rows, 2, 3), out=("b", 2, 3))
    build.call("div.Tensor", x, rows, out=("b", 6))
    build.call("full.default", (rows, 6), 1.0, out=("b", 6))
    build.call("scalar_tensor.default", rows, out=())
    assert mixing(build.graph()) == [("div", "mixes"), ("scalar", "mixes")]


def test_two_partitions_of_one_dimension_that_do_not_fit_leave_it_whole() -> None:
    build = Build()
    z = build.parameter("z", 9, 4)
    thirds = build.items(build.call("chunk.default", z, 3, out=[(3, 4)] * 3), (3, 4), (3, 4), (3, 4))
    tiles = [build.call("slice.Tensor", z, 0, start, stop, out=(stop - start, 4)) for start, stop in ((0, 2), (2, 5), (5, 9))]
    pair = [build.call("cat.default", tuple(parts), out=(9, 4)) for parts in (thirds, tiles)]
    build.call("add.Tensor", *pair, out=(9, 4))
    axes = discover(build.graph())
    assert all(not axis.may_be_cut for axis in axes.axes if axis.name.startswith("z:0"))
    assert [axis.may_be_cut for axis in axes.axes if axis.name == "z:1"] == [True]


def test_what_is_written_into_a_buffer_alone_does_not_mix() -> None:
    build = Build()
    h = build.input("x", "b", 8)
    build.call("sum.dim_IntList", h, (0,), out=(8,))
    build.loss_term(build.call("sum.default", h, out=()))
    assert mixing(build.graph()) == []
