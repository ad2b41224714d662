"""The five checks: cuts that would be wrong are refused, and the reason is kept."""

from __future__ import annotations

import pytest

from tests.unit.axes.graphs import Build
from whale.axes import Axes, Role, WholeReason, discover, register_rule
from whale.axes.operators.registry import _own_rules
from whale.errors import ConfigError
from whale.ir.graph import ModelGraph
from whale.ir.scope import SourceLine


def whole_at(axes: Axes, axis: str) -> dict[str, str]:
    return {whole.target: whole.reason for whole in axes.by_name[axis].whole}


def test_one_axis_met_twice_in_a_difference() -> None:
    build = Build()
    u = build.parameter("u", 5)
    rows = build.call("unsqueeze.default", u, 1, out=(5, 1))
    columns = build.call("unsqueeze.default", u, 0, out=(1, 5))
    build.call("sub.Tensor", rows, columns, out=(5, 5))
    assert "twice" in whole_at(discover(build.graph()), "u:0")["aten.sub.Tensor"]


def test_one_axis_met_twice_in_a_product() -> None:
    build = Build()
    x = build.parameter("x", 5, 3)
    y = build.call("t.default", x, out=(3, 5))
    build.call("mm.default", x, y, out=(5, 5))
    axes = discover(build.graph())
    assert "twice" in whole_at(axes, "x:0")["aten.mm.default"]
    assert axes.by_name["x:1"].may_be_cut


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_that_attends_to_itself_is_kept_with_keys_and_values_gathered(is_causal: bool) -> None:
    build = Build()
    x = build.input("x", "b", 2, 5, 3)
    q, k = (build.call("mul.Tensor", x, factor, out=("b", 2, 5, 3)) for factor in (2.0, 3.0))
    made = build.call("scaled_dot_product_attention.default", q, k, k, None, 0.0, is_causal, out=("b", 2, 5, 3))
    both = build.call("scaled_dot_product_attention.default", k, k, k, out=("b", 2, 5, 3))
    axes = discover(build.graph())
    name = next(axis.name for axis in axes.axes if axis.size == 5)
    assert axes.ops[made.op].roles[name] == Role("kept", gathers=(("attn_mask", 3), ("key", 1), ("value", 2)), grows=is_causal)
    assert axes.by_name[name].is_folded == is_causal
    assert axes.ops[both.op].roles[name].kind == "whole", "one tensor cannot be a part and whole"


def test_a_square_layer_with_a_residual_is_contracted_and_kept() -> None:
    build = Build()
    h, w = build.input("h", "b", 5), build.parameter("w", 5, 5)
    y = build.call("linear.default", h, w, out=("b", 5))
    build.call("add.Tensor", h, y, out=("b", 5))
    reasons = whole_at(discover(build.graph()), "w:0")
    assert reasons["aten.linear.default"] == "meets it twice, contracted and kept"
    assert "twice" in reasons["w"]


def test_a_slice_makes_its_dimension_whole_and_no_other() -> None:
    build = Build()
    x = build.parameter("x", 7, 3)
    build.call("slice.Tensor", x, 0, 1, 5, out=(4, 3))
    axes = discover(build.graph())
    assert whole_at(axes, "x:0") == {"aten.slice.Tensor": "takes a part of it"}
    assert axes.by_name["x:1"].may_be_cut


def test_an_op_without_a_rule_makes_its_axes_whole_and_says_so() -> None:
    build = Build()
    x = build.parameter("x", 7, 3)
    build.call("mine.twist.default", x, out=(7, 3))
    axes = discover(build.graph())
    for axis in axes.axes:
        assert axis.whole[0].reason == "has no rule"
        assert axis.whole[0].where == SourceLine("model.py", 2)
    assert axes.by_name["x:0"].whole == (WholeReason("twist_1", "mine.twist.default", "has no rule", SourceLine("model.py", 2)),)


def test_a_registered_rule_frees_the_axes_of_an_own_op() -> None:
    build = Build()
    x = build.parameter("x", 7, 3)
    build.call("mine.twist.default", x, out=(7, 3))
    token = _own_rules.set({})
    try:
        register_rule("mine.twist", "x[rows d!] -> [rows d!]")
        axes = discover(build.graph())
        assert axes.by_name["rows"].may_be_cut
        assert not axes.by_name["x:1"].may_be_cut
        with pytest.raises(ConfigError, match="->"):
            register_rule("mine.twist", "x[rows]")
    finally:
        _own_rules.reset(token)


def test_a_registered_rule_that_does_not_fit_is_no_rule() -> None:
    build = Build()
    x = build.parameter("x", 7, 3)
    build.call("mine.twist.default", x, out=(7, 3))
    token = _own_rules.set({})
    try:
        register_rule("mine.twist", "x[a] -> [a]")
        assert "x has 2 dimensions where its rule has 1" in discover(build.graph()).by_name["x:0"].whole[0].reason
    finally:
        _own_rules.reset(token)


def fused_qkv(sizes: tuple[int, int, int], slices: bool) -> ModelGraph:
    """Grouped-query attention from one fused projection, taken apart by ``split`` or by slices; 4 query heads of 2."""
    build = Build()
    h, w = build.input("h", "b", 9, 5), build.parameter("w", sum(sizes), 5)
    fused = build.call("linear.default", h, w, out=("b", 9, sum(sizes)))
    if slices:
        bounds = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
        full = build.call("slice.Tensor", fused, 0, 0, 2**63 - 1, out=("b", 9, sum(sizes)))
        parts = [
            build.call("slice.Tensor", source, -1, start, stop, out=("b", 9, stop - start))
            for source, start, stop in zip((fused, full, fused), bounds, bounds[1:], strict=False)
        ]
    else:
        split = build.call("split_with_sizes.default", fused, sizes, -1, out=[("b", 9, size) for size in sizes])
        parts = build.items(split, *(("b", 9, size) for size in sizes))
    q, k, v = (
        build.call("transpose.int", build.call("view.default", part, (), out=("b", 9, size // 2, 2)), 1, 2, out=("b", size // 2, 9, 2))
        for part, size in zip(parts, sizes, strict=True)
    )
    attended = build.call("scaled_dot_product_attention.default", q, k, v, out=("b", sizes[0] // 2, 9, 2), enable_gqa=True)
    build.call("reshape.default", build.call("transpose.int", attended, 1, 2, out=("b", 9, sizes[0] // 2, 2)), (), out=("b", 9, sizes[0]))
    return build.graph()


@pytest.mark.parametrize("slices", [False, True])
def test_the_group_axis_is_in_only_some_pieces_of_a_fused_projection(slices: bool) -> None:
    axes = discover(fused_qkv((8, 4, 4), slices))
    assert axes.by_name["heads"].size == 2
    assert axes.by_name["heads"].may_be_cut
    assert axes.by_name["group"].size == 2
    assert "only some pieces" in axes.by_name["group"].whole[0].reason
    assert str(axes.parameters["w"][0][0]) == "(heads*group*head_dim | heads*head_dim | heads*value_dim)"


def test_an_even_fused_projection_is_a_product() -> None:
    axes = discover(fused_qkv((8, 8, 8), False))
    assert axes.parameters["w"][0] == ("w:0.0", "heads", "head_dim")
    assert axes.by_name["w:0.0"].size == 3
    assert not axes.by_name["w:0.0"].may_be_cut
    assert axes.by_name["heads"].size == 4
    assert axes.by_name["heads"].may_be_cut


def test_slices_that_overlap_are_no_tiling() -> None:
    build = Build()
    x = build.parameter("x", 7)
    build.call("slice.Tensor", x, 0, 0, 6, out=(6,))
    build.call("slice.Tensor", x, 0, 1, 7, out=(6,))
    assert len(discover(build.graph()).by_name["x:0"].whole) == 1


def test_a_concatenation_of_unlike_axes_is_whole_and_its_pieces_come_back() -> None:
    build = Build()
    x, y = build.parameter("x", 3, 5), build.parameter("y", 4, 5)
    joined = build.call("cat.default", (x, y), out=(7, 5))
    split = build.call("split_with_sizes.default", joined, (3, 4), out=[(3, 5), (4, 5)])
    axes = discover(build.graph())
    assert axes.ops[split.op].outputs == (axes.parameters["x"], axes.parameters["y"])
    assert "only some pieces" in axes.by_name["x:0"].whole[0].reason
    assert axes.by_name["x:1"].may_be_cut


def test_a_rule_may_be_named_as_torch_library_names_the_operator() -> None:
    build = Build()
    build.call("mine.twist.default", build.parameter("x", 7, 3), out=(7, 3))
    token = _own_rules.set({})
    try:
        register_rule("mine::twist", "x[rows d!] -> [rows d!]")
        assert discover(build.graph()).by_name["rows"].may_be_cut
        with pytest.raises(ConfigError, match="lacks its library"):
            register_rule("twist", "x[rows d!] -> [rows d!]")
    finally:
        _own_rules.reset(token)


def test_a_size_that_only_values_tell_is_never_cut() -> None:
    build = Build()
    x, mask = build.parameter("x", 8, 3), build.input("mask", 8, dtype="bool")
    chosen = build.call("index.Tensor", x, (mask,), out=("?8", 3))
    y = build.call("relu.default", chosen, out=("?8", 3))
    build.call("sum.dim_IntList", y, (0,), out=(3,))
    axes = discover(build.graph())
    ((row,), (column,)) = axes.ops[y.op].outputs[0]
    assert isinstance(row, str) and isinstance(column, str)
    assert whole_at(axes, row)["aten.sum.dim_IntList"] == "has it in a size that depends on values or rows"
    assert not axes.by_name[row].may_be_cut and "aten.sum.dim_IntList" not in whole_at(axes, column)
