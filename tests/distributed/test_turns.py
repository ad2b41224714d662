"""Models that train another part in each step: what a step does not reach has no gradient, and the optimizer skips it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import whale
from tests.distributed.world import World
from whale.capture import capture
from whale.errors import PlanError
from whale.planning import carry_plan

Batch = dict[str, Any]
ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)  # moves what has a gradient of zero, too

CONFIGS: dict[str, dict[str, Any]] = {
    "replicas": {"pipeline.num_micro_batch": 2},
    "stages": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2},
    "shared state": {"memory.zero": 2, "gradient.clip_norm": 0.5},
    "gathered weights": {"memory.zero": 3},
    "late weight gradients": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "pipeline.schedule": "zb_h1"},
}
TASKS = ("a", "b", "b", "a", "both", "a")


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, task: str) -> Tensor:
        hidden = self.body(x)
        found: Tensor = self.a(hidden) if task in ("a", "both") else self.b(hidden)
        return found + self.b(hidden) if task == "both" else found


def of_heads(output: Tensor, batch: Batch) -> Tensor:
    error = output - batch["y"]
    total: Tensor = error.square().mean()
    if batch["task"] != "a":
        total = error.abs().mean() + 0.1 * output.square().sum() / batch["y"].exp().sum()
    return total


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.turn = "discriminator"

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        if self.turn == "discriminator":
            with torch.no_grad():
                fake = self.generator(noise)
            return self.discriminator(real), self.discriminator(fake)
        still = {name: weight.detach() for name, weight in self.discriminator.named_parameters()}
        score = functional_call(self.discriminator, still, self.generator(noise))
        return score, score

    def loss(self, output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        real, fake = output
        if self.turn == "generator":
            return nn.functional.softplus(-fake).mean()
        return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


def tasks() -> list[Batch]:
    torch.manual_seed(1)
    return [{"x": torch.randn(8, 4).double(), "y": torch.randn(8, 1).double(), "task": task} for task in TASKS]


def turns() -> list[Batch]:
    torch.manual_seed(1)
    return [{"noise": torch.randn(8, 3).double(), "real": torch.randn(8, 4).double()} for _ in range(6)]


def made(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def expect(model: nn.Module, engine: whale.Engine, losses: list[Tensor], trained: set[str]) -> None:
    assert set(engine.gradients()) <= trained
    weights = engine.state_dict() or {}
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-11, msg=name)
    torch.testing.assert_close(losses[0], losses[1].detach(), rtol=1e-9, atol=1e-11)


def clip(part: nn.Module, config: dict[str, Any]) -> None:
    if "gradient.clip_norm" in config:
        torch.nn.utils.clip_grad_norm_(part.parameters(), config["gradient.clip_norm"])


def train_heads(config: dict[str, Any]) -> None:
    model, plain = made(Heads), made(Heads)
    engine = whale.parallelize(model, loss=of_heads, optimizer=ADAM, batch=tasks()[0], config={"planning.search": "off", **config})
    optimizer = ADAM(plain.parameters())

    def update(*batches: Batch) -> None:
        optimizer.zero_grad()
        total: Any = 0
        for batch in batches:
            loss = of_heads(plain(batch["x"], batch["task"]), batch)
            loss.backward()
            total = total + loss
        clip(plain, config)
        optimizer.step()
        found: Any = sum(engine.forward_backward(batch) for batch in batches)
        engine.update()
        expect(plain, engine, [found, total], {name for name, own in plain.named_parameters() if own.grad is not None})

    for batch in tasks():
        update(batch)
    update(tasks()[0], tasks()[1])
    update(tasks()[1], tasks()[2])
    engine.close()


def train_gan(config: dict[str, Any]) -> None:
    model, plain = made(Gan), made(Gan)
    engine = whale.parallelize(model, loss=model.loss, optimizer=ADAM, batch=turns()[0], config={"planning.search": "off", **config})
    optimizers = {name: ADAM(getattr(plain, name).parameters()) for name in ("discriminator", "generator")}
    for number, batch in enumerate(turns()):
        model.turn = plain.turn = ("discriminator", "generator")[number % 2]
        optimizers[plain.turn].zero_grad()
        loss = plain.loss(plain(**batch), batch)
        loss.backward()
        part = getattr(plain, plain.turn)
        clip(part, config)
        optimizers[plain.turn].step()
        expect(plain, engine, [engine.step(batch), loss], {f"{plain.turn}.{name}" for name, _ in part.named_parameters()})
    engine.close()


def train_all(rank: int, num_ranks: int) -> list[str]:
    for config in CONFIGS.values():
        train_heads(config)
        train_gan(config)
    return list(CONFIGS)


def test_what_a_step_does_not_reach_stays_as_it_is_on_two_ranks(world: World) -> None:
    assert world.run(train_all, num_ranks=2) == [list(CONFIGS)] * 2


def test_what_a_step_does_not_reach_stays_as_it_is_on_one_rank() -> None:
    for config in ({}, {"pipeline.num_micro_batch": 2}):
        train_heads(config)
        train_gan(config)


def test_idle_ranks_must_sum_the_same_terms_of_the_loss() -> None:
    graphs = [capture(made(Heads), batch, of_heads)[0] for batch in tasks()[:2]]
    plan = whale.parallelize(made(Heads), loss=of_heads, optimizer=ADAM, batch=tasks()[0]).plan
    assert carry_plan(plan, *graphs).model == graphs[1].fingerprint
    with pytest.raises(PlanError, match=r"the loss has other terms in this capture than in the first, and ranks that the plan leaves idle"):
        carry_plan(plan, *graphs, same_loss=True)
