"""Layouts: transfers give every device its region, each element once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from whale.ir.layout import Layout, Region, Transfer, transfers

LENGTHS = {"batch": 6, "heads": 4}
Element = tuple[int, int]


def elements(region: Region) -> Counter[Element]:
    """The elements of a region of a (batch, heads) tensor."""
    rows, heads = (range(*(region.interval(axis) or (0, length))) for axis, length in LENGTHS.items())
    return Counter(product(rows, heads))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A grid of cuts of both axes, uneven and maybe empty, with each region on one or several devices in any order."""
    grids = []
    for axis, length in LENGTHS.items():
        shards = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
        ends = [0, *shards, length]
        grids.append([((axis, a, b),) if shards else () for a, b in pairwise(ends)])
    regions = [Region(tuple(sorted(one + other))) for one, other in product(*grids)]
    copies = [region for region in regions for _ in range(draw(st.integers(1, 2)))]
    return Layout(tuple(draw(st.permutations(copies))))


@given(layouts(), layouts())
def test_transfers_deliver_every_element_exactly_once(source: Layout, target: Layout) -> None:
    received: list[Counter[Element]] = [Counter() for _ in target.regions]
    for transfer in transfers(source, target):
        content = elements(transfer.region)
        assert not content - elements(source.regions[transfer.source]), "a source sends only what it holds"
        received[transfer.target] += content
    assert received == [elements(region) for region in target.regions]


@given(layouts())
def test_what_a_device_has_it_takes_from_itself(layout: Layout) -> None:
    assert all(transfer.source == transfer.target for transfer in transfers(layout, layout))


@given(layouts(), layouts())
def test_order_is_by_target(source: Layout, target: Layout) -> None:
    found = transfers(source, target)
    assert [transfer.target for transfer in found] == sorted(transfer.target for transfer in found)


def test_the_picture_of_the_docstring() -> None:
    found = transfers(Layout.shard("batch", (5, 3)), Layout.shard("batch", (4, 4)))
    assert found == (
        Transfer(0, 0, Region((("batch", 0, 4),))),
        Transfer(0, 1, Region((("batch", 4, 5),))),
        Transfer(1, 1, Region((("batch", 5, 8),))),
    )


def test_whole_copies_spread_over_the_sources() -> None:
    assert [transfer.source for transfer in transfers(Layout.whole(2), Layout.whole(4))] == [0, 0, 1, 1]


@given(layouts(), layouts())
def test_intersection_is_of_elements(one: Layout, other: Layout) -> None:
    for a in one.regions:
        for b in other.regions:
            assert elements(a.intersect(b)) == elements(a) & elements(b)
            assert a.intersect(b).is_empty == (not elements(a) & elements(b))


def test_prints() -> None:
    assert str(Layout.shard("batch", (5, 3))) == "batch[0:5] | batch[5:8]"
    assert str(Layout(Layout.whole(1).regions, partial=True)) == "partial whole"
    assert Layout.shard("batch", (5, 3)).regions[1].interval("batch") == (5, 8)
    assert Region().interval("batch") is None
