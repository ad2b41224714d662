"""What moves at a bridge, against sets of elements counted one by one."""

from __future__ import annotations

from itertools import accumulate, product
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.axes import Axes, Axis, Concatenation, Dimension, OpAxes, Role
from whale.ir.graph import ModelGraph, Op, Ref, TensorSpec
from whale.ir.plan import Shard
from whale.sharding.bridges import Bridge, bridge_bytes, summed_size

PLANNED, ROWS = 2, 3
DIMENSIONS: tuple[tuple[Dimension, ...], ...] = (
    (("batch",), ("a",), ("b",)),
    (("batch",), ("c", "a"), ("b",)),
    (("batch", "a"), ("b", "c")),
    (("batch",), ("a",), (Concatenation((("b",), ("c", "b"))),)),
)
Index = tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Dimension, ...], dict[str, int], tuple[Shard, ...]]:
    """A tensor and two axes of it cut over two or three devices."""
    width = draw(st.integers(2, 3))
    parts = st.lists(st.integers(1, 3), min_size=width, max_size=width).map(tuple)
    shards = Shard("a", draw(parts)), Shard("b", draw(parts))
    return draw(st.sampled_from(DIMENSIONS)), {"batch": ROWS, "a": sum(shards[0].sizes), "b": sum(shards[1].sizes), "c": 2}, shards


def coordinates(dimension: Dimension, sizes: dict[str, int]) -> list[dict[str, int]]:
    """Per position of a dimension, where it is on each axis."""
    found: list[dict[str, int]] = [{}]
    for factor in dimension:
        if isinstance(factor, Concatenation):
            inner = [own for piece in factor.pieces for own in coordinates(piece, sizes)]
        else:
            inner = [{factor: index} for index in range(sizes[factor])]
        found = [{**outer, **own} for outer in found for own in inner]
    return found


def held(dimensions: tuple[Dimension, ...], sizes: dict[str, int], shard: Shard | None, position: int) -> set[Index]:
    """The elements that a device has."""
    ends = (0, *accumulate(shard.sizes)) if shard else (0, 0)
    places = [coordinates(dimension, sizes) for dimension in dimensions]
    found = set()
    for index in product(*(range(len(own)) for own in places)):
        at = {axis: place for own, number in zip(places, index, strict=True) for axis, place in own[number].items()}
        if shard is None or ends[position] <= at[shard.axis] < ends[position + 1]:
            found.add(index)
    return found


def world(dimensions: tuple[Dimension, ...], sizes: dict[str, int], role: Role | None = None) -> tuple[ModelGraph, Axes]:
    planned = {**sizes, "batch": PLANNED}
    shape = tuple(len(coordinates(dimension, planned)) for dimension in dimensions)
    factors = tuple(len(coordinates(dimension, {**sizes, "batch": 1})) if "batch" in dimension else 0 for dimension in dimensions)
    op = Op("x", "call", "aten.some.default", outputs=(TensorSpec(shape, "float32", factors),))
    axes = tuple(Axis(name, size) for name, size in planned.items())
    roles = {"contracted": role} if role else {}
    return ModelGraph((op,), (), PLANNED), Axes(axes, MappingProxyType({"x": OpAxes((dimensions,), roles)}), {}, ())


@given(cases())
def test_bytes_are_those_of_the_elements_that_are_missing(case: tuple[tuple[Dimension, ...], dict[str, int], tuple[Shard, ...]]) -> None:
    dimensions, sizes, shards = case
    graph, axes = world(dimensions, sizes)
    by_axis: dict[str | None, Shard | None] = {None: None, "a": shards[0], "b": shards[1]}
    for position, (source, target), entered in product(range(len(shards[0].sizes)), product(by_axis, by_axis), (False, True)):
        before, after = (held(dimensions, sizes, by_axis[axis], position) for axis in (source, target))
        bridge = Bridge("x", source, target, entered and target is None)
        others = len(shards[0].sizes) - 1
        reduced = {"reduce-scatter": 4 * len(before) * others, "all-reduce": round(8 * len(after) * others / (others + 1))}
        forward = 4 * len(after - before)
        backward = 0 if bridge.backward == "slice" else reduced.get(bridge.backward, 4 * len(before - after))
        assert bridge_bytes(bridge, graph, axes, shards, ROWS)[position] == (forward, backward)


@pytest.mark.parametrize(("combine", "share"), [("sum", 1.0), ("mean", 1.0), ("lookup", 1.0), ("max", 4.0), ("any", 1.0)])
def test_sums_and_their_adjoints(combine: str, share: float) -> None:
    dimensions = DIMENSIONS[0]
    graph, axes = world(dimensions, {"batch": ROWS, "a": 3, "b": 4, "c": 2}, Role("contracted", combine))
    shards = (Shard("a", (2, 1)), Shard("b", (3, 1)))
    whole = Bridge("x", None, None, is_sum=True, combine=combine)
    assert summed_size(whole, graph, axes) == ("x", share)
    assert bridge_bytes(whole, graph, axes, shards, ROWS)[0] == (4 * 36 * share, 0)
    scattered = Bridge("x", None, "b", is_sum=True, combine=combine)
    assert bridge_bytes(scattered, graph, axes, shards, ROWS)[1] == (4 * 9 * share, 4 * 27)


@pytest.mark.parametrize(("target", "weight", "share"), [("int64", (), 3.0), ("int64", ("float32",), 2.0), ("float32", (), 1.0)])
def test_a_weighted_mean_sums_its_weight(target: str, weight: tuple[str, ...], share: float) -> None:
    dtypes = ("float32", target, *weight)
    inputs = tuple(Op(f"i{index}", "input", f"i{index}", outputs=(TensorSpec((3,), dtype, (1,)),)) for index, dtype in enumerate(dtypes))
    loss = Op("x", "call", "aten.some.default", tuple(Ref(op.name) for op in inputs), outputs=(TensorSpec((), "float32", ()),))
    bridge = Bridge("x", None, None, is_sum=True, combine="weighted_mean")
    assert summed_size(bridge, ModelGraph((*inputs, loss), (), PLANNED), Axes((), MappingProxyType({}), {}, ())) == ("x", share)
