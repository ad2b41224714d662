"""Lookups in parts of a table: the parts' answers add up to the whole answer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from whale.runtime.program.shard.pieces import localize
from whale.runtime.program.shard.slots import Slots
from whale.runtime.program.shard.tables import part_embedding, part_gather, part_index, part_index_select, part_one_hot
from whale.sharding.index_sets import Runs, merged

SIZE = 11


def owners() -> st.SearchStrategy[list[int]]:
    """Per row of the table, which of three parts has it: combs of any kind, empty parts included."""
    return st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE)


def runs_of(owner: list[int], part: int) -> Runs:
    return merged((place, place + 1) for place, name in enumerate(owner) if name == part)


def rows_of(owner: list[int], part: int) -> torch.Tensor:
    return torch.tensor([place for place, name in enumerate(owner) if name == part], dtype=torch.long)


@given(owners(), st.lists(st.integers(-SIZE, SIZE - 1), max_size=20))
def test_indices_are_found_where_they_are(owner: list[int], drawn: list[int]) -> None:
    indices = torch.tensor(drawn, dtype=torch.long)
    for part in range(3):
        local, held = localize(indices, runs_of(owner, part), SIZE)
        rows = rows_of(owner, part)
        assert held.tolist() == [owner[index] == part for index in drawn]
        assert rows[local[held]].tolist() == [index % SIZE for index in drawn if owner[index] == part]
        assert not local[~held].any()


@given(owners())
def test_answers_of_the_parts_add_up(owner: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(SIZE, 4, 3, generator=generator)
    indices = torch.randint(0, SIZE, (2, 5), generator=generator)
    parts = [(table[rows_of(owner, p)], runs_of(owner, p)) for p in range(3) if p in owner]
    assert torch.equal(sum(part_index(t, [indices], 0, 2, r, SIZE) for t, r in parts), table[indices])
    flat = indices.flatten()
    assert torch.equal(sum(part_index_select(t, 0, flat, r, SIZE) for t, r in parts), table.index_select(0, flat))
    places = torch.randint(0, SIZE, (6, 4, 3), generator=generator)
    assert torch.equal(sum(part_gather(t, 0, places, r, SIZE) for t, r in parts), table.gather(0, places))
    weights = [(t[..., 0].clone().requires_grad_(), r) for t, r in parts]
    whole = table[..., 0].clone().requires_grad_()
    made = sum(part_embedding(t, indices, 3, True, False, r, SIZE) for t, r in weights)
    right = torch.nn.functional.embedding(indices, whole, 3, scale_grad_by_freq=True)
    assert torch.equal(made, right)
    seed = torch.randn(right.shape, generator=generator)
    torch.autograd.backward([made, right], [seed, seed])
    for p, (weight, _) in zip((p for p in range(3) if p in owner), weights, strict=True):
        assert torch.allclose(weight.grad, whole.grad[rows_of(owner, p)])


def test_columns_of_one_hot_are_those_held() -> None:
    indices = torch.tensor([[0, 3], [6, 4]])
    whole = torch.nn.functional.one_hot(indices, 7)
    assert torch.equal(part_one_hot(indices, ((1, 2), (3, 5)), 7), whole[..., [1, 3, 4]])


def test_what_was_run_without_contents_leaves_nothing_behind() -> None:
    runs = ((0, 2), (4, 6))
    slots = Slots(0, 8, (runs, ((2, 4), (6, 8))), 0)
    with FakeTensorMode():
        localize(torch.tensor([1, 4]), runs, 8)
        slots.own(torch.zeros(8))
    local, held = localize(torch.tensor([1, 3, 4]), runs, 8)
    assert local.tolist() == [1, 0, 2] and held.tolist() == [True, False, True]
    assert slots.own(torch.arange(8)).tolist() == [0, 1, 4, 5]
