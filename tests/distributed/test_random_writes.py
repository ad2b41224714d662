"""Random models that write, on two replicas of unlike rows: on every rank they equal the plain loop, or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import whale
from tests import reference
from tests.captures import captured_once
from tests.distributed.training import largest_of, make_cluster
from tests.distributed.world import World
from tests.random_writes import NEEDS_WHOLE_BATCH, STEPS, Random
from tests.written_models import make_batch, squares
from whale.errors import PlanError

OPTIMIZER = partial(torch.optim.SGD, lr=0.05, weight_decay=0.1)
ROWS = (8, 9, 7)
SEEDS = (0, 1, 2, 6, 7, 11, 16, 17, 18, 20, 23, 24, 38, 48)
"""Of programs that torch can train: it refuses those that write what the backward pass still needs."""


def _build(names: tuple[str, ...]) -> tuple[Random, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    return Random(names), make_batch(ROWS[0], 0), squares


def _prepare(names: tuple[str, ...]) -> None:
    captured_once(_build, names)


def _program(seed: int) -> tuple[str, ...]:
    """Up to four steps, none of which writes a parameter: no capture takes that."""
    chosen = random.Random(seed)
    return tuple(chosen.choices(sorted(STEPS.keys() - {"clamped_parameter"}), k=chosen.randint(1, 4)))


def train(rank: int, num_ranks: int, names: tuple[str, ...], num_micro_batch: int) -> reference.Run | str:
    made = captured_once(_build, names)
    try:
        engine = whale.parallelize(
            made.model,
            loss=made.loss,
            optimizer=OPTIMIZER,
            batch=made.batch,
            config={"pipeline.num_micro_batch": num_micro_batch},
            cluster=make_cluster((3.0, 1.0)),
        )
    except PlanError as error:
        return str(error)
    try:
        losses = [float(engine.step(make_batch(ROWS[0], 0)))]
        gradients = reference.copy_of(engine.gradients())
        losses += [float(engine.step(make_batch(rows, seed))) for seed, rows in enumerate(ROWS[1:], start=1)]
        return reference.Run(losses, gradients, reference.copy_of(engine.state_dict() or {}))
    finally:
        engine.close()


@pytest.mark.parametrize("names", [_program(seed) for seed in SEEDS], ids=" ".join)
def test_replicas_of_unlike_rows_are_exact_or_refused(world: World, names: tuple[str, ...]) -> None:
    batches = [make_batch(rows, seed) for seed, rows in enumerate(ROWS)]
    expected = reference.train(Random(names), squares, batches, OPTIMIZER)
    world.prepare(_prepare, names)
    for num_micro_batch in (1, 2):
        found = world.run(train, names, num_micro_batch, num_ranks=2)
        runs = [run for run in found if isinstance(run, reference.Run)]
        if not runs:
            assert NEEDS_WHOLE_BATCH & set(names)
            assert all("cannot be written from a batch in" in text for text in found if isinstance(text, str))
            continue
        assert len(runs) == 2, "one rank refuses what the other trains"
        error, where = largest_of(runs, expected)
        assert error < 1e-10, where
