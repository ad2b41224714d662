"""Slices of rows: cutting a tensor by rows and writing the pieces back gives the tensor, wherever its batch axis lies."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.division import intervals
from whale.ir.graph import TensorSpec
from whale.ir.plan import BatchAxis
from whale.runtime.execute.boundary import piece_shape, rows_slice, write_rows

SIZES = st.integers(1, 3)


@given(st.lists(SIZES, min_size=1, max_size=3), SIZES, SIZES, st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_pieces_put_together_are_the_whole(rest: list[int], outer: int, inner: int, rows: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(rest)))
    total = sum(rows)
    shape = (*rest[:dim], outer * total * inner, *rest[dim:])
    factors = tuple(outer * inner if d == dim else 0 for d in range(len(shape)))
    axis = BatchAxis(dim, outer, inner)
    whole = torch.randn(shape)
    written, added = torch.empty(shape), torch.zeros(shape)
    for start, stop in intervals(rows):
        piece = rows_slice(whole, axis, start, stop)
        assert tuple(piece.shape) == piece_shape(TensorSpec(shape, "float32", factors), axis, stop - start)
        write_rows(written, axis, start, piece)
        write_rows(added, axis, start, piece, add=True)
    assert torch.equal(written, whole) and torch.equal(added, whole)


def test_rows_inside_a_dimension_are_strided() -> None:
    """[outer 2, rows 3, inner 2] flattened: row 1 is elements 2, 3, 8, 9."""
    piece = rows_slice(torch.arange(12), BatchAxis(0, 2, 2), 1, 2)
    assert piece.tolist() == [2, 3, 8, 9]
