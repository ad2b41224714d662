"""The ranks themselves: results come back in order, what is prepared is at hand, and faults are told, not waited for."""

from __future__ import annotations

import os
import time
from functools import cache

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
    """The others fail, once the culprit is at it."""
    dist.barrier()
    if rank == culprit:
        time.sleep(1000)
    raise ValueError("waited enough")


def hang() -> None:
    time.sleep(1000)


def die_on(rank: int, num_ranks: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(3)
    dist.barrier()


@cache
def source_of() -> int:
    """The process that prepares it."""
    return os.getpid()


def ask_for_source(rank: int, num_ranks: int) -> int:
    return source_of()


def fail_to_prepare() -> None:
    raise LookupError("there is nothing")


def unpicklable(rank: int, num_ranks: int) -> object:
    return lambda: rank


def test_results_in_rank_order_by_worlds_of_any_size(world: World) -> None:
    pids: list[int] = []
    for size in (4, 2, 1, 3, 8):
        results = world.run(sum_of_ranks, 2.0, num_ranks=size)
        assert [(rank, total) for rank, total, _ in results] == [(rank, size * (size - 1.0)) for rank in range(size)]
        pids += [pid for _, _, pid in results]
    assert len(set(pids)) == len(pids), "each rank is a process of its own"


def test_an_exception_is_told_with_its_rank(world: World) -> None:
    with pytest.raises(RankFailure, match="rank 2 has had enough") as failure:
        world.run(fail_on, 2)
    assert isinstance(failure.value.errors[2], ValueError)
    assert "fail_on" in failure.value.texts[2]
    assert len(world.run(sum_of_ranks, 1.0)) == 4, "the world serves on"


def test_a_rank_that_hangs_is_named_and_ended() -> None:
    with World(2, peers=0.5) as world:
        with pytest.raises(RankFailure, match=r"rank 1: not done 0.5 s after another rank failed, at[\s\S]*hang_on"):
            world.run(hang_on, 1)
        assert len(world.run(sum_of_ranks, 1.0)) == 2


def test_ranks_that_take_too_long_are_named_and_ended(world: World) -> None:
    with pytest.raises(RankFailure, match="rank 0: not done after 0 s"):
        world.run(hang_on, 0, num_ranks=1, timeout=0.0)


def test_a_rank_that_dies_is_named(world: World) -> None:
    with pytest.raises(RankFailure, match="rank 0: died with exit code 3"):
        world.run(die_on, 0, num_ranks=2)
    assert len(world.run(sum_of_ranks, 1.0)) == 4


def test_a_result_that_does_not_pickle(world: World) -> None:
    with pytest.raises(RankFailure, match="does not pickle"):
        world.run(unpicklable, num_ranks=1)


def test_what_is_prepared_is_at_hand_on_all_ranks(world: World) -> None:
    source = world.prepare(source_of)
    assert world.run(ask_for_source) == [source] * 4
    assert source != os.getpid()


def test_an_exception_in_preparing_is_raised(world: World) -> None:
    with pytest.raises(LookupError, match="there is nothing"):
        world.prepare(fail_to_prepare)
    with pytest.raises(RankFailure, match="does not pickle"):
        world.prepare(unpicklable, 0, 1)


def test_a_source_that_hangs_or_dies_is_replaced() -> None:
    with World(2, grace=0.1) as world:
        with pytest.raises(RankFailure, match="no answer within 0 s"):
            world.prepare(hang, timeout=0.0)
        with pytest.raises(RankFailure, match="died with exit code 3"):
            world.prepare(die_on, 0, 1, 0)
        assert world.prepare(source_of) != os.getpid()
