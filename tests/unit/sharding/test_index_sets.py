"""Index sets against a plain enumeration, and parts of tensors that make the whole."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import at_most
from tests.parts import cut_out, local_indices, local_shape, put_in
from whale.axes import Axes, Axis, Concatenation, Dimension
from whale.ir.plan import Shard
from whale.sharding.index_sets import count, count_below, extent, index_set, intervals, merged

SIZES = {"a": 2, "b": 3, "c": 5, "d": 4}


def factors(depth: int = 1) -> st.SearchStrategy[object]:
    names = st.sampled_from(sorted(SIZES))
    if not depth:
        return names
    pieces = st.lists(dimensions(depth - 1), min_size=2, max_size=3).map(lambda found: Concatenation(tuple(found)))
    return names | pieces


def dimensions(depth: int = 1) -> st.SearchStrategy[Dimension]:
    return st.lists(factors(depth), max_size=2 if depth < 1 else 3).map(tuple)


def enumerated(dimension: Dimension, held: dict[str, tuple[int, int]]) -> list[bool]:
    """Per position of a dimension, whether it is held."""
    per_factor = []
    for factor in dimension:
        if isinstance(factor, Concatenation):
            per_factor.append([flag for piece in factor.pieces for flag in enumerated(piece, held)])
        else:
            start, stop = held.get(factor, (0, SIZES[factor]))
            per_factor.append([start <= place < stop for place in range(SIZES[factor])])
    return [all(flags) for flags in product(*per_factor)]


@given(dimensions(), st.dictionaries(st.sampled_from(sorted(SIZES)), st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_index_sets_hold_what_the_product_holds(dimension: Dimension, drawn: dict[str, tuple[int, int]]) -> None:
    held = {axis: (min(a, b, SIZES[axis]), min(max(a, b), SIZES[axis])) for axis, (a, b) in drawn.items()}
    flags = enumerated(dimension, held)
    runs = index_set(dimension, SIZES, held)
    assert extent(dimension, SIZES) == len(flags)
    assert [place for start, stop in runs for place in range(start, stop)] == [place for place, flag in enumerate(flags) if flag]
    assert runs == merged(runs)
    assert count(runs) == sum(flags)
    for bound in range(0, len(flags) + 1, 1 + len(flags) // 20):
        assert count_below(runs, bound) == sum(flags[:bound])


def test_intervals_follow_each_other() -> None:
    shards = (Shard("c", (1, 3, 1)), Shard("a", (1, 0, 1)))
    assert [intervals(shards, position) for position in range(3)] == [
        {"c": (0, 1), "a": (0, 1)},
        {"c": (1, 4), "a": (1, 1)},
        {"c": (4, 5), "a": (1, 2)},
    ]


AXES = Axes(tuple(Axis(name, size) for name, size in SIZES.items()), {}, {}, ())


@at_most(60)
@given(st.lists(dimensions(), max_size=3), st.sampled_from(["b", "c", "d"]), st.data())
def test_the_parts_of_all_positions_make_the_whole(shape: list[Dimension], axis: str, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, SIZES[axis]), min_size=2, max_size=2)))
    shards = (Shard(axis, (ends[0], ends[1] - ends[0], SIZES[axis] - ends[1])),)
    sizes = [extent(dimension, SIZES) for dimension in shape]
    if torch.Size(sizes).numel() > 20_000:
        return
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    again = torch.full_like(whole, -1)
    crossing = [Dimension for dimension in shape if axis in str(dimension)]
    for position in range(3):
        part = cut_out(whole, shape, AXES, shards, position)
        assert tuple(part.shape) == local_shape(shape, AXES, shards, position)
        put_in(again, part, shape, AXES, shards, position)
    if len(crossing) <= 1 and not any(isinstance(factor, Concatenation) for dimension in shape for factor in dimension):
        assert axis in [a for dimension in shape for a in dimension] or torch.equal(again, whole)
    for position in range(3):  # what was put in comes out
        part = cut_out(whole, shape, AXES, shards, position)
        assert torch.equal(part, cut_out(again, shape, AXES, shards, position))


def test_parts_of_a_fused_projection_are_combs() -> None:
    qkv = (Concatenation((("d", "a"), ("d",), ("d",))),)
    places = local_indices((qkv, ("b",)), SIZES, (Shard("d", (1, 3)),), 0)
    assert isinstance(places[0], Tensor) and places[0].tolist() == [0, 1, 8, 12]
    assert places[1] == slice(0, 3)
