"""Scopes in the ways that people write them train as the plain model: layers beside a split, bare parameters, many stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests import reference
from tests.captures import captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World

WIDTH, EXPERTS = 4, 4
SGD = partial(torch.optim.SGD, lr=0.1)
Batch = dict[str, Tensor]


class Experts(nn.Module):
    """All experts for all rows, weighted; the stacked parameters are its own."""

    def __init__(self, scope: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        with scope:
            self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
            self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bd,edh->ebh", x, self.up).tanh()
        return torch.einsum("be,ebd->bd", self.gate(x).softmax(-1), torch.einsum("ebh,ehd->ebd", hidden, self.down))


class Model(nn.Module):
    """A layer, experts, a layer."""

    def __init__(self, scope: Any) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(WIDTH, WIDTH), Experts(scope), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(x + self.experts(self.first(x)))
        return value


class Wide(nn.Module):
    """Features and a wide head, the hybrid of copies and a split."""

    def __init__(self, features: Any, head: Any) -> None:
        super().__init__()
        with features:
            self.features = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
            with head:
                self.head = nn.Linear(8, 16)
            self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(self.head(self.features(x)).relu())
        return value


class Steps(nn.Module):
    """Five layers, each under a scope of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(5):
            with whale.replicate(1):
                self.layers.append(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def make(spelling: str) -> nn.Module:
    torch.manual_seed(0)
    if spelling == "more stages than devices":
        return Steps().double()
    if spelling == "layers beside a split":
        return Wide(whale.replicate(2), whale.split(2)).double()
    if spelling == "without counts":
        return Wide(whale.replicate(), whale.split()).double()
    if spelling == "bare parameters":
        return Model(whale.split(2)).double()
    if spelling == "bare parameters inside a replicate":
        with whale.replicate(2):
            return Model(whale.split(2)).double()
    whale.set_default_strategy(whale.replicate(1 if spelling == "a default of fewer devices" else 2))
    model = Model(whale.split(2)).double()
    whale.set_default_strategy(None)
    return model


def loss(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["y"]).square().mean()


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, WIDTH, generator=generator).double(), "y": torch.randn(8, 1, generator=generator).double()}


def _built(spelling: str) -> tuple[nn.Module, Batch, Any]:
    return make(spelling), make_batch(), loss


def _prepare(spelling: str) -> None:
    captured_once(_built, spelling)


def train(rank: int, num_ranks: int, spelling: str) -> tuple[reference.Run, list[tuple[int, int]]]:
    made = captured_once(_built, spelling)
    engine = whale.parallelize(made.model, loss=loss, optimizer=SGD, batch=made.batch, cluster=make_cluster((1.0,) * num_ranks))
    losses = [float(engine.step(make_batch())) for _ in range(3)]
    stages = [(stage.split, len(stage.virtual_device.devices)) for stage in engine.plan.replicas[0].stages]
    state = engine.state_dict() or {}
    engine.close()
    return reference.Run(losses, {}, reference.copy_of(state)), stages


SPELLINGS = {
    "layers beside a split": [(1, 2), (2, 2), (1, 2)],
    "without counts": [(1, 2), (2, 2), (1, 2)],
    "more stages than devices": [(1, 1), (1, 1)],
    "bare parameters": [(2, 2)],
    "bare parameters inside a replicate": None,
    "bare parameters under a default strategy": None,
    "a default of fewer devices": None,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_nested_scopes_train_as_the_plain_model(world: World, spelling: str) -> None:
    expected = reference.train(make(spelling), loss, [make_batch()] * 3, SGD)
    world.prepare(_prepare, spelling)
    for run, stages in world.run(train, spelling, num_ranks=2):
        assert stages == SPELLINGS[spelling] or (SPELLINGS[spelling] is None and {2} == {size for _, size in stages} and (2, 2) in stages)
        assert max(abs(a - b) for a, b in zip(run.losses, expected.losses, strict=True)) < 1e-10
        assert all(torch.allclose(run.state[name], value, atol=1e-10) for name, value in expected.state.items())
