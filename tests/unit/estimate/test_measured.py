"""Times of a profile in the place of those worked out: at its rows, between them, on parts, and only for its model and devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.planning.graphs import Graph, chain, cluster
from whale.axes import discover
from whale.config import Config
from whale.errors import ConfigError
from whale.estimate import Costs, estimate, op_seconds, op_table
from whale.estimate.costs.line import Started
from whale.estimate.costs.measured import KindTimes, Measured, measured
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.traffic import work_on_parts
from whale.estimate.step.work import Works
from whale.estimate.step.workers import stage_key
from whale.ir.cluster import Cluster
from whale.ir.figure import Figure
from whale.ir.graph import ModelGraph
from whale.ir.profile import KindProfile, OpTimes, Profile, model_fingerprint, read_profile, signature
from whale.ir.serialization import to_json
from whale.planning import make_plan

HERE = cluster([1e9])
ROWS = (1, 4, 16)


def profile(graph: ModelGraph, here: Cluster = HERE, **passes: tuple[float, ...]) -> Profile:
    """Each layer takes 1, 4 and 10 ms forward, and twice that backward; other ops are not measured."""
    layers = [signature(op, graph) for op in graph.ops if "layer" in op.name]
    ops = tuple(OpTimes(name, (1e-3, 4e-3, 1e-2), (2e-3, 8e-3, 2e-2)) for name in dict.fromkeys(layers))
    figures = {name: tuple(Figure("pass", "s", value, value, value, 1) for value in values) for name, values in passes.items()}
    kinds = tuple(KindProfile(kind, "here", "2.13", ROWS, ops, **figures) for kind in {d.kind for d in here.devices})
    return Profile(model_fingerprint(graph), kinds)


@pytest.mark.parametrize(("rows", "expected"), [(1, 1e-3), (4, 4e-3), (16, 1e-2), (2, 2e-3), (10, 7e-3), (32, 1.8e-2), (0.5, 5e-4)])
def test_an_op_takes_what_it_took(rows: float, expected: float) -> None:
    graph = chain(2)
    costs, table = replace(Costs(), measured=measured(profile(graph), graph, HERE)), op_table(chain(2))
    found, place = op_seconds(table, HERE.devices[0], rows, costs), op_table(graph).position["layer1"]
    assert found.forward_fixed[place] + rows * found.forward_per_row[place] == pytest.approx(expected)
    assert found.backward_fixed[place] + rows * found.backward_per_row[place] == pytest.approx(2 * expected)
    assert found.forward_fixed[place] >= 0 and found.forward_per_row[place] >= 0
    slowed = HERE.slowed({HERE.devices[0].name: 2.0})
    twice = op_seconds(table, slowed.devices[0], rows, replace(Costs(), measured=measured(profile(graph), graph, slowed)))
    assert twice.forward_fixed[place] + rows * twice.forward_per_row[place] == pytest.approx(2 * expected)
    loss, plain = table.position["loss"], op_seconds(table, HERE.devices[0], rows, Costs())
    assert found.forward_fixed[loss] == plain.forward_fixed[loss], "what was not measured keeps the price worked out"


def test_a_part_takes_as_long_as_so_many_fewer_rows() -> None:
    graph = chain(1)
    table, axes = op_table(graph), discover(graph)
    axis = next(name for name in axes.by_name if name != "batch")
    costs = replace(Costs(), measured=measured(profile(graph), graph, HERE))
    local = work_on_parts(graph, axes, table, {"layer0": axis}).at({axis: 0.25})
    found, place = op_seconds(local, HERE.devices[0], 16, costs), table.position["layer0"]
    assert found.forward_fixed[place] + 16 * found.forward_per_row[place] == pytest.approx(4e-3)


@pytest.mark.parametrize("rows", [ROWS, (8,)])
def test_many_shares_at_once_are_each_by_itself(rows: tuple[int, ...]) -> None:
    graph, device = chain(2), HERE.devices[0]
    times = tuple(tuple(range(1, len(rows) + 1)) for _ in graph.ops)
    known = Measured({device.kind: KindTimes(np.array(rows, dtype=float), np.array(times, dtype=float), np.array(times, dtype=float))})
    ops, shares = np.arange(len(graph.ops)), np.linspace(0, 1, 7)[:, None] * np.ones(len(graph.ops))
    fixed, per_row = known.lines(device, ops, shares, 16, backward=False)
    for own, *together in zip(shares, fixed, per_row, strict=True):
        assert np.array_equal(known.lines(device, ops, own, 16, backward=False), together)


def test_ops_add_up_to_the_whole_pass() -> None:
    graph = Graph()
    graph.linear("layer0", graph.input("x"))
    graph.linear("layer1", "layer0")
    made = replace(graph.build(), loss=())
    found = measured(profile(made, forward=(3e-3, 9e-3, 3e-2), backward=(4e-3, 16e-3, 4e-2)), made, HERE).kinds[HERE.devices[0].kind]
    computing = [op_table(made).position[name] for name in ("layer0", "layer1")]
    assert found.forward[computing].sum(axis=0) == pytest.approx([3e-3, 9e-3, 3e-2])
    assert found.backward[computing].sum(axis=0) == pytest.approx([4e-3, 16e-3, 4e-2])


def test_weights_that_wait_take_what_was_measured_of_all_or_python_of_the_host() -> None:
    graph = chain(2)
    found = profile(graph)
    found = replace(found, kinds=tuple(replace(kind, apart=(6e-3, 12e-3, 36e-3)) for kind in found.kinds))
    known = Prices(graph, HERE, replace(Costs(), measured=measured(found, graph, HERE)))
    device = HERE.devices[0]
    assert known.waiting(device, 4).line(4).at(4) == pytest.approx(12e-3 / 3 / 2), "of two ops, in three passes"
    assert Prices(graph, HERE, Costs()).waiting(device, 4) == Started(host=Costs().waiting_seconds)
    plan = make_plan(graph, HERE, Config({"planning.search": "off"}), rows=16)
    key = stage_key(plan.replicas[0], plan.replicas[0].stages[0])
    works = Works(known, plan.state_of, frozenset())
    together, apart = (works.of(each, ("h0/0",), 0, 4) for each in (key, replace(key, defers_weights=True)))
    for name in ("forward", "backward_input", "backward_weight"):
        assert getattr(apart, name) - getattr(together, name) == pytest.approx(4e-3)


def test_one_number_of_rows_is_a_line_through_nothing() -> None:
    graph = chain(1)
    kind = HERE.devices[0].kind
    times = OpTimes(signature(graph.by_name["layer0"], graph), (8e-3,), (16e-3,))
    one = Profile(model_fingerprint(graph), (KindProfile(kind, "", "", (8,), (times,)),))
    found = op_seconds(op_table(graph), HERE.devices[0], 2, replace(Costs(), measured=measured(one, graph, HERE)))
    place = graph.position["layer0"]
    assert (found.forward_fixed[place], found.forward_per_row[place]) == (0, pytest.approx(1e-3))


def test_the_estimate_and_the_plan_take_the_profile(tmp_path: Path) -> None:
    graph, path = chain(3), tmp_path / "p.json"
    path.write_text(to_json(profile(graph)))
    config = Config({"cluster.profile": str(path)})
    plan, costs = make_plan(graph, HERE, config, rows=16), Costs.for_model(config, graph, HERE)
    step = estimate(plan, graph, HERE, costs)
    assert plan.step_seconds == pytest.approx(step.step_seconds)
    assert step.step_seconds == pytest.approx(3 * 3e-2, rel=0.01), "three layers at 16 rows; the loss and the optimizer are small"
    assert step.step_seconds > 2 * estimate(plan, graph, HERE).step_seconds


def test_ops_that_a_compiler_joins_take_what_is_worked_out_of_their_kernel(tmp_path: Path) -> None:
    graph = Graph()
    h = graph.linear("layer0", graph.input("x"))
    for number in (1, 2):
        h = graph.call(f"layer{number}", "aten.tanh.default", h, tags=("pointwise",))
    graph.linear("layer3", h)
    made, path = replace(graph.build(), loss=()), tmp_path / "p.json"
    path.write_text(to_json(profile(made, forward=(1.0,) * 3, backward=(1.0,) * 3)))
    found = {}
    for compiles in (False, True):
        costs = Costs.for_model(Config({"cluster.profile": str(path), "runtime.compile": compiles}), made, HERE)
        assert costs.measured is not None
        found[compiles] = costs.measured.kinds[HERE.devices[0].kind].forward
    products, joined = ([made.position[name] for name in names] for names in (("layer0", "layer3"), ("layer1", "layer2")))
    assert found[True][products].tolist() == [[1e-3, 4e-3, 1e-2]] * 2, "not stretched to passes with other kernels"
    assert np.isnan(found[True][joined]).all() and found[False][[*products, *joined]].sum(axis=0) == pytest.approx(1.0)


def test_a_profile_of_another_model_or_machine_is_refused() -> None:
    graph = chain(2)
    with pytest.raises(ConfigError, match="measured on another model"):
        measured(profile(chain(3)), graph, HERE)
    with pytest.raises(ConfigError, match=r"no times for device h0/1 \(.* with 2GFLOP/s"):
        measured(profile(graph), graph, cluster([1e9, 2e9]))


def test_times_hold_for_a_device_with_other_memory_unless_its_own_are_there() -> None:
    graph = chain(1)
    small, large = HERE.devices[0].kind, replace(HERE.devices[0].kind, memory=1)
    both = cluster([1e9], memory=1)
    own = KindProfile(large, "", "", (8,), (OpTimes(signature(graph.by_name["layer0"], graph), (8e-3,), (16e-3,)),))
    known = profile(graph)
    assert measured(known, graph, both).kinds[large].rows.tolist() == list(ROWS)
    two = replace(known, kinds=(*known.kinds, own))
    assert measured(two, graph, both).kinds[large].rows.tolist() == [8]
    assert measured(two, graph, HERE).kinds[small].rows.tolist() == list(ROWS)


def test_scopes_and_rows_of_the_example_make_no_other_model() -> None:
    graph = chain(2)
    assert model_fingerprint(replace(graph, ops=tuple(replace(op, scope=()) for op in graph.ops))) == model_fingerprint(graph)
    assert model_fingerprint(chain(2, width=16)) != model_fingerprint(graph) != model_fingerprint(chain(3))


@pytest.mark.parametrize(("text", "said"), [(None, "cannot read the profile"), ("{}", "is not a profile"), ("not", "is not a profile")])
def test_a_file_that_is_no_profile(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_profile(path)
