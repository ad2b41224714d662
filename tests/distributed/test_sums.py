"""Sums of two and of three ranks, small and large: in place, equal on all ranks to the last bit, several on their way at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import PATIENCE_SECONDS
from tests.distributed.world import World as Ranks
from whale.comm import Waits, start_sum, start_sum_into
from whale.comm.groups import SMALL_BYTES

SIZES = (0, 1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1)


def own(rank: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    return [torch.rand(size, generator=drawn) for size in SIZES] + [torch.full((2, 3), rank + 1, dtype=torch.uint8)]


def sums(rank: int, num_ranks: int) -> list[torch.Tensor]:
    assert dist.group.WORLD is not None
    tensors, waits = own(rank), Waits(timedelta(seconds=PATIENCE_SECONDS))
    started = [start_sum(tensor, dist.group.WORLD) for tensor in tensors]
    for launched in reversed(started):
        waits.wait(launched, "a sum", ())
    return tensors


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_are_in_place_and_equal_on_all_ranks(world: Ranks, num_ranks: int) -> None:
    first, *others = world.run(sums, num_ranks=num_ranks)
    expected = [torch.stack(each).sum(0) for each in zip(*map(own, range(num_ranks)), strict=True)]
    for total, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(total, wanted.to(total.dtype))
    for other in others:
        assert all(map(torch.equal, first, other))


def sums_apart(rank: int, num_ranks: int) -> tuple[list[torch.Tensor], bool]:
    assert dist.group.WORLD is not None
    tensors, waits = [*own(rank), torch.full((2, 3), rank + 1.0).t()], Waits(timedelta(seconds=PATIENCE_SECONDS))
    before, totals = [tensor.clone() for tensor in tensors], [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    started = [start_sum_into(total, tensor, dist.group.WORLD) for total, tensor in zip(totals, tensors, strict=True)]
    for launched in reversed(started):
        waits.wait(launched, "a sum", ())
    return totals, all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_in_other_memory_are_equal_on_all_ranks_and_leave_what_they_are_of(world: Ranks, num_ranks: int) -> None:
    (first, is_left), *others = world.run(sums_apart, num_ranks=num_ranks)
    addends = [[*own(rank), torch.full((3, 2), rank + 1.0)] for rank in range(num_ranks)]
    expected = [torch.stack(each).sum(0) for each in zip(*addends, strict=True)]
    assert is_left
    for total, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(total, wanted.to(total.dtype))
    for other, is_left in others:
        assert is_left
        assert all(map(torch.equal, first, other))
