"""Index sets against a plain enumeration, and parts of tensors that make the whole."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import at_most
from tests.parts import cut_out, local_indices, local_shape, put_in
from whale.axes import Axes, Axis, Concatenation, Dimension
from whale.ir.plan import Shard
from whale.runtime.program.shard.pieces import as_index
from whale.sharding.index_sets import IndexSpace, count, count_below, extent, index_set, intervals, merged
from whale.sharding.sharding import Region

SIZES = {"a": 2, "b": 3, "c": 5, "d": 4}


def factors(depth: int = 1) -> st.SearchStrategy[object]:
    names = st.sampled_from(sorted(SIZES))
    if not depth:
        return names
    pieces = st.lists(dimensions(depth - 1), min_size=2, max_size=3).map(lambda found: Concatenation(tuple(found)))
    return names | pieces


def dimensions(depth: int = 1) -> st.SearchStrategy[Dimension]:
    return st.lists(factors(depth), max_size=2 if depth < 1 else 3).map(tuple)


def enumerated(dimension: Dimension, held: dict[str, tuple[int, int]], folded: frozenset[str]) -> list[bool]:
    """Per position of a dimension, whether it is held."""
    per_factor = []
    for factor in dimension:
        if isinstance(factor, Concatenation):
            per_factor.append([flag for piece in factor.pieces for flag in enumerated(piece, held, folded)])
        else:
            start, stop = held.get(factor, (0, SIZES[factor]))
            size = SIZES[factor]
            units = [min(2 * place, 2 * (size - 1 - place) + 1) if factor in folded else place for place in range(size)]
            per_factor.append([start <= unit < stop for unit in units])
    return [all(flags) for flags in product(*per_factor)]


FOLDED = st.frozensets(st.sampled_from(sorted(SIZES)))


@given(dimensions(), st.dictionaries(st.sampled_from(sorted(SIZES)), st.tuples(st.integers(0, 5), st.integers(0, 5))), FOLDED)
def test_index_sets_hold_what_the_product_holds(dimension: Dimension, drawn: dict[str, tuple[int, int]], folded: frozenset[str]) -> None:
    held = {axis: (min(a, b, SIZES[axis]), min(max(a, b), SIZES[axis])) for axis, (a, b) in drawn.items()}
    flags = enumerated(dimension, held, folded)
    runs = index_set(dimension, SIZES, held, folded)
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


@given(st.integers(1, 40), st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_parts_of_a_folded_axis_are_equal_work_under_a_causal_mask(size: int, ends: tuple[int, int]) -> None:
    for start, stop in pairwise((0, *sorted(min(end, size) for end in ends), size)):
        runs = index_set(("s",), {"s": size}, {"s": (start, stop)}, frozenset({"s"}))
        assert len(runs) < 3 and count(runs) == stop - start
        work = sum(place + 0.5 for first, last in runs for place in range(first, last))
        assert abs(work - (stop - start) * size / 2) <= size / 2, "by no more than half of the longest row"


@given(st.tuples(*[st.integers(0, 12)] * 4), FOLDED)
def test_positions_in_a_part_are_those_of_the_whole(bounds: tuple[int, ...], folded: frozenset[str]) -> None:
    first, start, stop, last = sorted(bounds)
    outer, inner = (Region.of({"s": ends}) for ends in ((first, last), (start, stop)))
    space = IndexSpace((("a", "s"),), {"s": 12, "a": 2}, frozenset({"s"}) if folded else frozenset())
    whole = torch.arange(24)
    (held,), (wanted,), (found,) = space.positions(outer), space.positions(inner), space.positions(inner, outer)
    assert torch.equal(whole[as_index(held)][as_index(found)], whole[as_index(wanted)])


@at_most(60)
@given(st.lists(dimensions(), max_size=3), st.sampled_from(["b", "c", "d"]), FOLDED, st.data())
def test_the_parts_of_all_positions_make_the_whole(shape: list[Dimension], axis: str, folded: frozenset[str], data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, SIZES[axis]), min_size=2, max_size=2)))
    shards = (Shard(axis, (ends[0], ends[1] - ends[0], SIZES[axis] - ends[1])),)
    sizes = [extent(dimension, SIZES) for dimension in shape]
    if torch.Size(sizes).numel() > 20_000:
        return
    axes = Axes(tuple(Axis(name, size, is_folded=name in folded) for name, size in SIZES.items()), {}, {}, ())
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    again = torch.full_like(whole, -1)
    crossing = [Dimension for dimension in shape if axis in str(dimension)]
    for position in range(3):
        part = cut_out(whole, shape, axes, shards, position)
        assert tuple(part.shape) == local_shape(shape, axes, shards, position)
        put_in(again, part, shape, axes, shards, position)
    if len(crossing) <= 1 and not any(isinstance(factor, Concatenation) for dimension in shape for factor in dimension):
        assert axis in [a for dimension in shape for a in dimension] or torch.equal(again, whole)
    for position in range(3):  # what was put in comes out
        part = cut_out(whole, shape, axes, shards, position)
        assert torch.equal(part, cut_out(again, shape, axes, shards, position))


def test_parts_of_a_fused_projection_are_combs() -> None:
    qkv = (Concatenation((("d", "a"), ("d",), ("d",))),)
    axes = Axes(tuple(Axis(name, size) for name, size in SIZES.items()), {}, {}, ())
    places = local_indices((qkv, ("b",)), axes, (Shard("d", (1, 3)),), 0)
    assert isinstance(places[0], Tensor) and places[0].tolist() == [0, 1, 8, 12]
    assert places[1] == slice(0, 3)
