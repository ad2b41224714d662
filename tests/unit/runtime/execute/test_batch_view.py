"""Rows in hand are found by their global numbers, all of them or those that a rank picks to send ahead."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from whale.runtime.execute.batch import BatchView, merge

NUM_ROWS = 12


def intervals() -> st.SearchStrategy[list[tuple[int, int]]]:
    bounds = st.tuples(st.integers(0, NUM_ROWS), st.integers(0, NUM_ROWS)).map(sorted)
    return st.lists(bounds.map(tuple), min_size=1, max_size=4)


@given(intervals())
def test_what_is_picked_is_what_was_in_hand(wanted: list[tuple[int, int]]) -> None:
    leaves = {"x": torch.arange(NUM_ROWS * 2).view(NUM_ROWS, 2), "table": torch.arange(3), "unread": torch.arange(NUM_ROWS)}
    batch = BatchView(leaves, frozenset({"x", "unread"}), NUM_ROWS, ((0, NUM_ROWS),))
    rows, moved = merge(wanted), list[torch.Tensor]()

    def move(leaf: torch.Tensor) -> torch.Tensor:
        moved.append(leaf)
        return leaf.clone()

    if not rows:
        return
    picked = batch.picked(["x", "table"], rows, move)
    assert set(picked.leaves) == {"x", "table"} and len(moved) == 2
    assert len(picked.leaves["x"]) == sum(stop - start for start, stop in rows)
    for start, stop in (each for each in wanted if each[0] < each[1]):
        assert torch.equal(picked.rows("x", start, stop), batch.rows("x", start, stop))
    assert torch.equal(picked.rows("table", 0, 1), leaves["table"])
