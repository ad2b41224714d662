"""A rank that fails alone, in whatever way, is told on all others at once, with what it failed by."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.launched import python
from tests.distributed.test_bad_batches import captured_scopes, loss, make_batch
from tests.distributed.training import make_cluster
from tests.distributed.world import RankFailure, World
from whale.errors import ConfigError, RuntimeFault

AT_ONCE_SECONDS = 240.0
"""Far less than the limit of a wait, and far more than a busy machine takes."""
LIMIT_SECONDS = 600.0


class Stumbling(torch.optim.SGD):
    """Has no memory left in its second step on rank 1."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("out of memory\nwhile in a step")
        return super().step(closure)


class Falling(torch.autograd.Function):
    """Fails in the backward pass on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.whale_tests.fall(gradient)


@torch.library.custom_op("whale_tests::fall", mutates_args=())
def fall(x: Tensor) -> Tensor:
    if torch.distributed.get_rank() == 1:
        raise ValueError("no such kernel")
    return x.clone()


@fall.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Fragile(nn.Module):
    def __init__(self, num_stages: int) -> None:
        super().__init__()
        with whale.replicate(1, name="front"):
            self.front = nn.Linear(4, 8)
        with whale.replicate(1, name="back" if num_stages == 2 else "front"):
            self.back = nn.Linear(8, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.back(Falling.apply(self.front(input).tanh()))


def stumble(rank: int, num_ranks: int) -> list[str]:
    """What each rank is told; then again, since nothing can go on."""
    made = captured_scopes("none")
    engine = whale.parallelize(
        made.model,
        loss=loss,
        optimizer=partial(Stumbling, lr=0.1),
        batch=made.batch,
        config={"communication.timeout_seconds": LIMIT_SECONDS},
        cluster=make_cluster((1.0,) * num_ranks),
    )
    return [*_told(engine, 3), *_told(engine, 1)]


def fall_over(rank: int, num_ranks: int, num_stages: int) -> list[str]:
    engine = whale.parallelize(
        Fragile(num_stages),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=make_batch(8),
        config={"communication.timeout_seconds": LIMIT_SECONDS, "pipeline.num_micro_batch": 2},
        cluster=make_cluster((1.0,) * num_ranks),
    )
    return _told(engine, 3)


def _told(engine: whale.Engine, num_steps: int) -> list[str]:
    start = time.monotonic()
    with pytest.raises((RuntimeFault, RuntimeError, ValueError)) as caught:
        for _ in range(num_steps):
            engine.step(make_batch(8))
    assert time.monotonic() - start < AT_ONCE_SECONDS
    return [f"{type(caught.value).__name__}: {caught.value}"]


def test_one_that_runs_out_of_memory(world: World) -> None:
    said = world.run(stumble, num_ranks=3)
    assert said[1][0].startswith("OutOfMemoryError: out of memory")
    for told in (said[0][0], said[0][1], said[1][1], *said[-1]):
        if not told.startswith("OutOfMemoryError"):
            assert told.startswith("RuntimeFault: ") and "did not complete: rank 1 has failed: OutOfMemoryError: out of memory\n" in told, (
                told
            )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_one_that_fails_in_the_midst_of_messages(world: World, num_stages: int) -> None:
    said = world.run(fall_over, num_stages, num_ranks=2)
    assert said[1][0].startswith("ValueError: no such kernel")
    assert "did not complete: rank 1 has failed: ValueError: no such kernel" in said[0][0], said


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, word: Tensor) -> Tensor:
        return self.head(self.table(word))


def read_a_bad_sample(rank: int, num_ranks: int) -> list[str]:
    data = [{"word": torch.tensor(index), "label": torch.tensor(index % 3 if index < 7 else 5)} for index in range(8)]
    engine = whale.parallelize(
        Words(),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["label"]),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch={name: torch.stack([each[name] for each in data]) for name in data[0]},
        config={"communication.timeout_seconds": LIMIT_SECONDS},
        cluster=make_cluster((1.0,) * num_ranks),
    )
    (batch,) = engine.loader(data, global_batch_size=8)
    start = time.monotonic()
    with pytest.raises(RuntimeFault) as caught:
        engine.step(batch)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    return [str(caught.value)]


def test_one_that_reads_a_label_out_of_range(world: World) -> None:
    said = world.run(read_a_bad_sample, num_ranks=2)
    assert "on rows 4 to 7 of the batch: IndexError: Target 5 is out of bounds" in said[1][0] and "test_failing_alone.py" in said[1][0]
    assert "rank 1 has failed: OpFault: %cross_entropy" in said[0][0], said


class Wary(nn.Module):
    """Looks at what it is given before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("too large")
        h = self.first(x).relu()
        assert h.isfinite().all()
        return self.second(h)


def refuse_a_batch(rank: int, num_ranks: int, config: dict[str, Any]) -> str:
    batch = {"x": torch.rand(8, 4), "label": torch.arange(8) % 3}
    engine = whale.parallelize(
        Wary(),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["label"]),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=batch,
        config={"communication.timeout_seconds": LIMIT_SECONDS, **config},
        cluster=make_cluster((1.0,) * num_ranks),
    )
    engine.step(batch)
    bad = {**batch, "x": batch["x"].index_fill(0, torch.tensor([7]), 1000.0)}
    start = time.monotonic()
    with pytest.raises(RuntimeFault) as caught:
        engine.step(bad)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "finder"),
    [
        ({}, 1),
        ({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}, 0),
        ({"replicas": [{"split": 2}]}, None),
    ],
)
def test_a_batch_that_the_model_refuses(world: World, config: dict[str, Any], finder: int | None) -> None:
    said = world.run(refuse_a_batch, config, num_ranks=2)
    for rank, text in enumerate(said):
        assert "the model refuses this batch (ValueError: too large)" in text, said
        assert finder in (None, rank) or f"rank {finder} has failed: OpFault" in text, said


def settle(rank: int, num_ranks: int, odd: object) -> None:
    whale.parallelize(captured_scopes("none").model, loss=loss, batch=make_batch(8), config=odd if rank == 1 else {})


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"gradient.clip_norm": 1.0}, "settings differ between ranks (gradient.clip_norm: None on rank 0, 1.0 on rank 1)"),
        ({"gradient.clipnorm": 1.0}, "gradient.clipnorm"),
        ("no_such_recipe.yaml", "no_such_recipe.yaml"),
    ],
)
def test_settings_that_are_odd_on_one_rank(world: World, odd: object, said: str) -> None:
    with pytest.raises(RankFailure) as caught:
        world.run(settle, odd, num_ranks=2)
    assert all(isinstance(error, ConfigError) and said in error.message for error in caught.value.errors.values()), caught.value
    assert len(caught.value.errors) == 2


def agree(rank: int, num_ranks: int) -> int:
    config = {"replicas": [{"split": 2}]}
    engine = whale.parallelize(captured_scopes("none").model, loss=loss, batch=make_batch(8), config=config)
    return len(engine.plan.replicas)


def test_settings_of_replicas_are_compared(world: World) -> None:
    assert world.run(agree, num_ranks=2) == [1, 1]


def record_elsewhere(rank: int, num_ranks: int, folder: str) -> int:
    config = {"trace.directory": f"{folder}/of_host_{rank}"}
    return len(whale.parallelize(captured_scopes("none").model, loss=loss, batch=make_batch(8), config=config).plan.devices)


def test_hosts_may_write_the_folder_of_records_otherwise(world: World, tmp_path: Path) -> None:
    assert world.run(record_elsewhere, str(tmp_path), num_ranks=2) == [2, 2]


SCRIPT = """
import os, torch, whale
from torch import nn

class Data:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 13:
            raise KeyError("no label of sample 13")
        return {"input": torch.ones(4) * index, "target": torch.ones(1)}

torch.manual_seed(0)
batch = {"input": torch.randn(8, 4), "target": torch.randn(8, 1)}
loss = lambda output, batch: ((output - batch["target"]) ** 2).mean()
engine = whale.parallelize(nn.Linear(4, 1), loss=loss, batch=batch, config={"communication.timeout_seconds": 600.0})
for rows in engine.loader(Data(), global_batch_size=8):
    engine.step(rows)
"""


def test_a_script_that_ends_in_the_users_own_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python("-m", "whale", "run", "--ranks", "2", str(script))
    assert done.returncode == 1
    assert "KeyError: 'no label of sample 13'" in done.stderr
    assert "rank 1 did not complete: rank 1 has failed: KeyError: 'no label of sample 13'" in done.stderr, done.stderr
