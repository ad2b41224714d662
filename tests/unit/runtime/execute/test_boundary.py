"""What crosses stages: rows wherever the batch axis lies, parts between groups of unlike sizes, gradients as sums of groups."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.division import intervals
from whale.ir.graph import TensorSpec
from whale.ir.plan import BATCH, BatchAxis, Shard, Stage, VirtualDevice
from whale.runtime.program.shard.pieces import as_index, part, write_part
from whale.sharding import IndexSpace, Region, moves, reshard
from whale.sharding.crossings import border_gradient, border_sharding, row_space

SIZES = st.integers(1, 3)


def rows(start: int, stop: int) -> Region:
    return Region(((BATCH, start, stop),))


@given(st.lists(SIZES, min_size=1, max_size=3), SIZES, SIZES, st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_pieces_put_together_are_the_whole(rest: list[int], outer: int, inner: int, sizes: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(rest)))
    total = sum(sizes)
    shape = (*rest[:dim], outer * total * inner, *rest[dim:])
    factors = tuple(outer * inner if d == dim else 0 for d in range(len(shape)))
    space = row_space(TensorSpec(shape, "float32", factors), BatchAxis(dim, outer, inner), total)
    whole = torch.randn(shape)
    written, added = torch.empty(shape), torch.zeros(shape)
    for start, stop in intervals(sizes):
        index = tuple(map(as_index, space.positions(rows(start, stop))))
        piece = part(whole, index)
        assert tuple(piece.shape) == space.shape(rows(start, stop))
        write_part(written, index, piece)
        write_part(added, index, piece, add=True)
        within = space.positions(rows(start, start + 1), rows(start, stop))
        assert torch.equal(
            part(piece, tuple(map(as_index, within))), part(whole, tuple(map(as_index, space.positions(rows(start, start + 1)))))
        )
    assert torch.equal(written, whole) and torch.equal(added, whole)


def test_rows_inside_a_dimension_are_strided() -> None:
    """[outer 2, rows 3, inner 2] flattened: row 1 is elements 2, 3, 8, 9."""
    space = row_space(TensorSpec((12,), "int64", (4,)), BatchAxis(0, 2, 2), 3)
    assert space.positions(rows(1, 2)) == (((2, 4), (8, 10)),)


def stage(index: int, sizes: tuple[int, ...], shares: tuple[int, ...], *, parts: bool) -> Stage:
    """A stage of groups of as many devices as there are sizes, which has `x` whole or in parts of width."""
    names = tuple(f"{index}/{number}" for number in range(len(sizes) * len(shares)))
    shard = Shard("width", sizes, handed_on=("x",)) if parts else Shard("width", sizes)
    return Stage(index, ("t",), (), VirtualDevice(names), shares, (), (), len(sizes), (shard,))


def arriving(source: Stage, target: Stage, num_rows: int) -> dict[int, int]:
    """Elements of x [rows, width 6] that each device of the target receives."""
    mesh = range(len(source.virtual_device.devices))
    others = range(len(mesh), len(mesh) + len(target.virtual_device.devices))
    steps = reshard(border_sharding(source, mesh, "x", num_rows), border_sharding(target, others, "x", num_rows))
    space = IndexSpace(((BATCH,), ("width",)), {BATCH: num_rows, "width": 6})
    found = dict.fromkeys(others, 0)
    for step in steps:
        for (_, device), count in step.elements(space).items():
            found[device] += count
    return found


def test_groups_of_unlike_sizes_exchange_parts() -> None:
    two, three = stage(0, (4, 2), (1,), parts=True), stage(1, (3, 2, 1), (1,), parts=True)
    assert arriving(two, three, 5) == {2: 15, 3: 10, 4: 5}
    assert arriving(stage(0, (4, 2), (1,), parts=False), three, 5) == {2: 15, 3: 10, 4: 5}
    assert arriving(two, stage(1, (3, 3), (2, 3), parts=True), 5) == {2: 6, 3: 6, 4: 9, 5: 9}


def test_gradients_of_what_has_no_rows_stay_terms_of_their_groups() -> None:
    source, target = stage(0, (4, 2), (1, 1), parts=False), stage(1, (3, 3), (1, 1, 1), parts=False)
    gradient = border_gradient(target, range(4, 10), "x", None)
    assert gradient.terms == (0, 0, 1, 1, 2, 2)
    found = moves(gradient, border_gradient(source, range(4), "x", None))
    assert [(move.source, move.target) for move in found] == [(4, 0), (6, 0), (5, 1), (7, 1), (8, 2), (9, 3)]
