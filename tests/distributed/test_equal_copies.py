"""Ranks that hold unlike weights of one parameter, or step by unlike settings, are told so; what differs by design is not taken for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import RuntimeFault

Batch = dict[str, Tensor]
ADAM = partial(torch.optim.AdamW, lr=0.1)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "pipeline":
        with whale.replicate(1):
            first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        with whale.replicate(1):
            return nn.Sequential(first, nn.Linear(8, 1))
    with whale.split(2) if kind == "split" else whale.replicate(1):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if kind == "replicas" else nn.Tanh(), nn.Linear(8, 1))


def make_batch(length: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1)
    sizes = (8, length, 4) if length else (8, 4)
    return {"input": torch.randn(sizes, generator=generator), "target": torch.randn((*sizes[:-1], 1), generator=generator)}


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def captured(kind: str, length: int) -> Captured:
    return captured_once(_built, kind, length)


def _built(kind: str, length: int) -> tuple[nn.Module, Batch, Any]:
    return make_model(kind), make_batch(length), loss


def _prepare(kind: str, length: int = 0) -> None:
    captured(kind, length)


def make_engine(kind: str, num_ranks: int, optimizer: Any = ADAM, scheduler: Any = None, length: int = 0) -> whale.Engine:
    made, cluster = captured(kind, length), make_cluster((1.0, 2.0, 1.0, 1.0)[:num_ranks])
    return whale.parallelize(made.model, loss=loss, optimizer=optimizer, scheduler=scheduler, batch=made.batch, cluster=cluster)


def lower_rate(engine: whale.Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] = 0.05


def add_to_weights(engine: whale.Engine) -> None:
    with torch.no_grad():
        engine.parameters["2.bias"][0] += 0.5


def spoil_weights(engine: whale.Engine) -> None:
    with torch.no_grad():
        engine.parameters["0.weight"][0, 1] = float("nan")


def said(engine: whale.Engine, batch: Batch) -> tuple[str, str]:
    with pytest.raises(RuntimeFault) as caught:
        engine.step(batch)
    return caught.value.message, str(caught.value.hint)


Change = tuple[int, Callable[[whale.Engine], None], int]
"""By which rank, what, and after how many steps."""


def change(rank: int, num_ranks: int, kind: str, changes: tuple[Change, ...]) -> list[str]:
    """What is said where one rank changes something; nothing has changed then, and once it is undone training goes on."""
    engine, batch, messages = make_engine(kind, num_ranks), make_batch(), []
    for who, act, num_steps in changes:
        while engine.step_number < num_steps:
            engine.step(batch)
        state, optimizer = engine.state_dict(), copy.deepcopy(engine.optimizer.state_dict() if engine.optimizer else {})
        if rank == who:
            act(engine)
        before = {name: value.clone() for name, value in engine.tensors.items()}
        message, hint = said(engine, batch)
        assert engine.step_number == num_steps and "on every rank" in hint
        for name, value in engine.tensors.items():
            torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=0, equal_nan=True)
        assert state is not None and engine.optimizer is not None
        engine.load_state_dict(state)
        engine.optimizer.load_state_dict(optimizer)
        messages.append(message)
    engine.step(batch)
    engine.close()
    return messages


SETTINGS = "optimizer settings differ between ranks"
WEIGHTS = "weights differ between ranks that hold them"
CHANGES: dict[str, tuple[int, tuple[Change, ...], list[str]]] = {
    "replicas": (
        3,
        ((0, lower_rate, 3), (0, add_to_weights, 4)),
        [rf"{SETTINGS} (lr of 0.weight: 0.05 on rank 0, 0.1 on ranks 1, 2)", f"{WEIGHTS} (2.bias: "],
    ),
    "split": (
        4,
        ((2, lower_rate, 0), (1, spoil_weights, 2)),
        [f"{SETTINGS} (lr of 0.weight: 0.1 on ranks 0, 1, 3, 0.05 on rank 2)", f"{WEIGHTS} (0.weight: nan on rank 1, "],
    ),
    "pipeline": (2, ((0, lower_rate, 1),), [f"{SETTINGS} (lr of parameter group 0: 0.05 on rank 0, 0.1 on rank 1)"]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_one_rank_does_alone(world: World, kind: str) -> None:
    num_ranks, changes, expected = CHANGES[kind]
    world.prepare(_prepare, kind)
    (messages, *others) = world.run(change, kind, changes, num_ranks=num_ranks)
    assert others == [messages] * (num_ranks - 1)
    for message, beginning in zip(messages, expected, strict=True):
        assert message.startswith(beginning), message
    if kind == "replicas":  # both values
        here, there = (float(each.split(" on ")[0]) for each in messages[1].removeprefix(expected[1]).split(", ")[:2])
        assert here == pytest.approx(there + 0.5, rel=1e-5) and messages[1].endswith("on ranks 1, 2)")


def resume(rank: int, num_ranks: int, path: str) -> tuple[str, str]:
    """What is said after a checkpoint of five steps was loaded and one rank changed its weights, in a step with a new capture."""
    engine = make_engine("plain", num_ranks, length=3)
    for _ in range(5):
        engine.step(make_batch(3))
    engine.save(Path(path))
    engine.load(Path(path))
    engine.step(make_batch(3))
    if rank == 1:
        add_to_weights(engine)
    weights, _ = said(engine, make_batch(5))
    engine.load(Path(path))
    if rank == 1:
        lower_rate(engine)
    settings, _ = said(engine, make_batch(5))
    engine.close()
    return weights, settings


def test_a_resumed_engine_compares_anew(world: World, tmp_path: Path) -> None:
    world.prepare(_prepare, "plain", 3)
    for weights, settings in world.run(resume, str(tmp_path / "checkpoint"), num_ranks=2):
        assert weights.startswith(f"{WEIGHTS} (2.bias: ")
        assert settings == f"{SETTINGS} (lr of 0.weight: 0.1 on rank 0, 0.05 on rank 1)"


def by_layer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A group for each parameter, with rates that follow from the names."""
    groups = [{"params": [parameter], "lr": 0.01 * (1 + name.count("0")), "betas": (0.9, 0.99)} for name, parameter in named]
    return torch.optim.Adam(groups)


def fade(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Groups that begin alike and go different ways."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [partial(_faded, sum(p.numel() for p in g["params"])) for g in optimizer.param_groups]
    )


def _faded(size: int, step: int) -> float:
    return 1.0 / (1 + step * size)


def round_otherwise(engine: whale.Engine) -> None:
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.mul_(1 + 2e-7)


def train_on(rank: int, num_ranks: int, kind: str) -> int:
    """Steps done with what differs between ranks by design: groups, buffers, parts, roundings, and settings that all change alike."""
    for optimizer, scheduler in ((by_layer, None), (ADAM, fade if kind == "pipeline" else None)):
        engine = make_engine(kind, num_ranks, optimizer, scheduler)
        for number in range(5):
            if rank == 0:
                round_otherwise(engine)
            if number == 3 and engine.optimizer is not None:
                for group in engine.optimizer.param_groups:
                    group["lr"] *= 0.5
            engine.step(make_batch())
    return engine.step_number


@pytest.mark.parametrize(("kind", "num_ranks"), [("replicas", 3), ("split", 4), ("pipeline", 2)])
def test_what_differs_by_design_is_let_pass(world: World, kind: str, num_ranks: int) -> None:
    world.prepare(_prepare, kind)
    assert world.run(train_on, kind, num_ranks=num_ranks) == [5] * num_ranks
