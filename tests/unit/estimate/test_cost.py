"""The closed forms against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.planning.graphs import ROWS, Graph, chain, cluster, device
from whale.config import Config
from whale.estimate import (
    Costs,
    Line,
    StateBytes,
    all_reduce_seconds,
    estimate,
    kept_names,
    kept_tensors,
    op_seconds,
    op_table,
    optimizer_seconds,
    output_lines,
    size_line,
    state_bytes,
)
from whale.estimate.memory.held import held_tensors, kept_by_maker
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Handling, Host, Link
from whale.ir.graph import Parameter, TensorSpec
from whale.ir.plan import Form, states_of
from whale.planning import make_plan


def test_an_op_takes_the_larger_of_arithmetic_and_traffic() -> None:
    graph = chain(1, width=100)
    table = op_table(graph)
    place = table.position["layer0"]
    flops, moved = 2 * 100 * 100, (100 + 100) * 4
    fast_memory = op_seconds(table, device("d", "h", flops=1e6, bandwidth=1e12), 1, Costs())
    assert fast_memory.forward_per_row[place] == pytest.approx(flops / 1e6)
    assert fast_memory.forward_fixed[place] == pytest.approx(Costs().launch_seconds)
    slow_memory = op_seconds(table, device("d", "h", flops=1e12, bandwidth=1e6), 1, Costs())
    assert slow_memory.forward_per_row[place] == pytest.approx(moved / 1e6)
    assert slow_memory.forward_fixed[place] == pytest.approx(100 * 100 * 4 / 1e6 + Costs().launch_seconds)  # the weight


def test_a_slowed_device_takes_so_many_times_as_long() -> None:
    graph = chain(3)
    handling = Handling(1e-4, 1e-9)
    here = Cluster("c", (Host("h", tuple(replace(device(f"h/{n}", "h"), handling=handling) for n in range(2)), Link(1e30, 0.0)),), None)
    plan = make_plan(graph, here, Config({"pipeline.num_stages": 2, "planning.search": "off"}))
    alone = make_plan(graph, here.only(["h/0"]), Config({"planning.search": "off"}))
    for each in (plan, alone):
        once, thrice = (estimate(each, graph, here.slowed(dict.fromkeys(here.by_name, factor))) for factor in (1.0, 3.0))
        assert thrice.step_seconds == pytest.approx(3 * once.step_seconds)


def test_views_and_placeholders_are_free() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.call("seen", "aten.view.default", x, tags=("view",))
    graph.sum_loss("seen")
    seconds = op_seconds(op_table(graph.build()), device("d", "h"), 1, Costs())
    assert seconds.forward_fixed[:2].tolist() == [0, 0] and seconds.forward_per_row[:2].tolist() == [0, 0]


def test_training_keeps_gradient_and_optimizer_states() -> None:
    spec = TensorSpec((10,), "float32", (0,))

    def held(parameter: Parameter, number: int, *, training: bool = True, **forms: Form) -> StateBytes:
        return state_bytes(parameter, states_of((parameter,), number, **forms)[0], training=training)

    assert held(Parameter("w", spec), 2) == StateBytes(40, 40, 80)
    assert held(Parameter("w", spec), 0).total == 80
    assert held(Parameter("w", spec, trainable=False), 2).total == 40
    assert held(Parameter("w", spec, "buffer"), 2).total == 40
    assert held(Parameter("w", spec), 2, training=False).total == 40
    assert held(Parameter("w", spec), 2, optimizer=Form("float64")) == StateBytes(40, 40, 240), "it keeps a weight of its own"
    on_host = held(Parameter("w", spec), 2, gradient=Form("bfloat16"), optimizer=Form("float32", home="host"))
    assert on_host == StateBytes(40, 20, 0, on_host=120)


def test_kept_activations() -> None:
    graph = Graph()
    x = graph.input("x")
    h = graph.linear("layer0", x)
    graph.call("view", "aten.view.default", h, tags=("view",))
    graph.call("bent", "aten.tanh.default", "view")
    graph.call("sum", "aten.add.Tensor", "bent", h)
    graph.sum_loss(graph.linear("layer1", "sum"))
    built = graph.build()
    kept = kept_tensors(built)
    assert kept == {"layer0": (), "bent": ("bent",), "sum": (), "layer1": ("sum",), "loss": ()}
    names, _ = kept_names(built, ["bent", "sum", "layer1"], kept, ())
    assert size_line(output_lines(built), names) == Line(0.0, 2 * 8 * 4)
    assert kept_tensors(graph.build(mode="eval")) == {}
    assert built.num_rows == ROWS


def test_indices_are_kept_where_an_op_is_not_computed_again() -> None:
    graph = Graph()
    h = graph.linear("layer0", graph.input("x"))
    graph.sum_loss(graph.linear("layer1", graph.call("pool", "aten.max_pool2d.default", h)))
    built = graph.build()
    ops, sizes = ("layer0", "pool", "layer1"), output_lines(built)
    kept = kept_tensors(built)
    plain, repeated = (held_tensors(built, ops, kept, runs) for runs in ((), (ops[:2],)))
    assert plain.bytes_there(built, sizes) == size_line(sizes, plain.kept) + sizes["pool"] * 2  # int64 beside float32
    assert repeated.bytes_there(built, sizes) == size_line(sizes, repeated.kept)
    assert kept_by_maker(built, [sizes[op.name] for op in built.ops], kept).sum(axis=1).tolist() == [
        0.0,
        plain.bytes_there(built, sizes).per_row,
    ]


def test_a_sum_goes_inside_hosts_first() -> None:
    there = Cluster(
        "c",
        (Host("a", (device("a/0", "a"), device("a/1", "a")), Link(4e9, 1e-6)), Host("b", (device("b/0", "b"),), Link(1e9, 1e-6))),
        Link(1e9, 1e-5),
    )
    assert there.link("a/0", "a/1").seconds(4e9) == pytest.approx(1 + 1e-6)
    assert all_reduce_seconds(there, ("a/0",), 1e9) == 0
    assert all_reduce_seconds(there, ("a/0", "a/1"), 4e9) == pytest.approx(2 * (0.5 + 1e-6))
    assert all_reduce_seconds(there, ("a/0", "a/1", "b/0"), 3e9) == pytest.approx(2 / 2 * 3 + 2e-6 + 2e-5)  # a's sum to b and back


def test_optimizer_traffic() -> None:
    assert optimizer_seconds(device("d", "h", bandwidth=8e9), 1e9, 1e9, 2e9) == pytest.approx(1.0)


def test_a_cluster_for_tests_has_the_speeds_asked_for() -> None:
    assert [d.peak_flops("float32") for d in cluster((2e9, 1e9)).devices] == [2e9, 1e9]


def test_a_narrow_product_does_not_fill_the_device() -> None:
    wide, narrow = (op_table(chain(1, width=width)) for width in (100, 10))
    assert (narrow.depth[place := narrow.position["layer0"]], narrow.width[place]) == (10, 10)
    assert narrow.narrowest(2)[place] == 2, "rows are a size too"
    half = replace(device("d", "h", flops=1e6, bandwidth=1e15), half_width=10.0)
    seconds = op_seconds(narrow, half, 1000, Costs(launch_seconds=0.0))
    assert seconds.forward_per_row[place] == pytest.approx(2 * 2 * 10 * 10 / 1e6)
    seconds = op_seconds(wide, half, 1000, Costs(launch_seconds=0.0))
    assert seconds.forward_per_row[place] == pytest.approx(1.1 * 2 * 100 * 100 / 1e6)


def test_short_kernels_wait_for_the_host() -> None:
    graph, fast = chain(4, width=100), replace(device("d", "h", flops=1e15, bandwidth=1e15), host_seconds=1e-3)
    table, costs = op_table(graph), Costs(launch_seconds=0.0)
    index, launches = np.arange(len(graph.ops)), sum(table.launches)
    found = op_seconds(table, fast, 4, costs)
    assert found.forward(index).line(4).at(4) == pytest.approx(launches * 1e-3)
    assert found.backward(index).line(4).at(4) == pytest.approx(2 * launches * 1e-3)
    assert found.forward(index).device.at(4) < 1e-9, "the search ranks by what devices do"
    found = op_seconds(table, replace(fast, flops=(("float32", 1e6),)), 4, costs)
    assert found.forward(index).line(4) == found.forward(index).device


def test_pointwise_ops_may_run_in_one_kernel_with_their_reader() -> None:
    graph = Graph()
    h = graph.linear("layer0", graph.input("x"))
    for number, source in enumerate((h, "p0", "p1")):
        kind, tags = ("dropout", ()) if number == 1 else ("tanh", ("pointwise",))  # torch does not tag all that are pointwise
        graph.call(f"p{number}", f"aten.{kind}.default", source, flops=32, tags=tags)
    graph.sum_loss(graph.linear("layer1", "p2"))
    built = graph.build()
    alone, fused = op_table(built), op_table(built, fused=True)
    place = [built.position[f"p{number}"] for number in range(3)]
    assert alone.launches[place].tolist() == [1, 1, 1] and fused.launches[place].tolist() == [1, 0, 0]
    assert fused.bytes_per_row[place].tolist() == [8 * 4, 0, 8 * 4], "the first reads, the last writes"
    assert alone.bytes_per_row[place].tolist() == [2 * 8 * 4] * 3
    by_hand = op_table(built, by_hand=True)
    assert by_hand.launches[place].tolist() == [0, 0, 1] and by_hand.bytes_per_row[place].tolist() == [8 * 4, 0, 8 * 4]


def test_products_may_run_in_tensorfloat() -> None:
    table = op_table(chain(1, width=100))
    known = replace(device("d", "h", bandwidth=1e15), flops=(("float32", 1e6), ("tf32", 8e6)), efficiencies=(("tf32", 0.5),))
    plain, fast = (op_seconds(table, known, 1, Costs(launch_seconds=0.0, allows_tf32=allowed)) for allowed in (False, True))
    place = table.position["layer0"]
    assert plain.forward_per_row[place] == pytest.approx(4 * fast.forward_per_row[place])


def test_a_product_with_a_number_keeps_nothing() -> None:
    graph = Graph()
    x = graph.linear("layer0", graph.input("x"))
    graph.call("scaled", "aten.mul.Tensor", x, 0.5)
    graph.call("squared", "aten.mul.Tensor", "scaled", "scaled")
    graph.sum_loss(graph.linear("layer1", "squared"))
    kept = kept_tensors(graph.build())
    assert kept["scaled"] == () and kept["squared"] == ("scaled",)


def test_every_micro_batch_adds_its_gradients_to_those_before() -> None:
    graph, here = chain(2, width=64), cluster([1e9])
    found = Prices(graph, here, Costs()).seconds(here.devices[0], 4)
    alone = op_seconds(op_table(graph), here.devices[0], 4, Costs())
    extra = found.backward_fixed - alone.backward_fixed
    reads = np.array([any(graph.by_name[name].kind == "parameter" for name in op.inputs) for op in graph.ops])
    assert extra[reads] == pytest.approx(3 * 64 * 64 * 4 / here.devices[0].bandwidth), "both are read, the sum is written"
    assert not extra[~reads].any()


def test_what_the_user_assumes_of_ops_and_messages_is_priced() -> None:
    config = Config({"estimate.fuses_pointwise": True, "estimate.allows_tf32": True, "estimate.message_seconds": "20 us"})
    found = Costs.of(config)
    assert (found.fuses_pointwise, found.compiles, found.allows_tf32) == (True, False, True)
    assert found.message_seconds == pytest.approx(20e-6)
    assert Costs.of(Config()) == Costs()
