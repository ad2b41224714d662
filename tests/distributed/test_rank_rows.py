"""Batches of which each rank holds its own rows, one or none: the engine trains, evaluates and predicts as on the whole batch."""

from __future__ import annotations

from contextlib import redirect_stderr
from functools import partial
from io import StringIO

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.training import make_cluster
from tests.distributed.world import World

Batch = dict[str, Tensor]


def make_model(has_scopes: bool) -> nn.Module:
    torch.manual_seed(0)
    if not has_scopes:
        return nn.Linear(4, 1)
    with whale.replicate(1, name="front"):
        front = nn.Linear(4, 4)
    with whale.replicate(1, name="back"):
        back = nn.Linear(4, 1)
    return nn.Sequential(front, back)


def samples(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    return [{"input": torch.randn(4, generator=generator), "target": torch.randn(1, generator=generator)} for _ in range(count)]


def stack(rows: list[Batch]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in ("input", "target")}


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def run(rank: int, num_ranks: int, has_scopes: bool, size: int) -> tuple[list[float], list[Tensor], str]:
    """Losses of evaluation, which comes first, and outputs, batch by batch; and what standard error was told at the start."""
    with redirect_stderr(StringIO()) as told:
        engine = whale.parallelize(
            make_model(has_scopes),
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.0),
            batch=stack(samples(8)),
            cluster=make_cluster((1.0,) * num_ranks),
        )
    losses = [float(engine.evaluate(batch)) for batch in engine.loader(samples(7), global_batch_size=size, shuffle=False, drop_last=True)]
    outputs = [engine.predict(batch) for batch in engine.loader(samples(7), global_batch_size=size, shuffle=False, drop_last=True)]
    losses += [float(engine.step(batch)) for batch in engine.loader(samples(7), global_batch_size=size, shuffle=False, drop_last=True)]
    engine.close()
    return losses, outputs, told.getvalue()


@pytest.mark.parametrize(("has_scopes", "size"), [(True, 2), (False, 3)], ids=["an idle rank", "one row each"])
def test_evaluation_of_a_loaders_batches(world: World, has_scopes: bool, size: int) -> None:
    model, rows = make_model(has_scopes), samples(7)
    batches = [stack(rows[start : start + size]) for start in range(0, 7 - size + 1, size)]
    expected = [float(loss(model(batch["input"]), batch).detach()) for batch in batches]
    for rank, (losses, outputs, told) in enumerate(world.run(run, has_scopes, size, num_ranks=3)):
        assert ("whale: the plan uses 2 of 3 ranks; idle: rank 2\n" in told) is (has_scopes and rank == 0)
        assert losses == pytest.approx(expected * 2, rel=1e-5)
        assert all(torch.allclose(output, model(batch["input"])) for output, batch in zip(outputs, batches, strict=True))
