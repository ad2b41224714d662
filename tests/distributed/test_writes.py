"""What forward writes, into buffers and through views, is what the plain loop's is under replicas, micro-batches and a split of rows."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

import whale
from tests import reference
from tests.captures import captured_once
from tests.distributed.training import largest_of, make_cluster
from tests.distributed.world import RankFailure, World
from tests.written_models import ACTIVATIONS, BUFFERS, build, make_batch

OPTIMIZER = partial(torch.optim.SGD, lr=0.05, weight_decay=0.01)
ROWS = (16, 17, 11)
UNEVEN = (3.0, 1.0)


def train(rank: int, num_ranks: int, name: str, config: dict[str, Any]) -> reference.Run:
    made = captured_once(build, name, ROWS[0])
    engine = whale.parallelize(
        made.model, loss=made.loss, optimizer=OPTIMIZER, batch=made.batch, config=config, cluster=make_cluster(UNEVEN[:num_ranks])
    )
    try:
        losses, gradients = [], {}
        for number, rows in enumerate(ROWS):
            losses.append(float(engine.step(make_batch(rows, number))))
            if number == 0:
                gradients = reference.copy_of(engine.gradients())
        return reference.Run(losses, gradients, reference.copy_of(engine.state_dict() or {}))
    finally:
        engine.close()


@pytest.mark.parametrize("name", [*BUFFERS, *ACTIVATIONS])
def test_uneven_replicas_with_micro_batches(world: World, name: str) -> None:
    model, _, loss = build(name, ROWS[0])
    expected = reference.train(copy.deepcopy(model), loss, [make_batch(rows, number) for number, rows in enumerate(ROWS)], OPTIMIZER)
    error, where = largest_of(world.run(train, name, {"pipeline.num_micro_batch": 2}, num_ranks=2), expected)
    assert error < 1e-10, where


def test_what_replicas_cannot_make_up_is_refused_on_every_rank(world: World) -> None:
    with pytest.raises(RankFailure) as caught:
        world.run(train, "variance", {}, num_ranks=2)
    assert len(caught.value.texts) == 2
    assert all(
        "cannot be written from a batch in 2 parts: it must hold sums or means over rows" in text for text in caught.value.texts.values()
    )
