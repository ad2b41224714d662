"""Batches with fewer rows than replicas: those without rows compute nothing, and add nothing to sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError

Batch = dict[str, Tensor]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (3, {"pipeline.num_micro_batch": 2, "planning.search": "off"}),
    "pipelines": (4, {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "planning.search": "off"}),
    "sharded state": (3, {"memory.zero": 2, "planning.search": "off"}),
    "a split": (3, {"replicas": [{"split": 2, "rows": 3}, {"devices": 1, "rows": 1}], "planning.search": "off"}),
    "sharded weights": (2, {"memory.zero": 3, "planning.search": "off"}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch_of(num_rows: int) -> Batch:
    generator = torch.Generator().manual_seed(num_rows)
    return {"input": torch.randn(num_rows, 4, generator=generator), "target": torch.randint(3, (num_rows, 1), generator=generator).float()}


def loss(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    """A mean weighted by the batch, and a metric that is a plain sum."""
    weights = 1 + batch["target"]
    return {"loss": ((output - batch["target"]).square() * weights).sum() / weights.sum(), "total": output.sum()}


def evaluate(rank: int, num_ranks: int, config: dict[str, Any]) -> list[Any]:
    engine = whale.parallelize(
        model(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.0), batch=batch_of(8), config=config,
        cluster=make_cluster((1.0,) * num_ranks),
    )  # fmt: skip
    found: list[Any] = []
    for num_rows in (5, 1, 2, 1):
        batch = batch_of(num_rows)
        value, output = engine.evaluate(batch, outputs=True)
        own, rows = engine.predict(batch, gather=False)
        found.append(
            (float(engine.evaluate(batch)), float(value), float(engine.metrics["total"]), output, engine.predict(batch), own, rows)
        )
    found.append(float(engine.step(batch_of(8))))
    engine.close()
    return found


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "sharded weights"])
def test_few_rows_are_those_of_the_first_replicas(world: World, name: str) -> None:
    num_ranks, config = CONFIGS[name]
    on_ranks = world.run(evaluate, config, num_ranks=num_ranks)
    for index, num_rows in enumerate((5, 1, 2, 1)):
        batch = batch_of(num_rows)
        output = model()(batch["input"]).detach()
        expected = {key: float(value) for key, value in loss(output, batch).items()}
        for found in on_ranks:
            first, second, total, both, predicted, own, rows = found[index]
            assert first == pytest.approx(expected["loss"], rel=1e-5) and second == first
            assert total == pytest.approx(expected["total"], rel=1e-5, abs=1e-6)
            torch.testing.assert_close(both, output)
            torch.testing.assert_close(predicted, output)
            torch.testing.assert_close(own, output[rows])
        assert sorted(row for found in on_ranks for row in found[index][6].tolist()) == list(range(num_rows))
    whole = float(loss(model()(batch_of(8)["input"]), batch_of(8))["loss"].detach())
    assert [found[-1] for found in on_ranks] == pytest.approx([whole] * num_ranks, rel=1e-5)


def ragged(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    """Padded to the longest row."""
    inputs, targets = zip(*samples, strict=True)
    return {"input": nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), "target": torch.stack(targets)}


def of_loader() -> list[tuple[Tensor, Tensor]]:
    """Nine samples of other lengths, in batches of four: one is left."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1 + number % 3, 4, generator=generator), torch.ones(1) * (number % 2)) for number in range(9)]


def long_loss(output: Tensor, batch: Batch) -> Tensor:
    return (output.sum(1) - batch["target"]).square().mean()


def load(rank: int, num_ranks: int, config: dict[str, Any]) -> tuple[list[float], Batch]:
    samples = of_loader()
    engine = whale.parallelize(
        model(), loss=long_loss, optimizer=SGD, batch=ragged(samples[:4]), config=config, cluster=make_cluster((1.0,) * num_ranks)
    )
    loader = engine.loader(samples, global_batch_size=4, collate=ragged, whole_batches=True)
    found = [float(engine.step(batch)) for _ in range(2) for batch in loader]
    found += [float(engine.evaluate(batch)) for batch in loader]
    state = engine.state_dict() or {}
    engine.close()
    return found, state


@pytest.mark.parametrize("name", ["replicas", "pipelines"])
def test_the_last_row_of_a_loader_is_trained_by_the_first_replica(world: World, name: str) -> None:
    num_ranks, config = CONFIGS[name][0], CONFIGS[name][1] | {"pipeline.num_micro_batch": 1}
    plain, samples = model(), of_loader()
    batches = [ragged(samples[start : start + 4]) for start in (0, 4, 8)]
    optimizer, expected = SGD(plain.parameters()), []
    for batch in [*batches, *batches]:
        optimizer.zero_grad()
        value = long_loss(plain(batch["input"]), batch)
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    expected += [float(long_loss(plain(batch["input"]), batch).detach()) for batch in batches]
    for found, state in world.run(load, config, num_ranks=num_ranks):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """Counts its calls, keeps a mean and a sum over rows, and a table that is read sparsely."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.table = model(), nn.Embedding(5, 4, sparse=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex64))

    def forward(self, input: Tensor, ids: Tensor) -> Tensor:
        self.calls.add_(1)
        self.turn.mul_(1j)
        self.load.mul_(0.9).add_(input.mean(0), alpha=0.1)
        self.seen.add_(input.sum(0))
        return self.layers(input + self.table(ids))


def counting() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    return Counting(), [{**batch_of(num_rows), "ids": torch.arange(num_rows) % 5} for num_rows in (8, 1, 5, 2, 1, 8)]


def count(rank: int, num_ranks: int, config: dict[str, Any]) -> tuple[list[float], Batch]:
    made, batches = counting()
    engine = whale.parallelize(made, loss=loss, optimizer=SGD, batch=batches[0], config=config, cluster=make_cluster((1.0,) * num_ranks))
    found = [float(engine.step(batch)) for batch in batches]
    engine.forward_backward(batches[2])
    engine.forward_backward(batches[1])
    engine.update(scale=0.5)
    engine.step(batches[0])
    state = engine.state_dict() or {}
    kept = {name: own for name, own in engine.tensors.items() if own.shape == state[name].shape}
    torch.testing.assert_close({name: own.detach() for name, own in kept.items()}, {name: state[name] for name in kept})
    engine.close()
    return found, state


def test_what_training_writes_is_equal_where_replicas_had_no_rows(world: World) -> None:
    plain, batches = counting()
    optimizer, expected = SGD(plain.parameters()), []
    for group in (*([each] for each in batches), [batches[2], batches[1]], [batches[0]]):
        optimizer.zero_grad()
        for batch in group:
            value = loss(plain(batch["input"], batch["ids"]), batch)["loss"]
            (value / len(group)).backward()
            expected.append(float(value.detach()))
        optimizer.step()
    for config, num_ranks in (({"planning.search": "off"}, 3), ({"pipeline.num_stages": 2, "planning.search": "off"}, 4)):
        for found, state in world.run(count, config, num_ranks=num_ranks):
            assert found == pytest.approx(expected[: len(found)], rel=1e-5)
            torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def refuse(rank: int, num_ranks: int) -> list[str]:
    engine = whale.parallelize(
        model(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.0), batch=batch_of(8), config=CONFIGS["sharded weights"][1]
    )
    said = []
    for call in (engine.evaluate, engine.predict, engine.step):
        with pytest.raises(BatchError) as caught:
            call(batch_of(1))
        said.append(str(caught.value))
        engine.evaluate(batch_of(8))
    engine.close()
    return said


def test_replicas_that_gather_weights_together_all_need_rows(world: World) -> None:
    for said in world.run(refuse, num_ranks=2):
        assert all(
            "the batch has 1 row, fewer than the plan needs: one for each of 2 replicas of 1 micro-batch each" in text for text in said
        )
