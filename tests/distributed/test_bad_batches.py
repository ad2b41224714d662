"""A batch that is bad on some ranks is refused on all of them, nothing has changed, and the next good one trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """How it is run: number of devices, scopes, rows of rank 1's bad batch (0: a part is missing; all 8: in another order)."""

    num_devices: int
    scopes: Scopes
    num_micro_batch: int
    bad_rows: int


Scopes = Literal["none", "two stages", "split", "colocated"]


def make_model(scopes: Scopes) -> nn.Module:
    torch.manual_seed(0)
    if scopes == "split":
        with whale.split(2):
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if scopes == "colocated":
        with whale.replicate(2):
            first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        with whale.split(2):
            last = nn.Linear(8, 1)
        return nn.Sequential(first, last)
    if scopes == "none":
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with whale.replicate(1, name="front"):
        front = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    with whale.replicate(1, name="back"):
        back = nn.Linear(8, 1)
    return nn.Sequential(front, back)


def make_batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {"input": torch.randn(8, 4, generator=generator)[:rows], "target": torch.randn(8, 1, generator=generator)[:rows]}


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def captured_scopes(scopes: Scopes) -> Captured:
    made = captured_once(_built, scopes)
    made.capture("eval")
    return made


def _built(scopes: Scopes) -> tuple[nn.Module, Batch, Any]:
    return make_model(scopes), make_batch(8), loss


def _prepare(scopes: Scopes) -> None:
    captured_scopes(scopes)


def bad_batch(rank: int, case: Case) -> Batch:
    if rank != 1:
        return make_batch(8)
    if case.bad_rows == 8:  # as an unseeded shuffling DataLoader gives it
        return {"input": make_batch(8)["input"], "target": make_batch(8)["target"].flip(0)}
    return make_batch(case.bad_rows) if case.bad_rows else {"input": make_batch(8)["input"]}


def refuse_and_go_on(rank: int, num_ranks: int, case: Case) -> tuple[list[str], list[float], bool]:
    """What was said about the bad batches, then the losses of good ones, and whether the bad ones changed anything."""
    made = captured_scopes(case.scopes)
    engine = whale.parallelize(
        made.model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        batch=made.batch,
        config={"pipeline.num_micro_batch": case.num_micro_batch},
        cluster=make_cluster((1.0,) * case.num_devices),
    )
    losses, said = [float(engine.step(make_batch(8)))], []
    before = engine.state_dict()
    engine.evaluate(make_batch(8))
    for action in (engine.step, engine.step, engine.evaluate):
        with pytest.raises(BatchError) as caught:
            action(bad_batch(rank, case))
        said.append(caught.value.message)
    after = engine.state_dict()
    assert before is not None and after is not None
    is_kept = engine.step_number == 1 and all(torch.equal(value, after[name]) for name, value in before.items())
    losses += [float(engine.step(make_batch(8))), float(engine.evaluate(make_batch(8)))]
    engine.close()
    return said, losses, is_kept


CASES = {
    "pipeline": Case(2, "two stages", 1, 6),
    "data parallel": Case(2, "none", 1, 6),
    "accumulation": Case(2, "none", 2, 6),
    "a part is missing": Case(2, "two stages", 2, 0),
    "a part is missing, data parallel": Case(2, "none", 1, 0),
    "too small on one rank": Case(2, "two stages", 4, 2),
    "split": Case(2, "split", 1, 6),
    "split behind rows": Case(2, "colocated", 1, 6),
    "split, accumulation": Case(2, "split", 2, 6),
    "a part is missing, split": Case(2, "split", 1, 0),
    "other contents, pipeline": Case(2, "two stages", 2, 8),
    "other contents, data parallel": Case(2, "none", 1, 8),
    "other contents, split": Case(2, "split", 1, 8),
    "an idle rank": Case(2, "none", 1, 6),
    "an idle rank of a pipeline": Case(3, "two stages", 2, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_that_is_bad_on_one_rank(world: World, name: str) -> None:
    case = CASES[name]
    expected = train_alone()
    world.prepare(_prepare, case.scopes)
    for rank, (said, losses, is_kept) in enumerate(world.run(refuse_and_go_on, case, num_ranks=3 if "idle" in name else 2)):
        if case.bad_rows == 8:
            assert said == ["the batch differs between ranks (target: rank 1 differs from rank 0)"] * 3
        elif case.bad_rows:
            average = r"the number of rows differs between ranks"
            assert all(message.startswith(average) for message in said), said
        else:
            assert all("batch['target']" in message for message in said), said
            assert all(message.startswith("the batch was refused on rank 1: ") == (rank != 1) for message in said), said
        assert is_kept
        assert losses == pytest.approx(expected, rel=1e-5)


def train_alone() -> list[float]:
    model, batch = make_model("none"), make_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        value = loss(model(batch["input"]), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return [*losses, float(loss(model(batch["input"]), batch).detach())]


def refuse_with_statistics(rank: int, num_ranks: int) -> tuple[bool, int]:
    torch.manual_seed(0)
    engine = whale.parallelize(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=make_batch(8),
        cluster=make_cluster((1.0,) * num_ranks),
    )
    engine.step(make_batch(8))
    before = {name: value.clone() for name, value in engine.tensors.items()}
    bad = {name: value.flip(0) for name, value in make_batch(8).items()}
    with pytest.raises(BatchError):
        engine.step(bad if rank else make_batch(8))
    is_same = all(torch.equal(value, before[name]) for name, value in engine.tensors.items())
    engine.step(make_batch(8))
    counted = int(engine.tensors["1.num_batches_tracked"])
    engine.close()
    return is_same, counted


def test_a_refused_batch_moves_no_running_statistics(world: World) -> None:
    assert world.run(refuse_with_statistics, num_ranks=2) == [(True, 2)] * 2
