"""The pool of ranks itself: results come back in order, and faults are told, not waited for."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import RankFailure, World


def sum_of_ranks(rank: int, num_ranks: int, factor: float) -> tuple[int, float, int]:
    total = torch.tensor(rank * factor)
    dist.all_reduce(total)
    return rank, float(total), os.getpid()


def fail_on(rank: int, num_ranks: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def hang_on(rank: int, num_ranks: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(1000)


def die_on(rank: int, num_ranks: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(3)
    dist.barrier()


def unpicklable(rank: int, num_ranks: int) -> object:
    return lambda: rank


def test_results_in_rank_order_by_worlds_of_any_size(world: World) -> None:
    pids = set()
    for size in (4, 2, 1, 3, 4):
        results = world.run(sum_of_ranks, 2.0, num_ranks=size)
        assert [(rank, total) for rank, total, _ in results] == [(rank, size * (size - 1.0)) for rank in range(size)]
        pids |= {pid for _, _, pid in results}
    assert len(pids) == 4, "no new processes"


def test_an_exception_is_told_with_its_rank(world: World) -> None:
    with pytest.raises(RankFailure, match="rank 2 has had enough") as failure:
        world.run(fail_on, 2)
    assert isinstance(failure.value.errors[2], ValueError)
    assert "fail_on" in failure.value.texts[2]
    assert len(world.run(sum_of_ranks, 1.0)) == 4, "the world serves on"


def test_a_rank_that_hangs_is_named_and_ended(world: World) -> None:
    before = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1: not done after 3 s[\s\S]*hang_on"):
        world.run(hang_on, 1, num_ranks=2, timeout=3.0)
    assert time.monotonic() - before < 50
    assert len(world.run(sum_of_ranks, 1.0)) == 4


def test_a_rank_that_dies_is_named(world: World) -> None:
    with pytest.raises(RankFailure, match="rank 0: died with exit code 3"):
        world.run(die_on, 0, num_ranks=2)
    assert len(world.run(sum_of_ranks, 1.0)) == 4


def test_a_result_that_does_not_pickle(world: World) -> None:
    with pytest.raises(RankFailure, match="does not pickle"):
        world.run(unpicklable, num_ranks=1)
