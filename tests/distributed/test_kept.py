"""Captures that are kept on disk serve all ranks or none."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.world import World

BATCH = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)


def square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def train(rank: int, num_ranks: int, folders: tuple[Path, ...]) -> tuple[bool, list[float]]:
    """Whether this rank's capture was found on disk, and the losses."""
    os.environ["WHALE_RUNTIME_CAPTURE_CACHE"] = str(folders[rank])
    torch.manual_seed(0)
    engine = whale.parallelize(nn.Linear(4, 2).double(), loss=square, optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH)
    losses = [float(engine.step(BATCH))]
    was_found = engine.modes.train.is_unproven
    return was_found, [*losses, *(float(engine.step(BATCH)) for _ in range(2))]


@pytest.mark.parametrize(("others", "are_found"), [("one folder", [True, True]), ("an empty one", [False, False])])
def test_all_ranks_take_it_or_none(world: World, tmp_path: Path, others: str, are_found: list[bool]) -> None:
    one, empty = tmp_path / "one", tmp_path / "empty"
    first = world.run(train, (one, one), num_ranks=2)
    assert len(list(one.iterdir())) == 1
    again = world.run(train, (one, one if others == "one folder" else empty), num_ranks=2)
    assert [found for found, _ in again] == are_found
    assert [losses for _, losses in again] == [losses for _, losses in first]
