"""What is random in a dataset is equal on all ranks that read a sample, or is an error on all of them."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import whale
from tests.distributed.test_bad_batches import Scopes, captured_scopes, loss
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError


class Augmented:
    """Samples with noise from all the global random numbers, or from one that nobody seeds."""

    def __init__(self, is_seeded: bool) -> None:
        self._own = None if is_seeded else random.SystemRandom()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = random.random() + float(np.random.rand()) if self._own is None else self._own.random()
        return {"input": torch.randn(4) + index + noise, "target": torch.ones(1) * noise}


class OfRank:
    """As many samples on each rank, but others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.full((4,), float(index + 100 * self._rank)), "target": torch.ones(1)}


def train(rank: int, num_ranks: int, scopes: Scopes, num_micro_batch: int, is_seeded: bool, is_own: bool = False) -> list[float] | str:
    """Losses of two epochs, or what is said."""
    made = captured_scopes(scopes)
    torch.manual_seed(rank)  # as scripts do that have nothing to share
    engine = whale.parallelize(
        made.model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        batch=made.batch,
        config={"pipeline.num_micro_batch": num_micro_batch},
        cluster=make_cluster((1.0, 1.0)),
    )
    loader = engine.loader(OfRank(rank) if is_own else Augmented(is_seeded), global_batch_size=8, shuffle=True)
    try:
        return [float(engine.step(batch)) for _ in range(2) for batch in loader]
    except BatchError as error:
        return error.message
    finally:
        engine.close()


LAYOUTS: dict[str, tuple[Scopes, int]] = {
    "two stages": ("two stages", 2),
    "split": ("split", 1),
    "rows, then a split": ("colocated", 1),
    "data parallel": ("none", 1),
}


def test_noise_is_equal_under_all_plans(world: World) -> None:
    found = [world.run(train, *layout, True, num_ranks=2) for layout in LAYOUTS.values()]
    for losses in (losses for each in found for losses in each):
        assert losses == pytest.approx(found[0][0], rel=1e-5)
    assert len(set(found[0][0])) == 4, "other noise in the second epoch"


@pytest.mark.parametrize("name", LAYOUTS)
def test_noise_that_nobody_seeds(world: World, name: str) -> None:
    for said in world.run(train, *LAYOUTS[name], False, num_ranks=2):
        if name == "data parallel":  # each sample is read by one rank
            assert len(said) == 4 and not isinstance(said, str)
        else:
            assert said == "ranks read different values for the same sample of the dataset"


def test_datasets_that_differ_between_ranks(world: World) -> None:
    """Each sample is read by one rank, but for the first of an epoch."""
    for said in world.run(train, *LAYOUTS["data parallel"], True, True, num_ranks=2):
        assert isinstance(said, str) and said.startswith("ranks step with different global batches (rank 0: epoch 0")
        assert "; rank 1: " in said and said.count(", first sample ") == 2
