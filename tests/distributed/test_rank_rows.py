"""Batches of which each rank holds its own rows, one or none: the engine trains, evaluates and predicts as on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError

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


def none(batch: Batch) -> Batch:
    return batch


def one_replaced(batch: Batch) -> Batch:
    batch["input"] = batch["input"] + 1
    return batch


def all_replaced(batch: Batch) -> Batch:
    """As a script does that brings a batch to a device."""
    for name in batch:
        batch[name] = batch[name] + 1
    return batch


def made_anew(batch: Batch) -> Batch:
    return {"target": batch["target"], "input": batch["input"].float() * 2, "added": torch.zeros(len(batch["input"]))}


def run(rank: int, num_ranks: int, has_scopes: bool, size: int, change: Callable[[Batch], Batch]) -> tuple[list[float], list[Tensor], str]:
    """Losses of evaluation, which comes first, and outputs, batch by batch; and what standard error was told at the start."""
    with redirect_stderr(StringIO()) as told:
        engine = whale.parallelize(
            make_model(has_scopes),
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.0),
            batch=change(stack(samples(8))),
            cluster=make_cluster((1.0,) * num_ranks),
        )
    losses = [float(engine.evaluate(change(batch))) for batch in engine.loader(samples(7), global_batch_size=size, drop_last=True)]
    outputs = [engine.predict(change(batch)) for batch in engine.loader(samples(7), global_batch_size=size, drop_last=True)]
    losses += [float(engine.step(change(batch))) for batch in engine.loader(samples(7), global_batch_size=size, drop_last=True)]
    engine.close()
    return losses, outputs, told.getvalue()


@pytest.mark.parametrize(
    ("has_scopes", "size", "change"),
    [(True, 2, none), (False, 3, none), (False, 3, all_replaced), (False, 5, one_replaced), (False, 5, made_anew)],
    ids=["an idle rank", "one row each", "all replaced", "one replaced", "made anew"],
)
def test_evaluation_of_a_loaders_batches(world: World, has_scopes: bool, size: int, change: Callable[[Batch], Batch]) -> None:
    model, rows = make_model(has_scopes), samples(7)
    batches = [change(stack(rows[start : start + size])) for start in range(0, 7 - size + 1, size)]
    expected = [float(loss(model(batch["input"]), batch).detach()) for batch in batches]
    for rank, (losses, outputs, told) in enumerate(world.run(run, has_scopes, size, change, num_ranks=3)):
        assert ("whale: the plan uses 2 of 3 ranks; idle: rank 2\n" in told) is (has_scopes and rank == 0)
        assert losses == pytest.approx(expected * 2, rel=1e-5)
        assert all(torch.allclose(output, model(batch["input"])) for output, batch in zip(outputs, batches, strict=True))


def cut(batch: Batch) -> Batch:
    """Leaves the mapping as the loader knows it, with other tensors."""
    for name in batch:
        batch[name] = batch[name][:1]
    return batch


def mix_up(rank: int, num_ranks: int) -> tuple[dict[str, str], list[float]]:
    """What is said of batches that are mixed up, on one rank or on all; and the loss before and after that."""
    engine = whale.parallelize(
        make_model(has_scopes=False),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        batch=stack(samples(8)),
        cluster=make_cluster((1.0, 1.0)),
    )
    loader = engine.loader(samples(16), global_batch_size=8)
    (first, second), (again, _), epoch = loader, loader, iter(loader)
    third = next(epoch)
    losses = [float(engine.step(first))]
    others = {
        "left out": second if rank else first,
        "of an earlier epoch": again if rank else first,
        "all rows": stack(samples(16)[:8]) if rank else first,
        "of two": {"input": first["input"], "target": second["target"]} if rank else first,
        "cut": cut(third) if rank else third,
        "fewer": {"input": first["input"][:-1], "target": first["target"][:-1]},
        "unknown": {name: value.clone() for name, value in first.items()},
        "chosen": {name: value[torch.tensor([2, 0])] for name, value in first.items()},
    }
    said = {}
    for name, batch in others.items():
        for call in (engine.step, engine.evaluate):
            with pytest.raises(BatchError) as caught:
                call(batch)
            said[f"{name}, {call.__name__}"] = str(caught.value)
    losses += [float(engine.step(first)), float(engine.step(first))]
    with patch("whale.runtime.execute.agreement.on_host", lambda _: False):  # as on a GPU, where contents are compared in the first steps
        for _ in range(4):
            engine.step(first)
        with pytest.raises(BatchError, match="the batch differs between ranks"):
            engine.step(others["unknown"])
    engine.replan(config={"replicas": [{"devices": 1, "rows": 3}, {"devices": 1, "rows": 1}]})
    with pytest.raises(BatchError) as caught:
        engine.step(first)
    said["of another plan"] = str(caught.value)
    losses += [float(engine.step(next(iter(loader))))]
    said["unset"] = str([each.share for each in engine.replan(config={"replicas": None}).replicas])
    engine.close()
    return said, losses


def test_batches_that_are_mixed_up_are_told_and_the_engine_goes_on(world: World) -> None:
    batch = stack(samples(16)[:8])
    expected = float(loss(make_model(has_scopes=False)(batch["input"]), batch).detach())
    for rank, (said, losses) in enumerate(world.run(mix_up, num_ranks=2)):
        for call in ("step", "evaluate"):
            for name, other in SAID.items():
                assert other in said[f"{name}, {call}"], said
            for name, refusal in REFUSED.items():
                assert refusal in said[f"{name}, {call}"], said
                assert ("refused on rank 1: " in said[f"{name}, {call}"]) is (rank == 0)
        assert "of 8 rows it has 0:4, needed: 0:6" in said["of another plan"]
        assert said["unset"] == "[4, 4]"  # what fits the devices' speeds, as before `replicas` said 3 and 1
        assert losses == pytest.approx([expected] * 4, rel=1e-5)


SAID = {
    "left out": "; rank 1: epoch 0, row 8, samples 16, shuffle 0, seed 0, first sample ",
    "of an earlier epoch": "rank 1: epoch 1, row 0,",
    "all rows": "rank 1: no batch of engine.loader",
    "fewer": "the batch differs between ranks (input_1: rank 1 differs from rank 0; target: rank 1 differs from rank 0)",
    "unknown": "replace them inside the batch that the loader gave",
    "chosen": "has no tensor of the one that engine.loader gave (epoch 2, row 0,",
}
REFUSED = {
    "of two": "; batch['target']: epoch 0, row 8, samples 16, shuffle 0, seed 0, first sample ",
    "cut": "has 1 row now, not the 4 that it was made with",
}
