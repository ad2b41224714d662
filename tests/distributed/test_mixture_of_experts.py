"""Mixtures of experts, of the examples and of Hugging Face: divided evenly and unevenly, trained as the plain model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests import reference
from tests.captures import Captured, captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from tests.hf_models import mixtral

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import moe

WIDTH, HEADS, CONTEXT, EXPERTS, CHOICES = 8, 2, 6, 8, 2
LEARNING_RATE = 1.0  # so that the first step of SGD shows the gradients
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """How a mixture of experts is laid out.

    Attributes:
        speeds: of the devices.
        held: per device, the experts that it has of each of its layers.
        capacity_factor: 0 drops no token.
        scopes: devices of each pipeline stage, of one layer each; None for the example's own model of one layer, on all devices.
        num_micro_batch: of a step.
    """

    speeds: tuple[float, ...]
    held: tuple[int, ...]
    capacity_factor: float = 0.0
    scopes: tuple[int, ...] | None = None
    num_micro_batch: int = 1


class Staged(moe.MixtureOfExperts):
    """The same model with a default strategy for each pipeline stage."""

    def __init__(self, scopes: tuple[int, ...], capacity_factor: float) -> None:
        nn.Module.__init__(self)
        blocks = []
        for stage, devices in enumerate(scopes):
            whale.set_default_strategy(whale.replicate(devices))
            if stage == 0:
                self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            blocks.append(moe.Block(WIDTH, HEADS, moe.Gate(WIDTH, EXPERTS, CHOICES, capacity_factor)))
            if stage == len(scopes) - 1:
                self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        whale.set_default_strategy(None)
        self.blocks = nn.ModuleList(blocks)


def make(case: Case) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    if case.scopes is None:
        model = moe.MixtureOfExperts(1, WIDTH, HEADS, CONTEXT, EXPERTS, CHOICES, case.capacity_factor)
    else:
        model = Staged(case.scopes, case.capacity_factor)
    for parameter in model.parameters():  # so that gates prefer some experts, and drop tokens
        nn.init.normal_(parameter, std=0.5)
    text = torch.randint(0, 256, (3, 8, CONTEXT + 1))
    return model.double(), [{"ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()} for rows in text]


def _built(scopes: tuple[int, ...] | None, capacity_factor: float) -> tuple[nn.Module, dict[str, Tensor], Any]:
    model, batches = make(Case((), (), capacity_factor, scopes))
    return model, batches[0], moe.loss_fn


def captured_case(case: Case) -> Captured:
    """Captured once for all speeds, and for the prediction at the end."""
    made = captured_once(_built, case.scopes, case.capacity_factor)
    made.capture("predict", {"ids": made.batch["ids"]})
    return made


def _prepare(case: Case) -> None:
    captured_case(case)


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


@dataclass(frozen=True)
class Trained:
    """What a rank has seen.

    Attributes:
        losses: of the steps.
        first, last: weights after the first step and after all.
        load: ``[rows, layers, experts]``, of the first batch.
        held: the experts that this rank has, per layer that it runs.
        of_devices: per layer, the tokens for the experts of each device.
    """

    losses: list[float]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    load: Tensor
    held: tuple[int, ...] = ()
    of_devices: dict[int, dict[str, int]] = field(default_factory=dict)


def train_rank(rank: int, size: int, case: Case) -> Trained:
    made, (_, batches) = captured_case(case), make(case)
    config = {"pipeline.num_micro_batch": case.num_micro_batch}
    cluster = make_cluster(case.speeds)
    engine = whale.parallelize(made.model, loss=moe.loss_fn, optimizer=optimizer, batch=made.batch, config=config, cluster=cluster)
    try:
        losses = [float(engine.step(batches[0]))]
        first = reference.copy_of(engine.state_dict() or {})
        losses += [float(engine.step(batch)) for batch in batches[1:]]
        last = reference.copy_of(engine.state_dict() or {})
        _, _, load = engine.predict({"ids": batches[0]["ids"]})
        held = tuple(len(tensor) for name, tensor in engine.tensors.items() if name.endswith("experts.up"))
        return Trained(losses, first, last, load, held, moe.load_of_devices(load, engine.plan))
    finally:
        engine.close()


def train_plain(case: Case) -> Trained:
    model, batches = make(case)
    run = reference.train(model, moe.loss_fn, batches[:1], optimizer)
    model, _ = make(case)
    whole = reference.train(model, moe.loss_fn, batches, optimizer)
    with torch.no_grad():
        return Trained(whole.losses, run.state, whole.state, model(batches[0]["ids"])[2])


CASES = {
    "alone": Case((1.0,), (8,), capacity_factor=1.0),
    "two devices": Case((1.0, 1.0), (4, 4), capacity_factor=1.0),
    "two devices, dropless": Case((1.0, 1.0), (4, 4)),
    "two unlike devices": Case((5.0, 3.0), (5, 3), capacity_factor=1.0, num_micro_batch=2),
    "two unlike devices, dropless": Case((5.0, 3.0), (5, 3), num_micro_batch=2),
    "four unlike devices": Case((3.0, 3.0, 1.0, 1.0), (3, 3, 1, 1), capacity_factor=1.0),
    "four devices, dropless": Case((1.0,) * 4, (2,) * 4),
    "two replicas": Case((1.0,) * 4, (4,) * 4, capacity_factor=1.0, scopes=(2,)),
    "pipeline": Case((1.0,) * 4, (4,) * 4, capacity_factor=1.0, scopes=(2, 2), num_micro_batch=2),
    "pipeline of unlike devices, dropless": Case((3.0, 1.0, 3.0, 1.0), (6, 2, 6, 2), scopes=(2, 2), num_micro_batch=2),
}


@pytest.mark.parametrize("layout", CASES)
def test_divided_experts_train_as_on_one_device(world: World, layout: str) -> None:
    case = CASES[layout]
    expected = train_plain(case)
    drops = (expected.load > moe.capacity(CONTEXT, EXPERTS, CHOICES, case.capacity_factor)).any()
    assert bool(drops) == (case.capacity_factor > 0), "tokens are dropped where they may be"
    world.prepare(_prepare, case)
    for rank, run in enumerate(world.run(train_rank, case, num_ranks=len(case.speeds))):
        assert run.held == (case.held[rank],)
        assert max(abs(a - b) for a, b in zip(run.losses, expected.losses, strict=True)) < TOLERANCE
        assert difference(run.first, expected.first) < TOLERANCE, "the gradients"
        assert difference(run.last, expected.last) < TOLERANCE, "the weights after three steps"
        assert torch.equal(run.load, expected.load)
        for layer, tokens in run.of_devices.items():
            assert sum(tokens.values()) == int(run.load[:, layer].sum())
        assert len(run.of_devices) == (0 if len(case.speeds) == 1 else run.load.shape[1])


def difference(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((state[name] - value).abs().max()) for name, value in expected.items())


def train_mixtral(rank: int, size: int, implementation: str, axis: str, speeds: tuple[float, ...]) -> tuple[reference.Run, list[str]]:
    if implementation == "grouped_mm":  # on the CPU an operator of the library's own
        whale.register_rule("transformers.grouped_mm_fallback", "input[n! k] weight[e! k j] offs[e!] -> [n! j]")
    model, batch = mixtral(rows=8, experts_implementation=implementation)
    whale.tag(model, whale.split(size, axis=axis))
    engine = whale.parallelize(model, optimizer=optimizer, batch=batch, cluster=make_cluster(speeds))
    try:
        losses = [float(engine.step(batch)) for _ in range(3)]
        shard = [shard.axis for stage in engine.plan.replicas[0].stages for shard in stage.shards]
        return reference.Run(losses, {}, reference.copy_of(engine.state_dict() or {})), shard
    finally:
        engine.close()


@pytest.mark.parametrize(("implementation", "axis"), [("batched_mm", "experts.gate_up_proj:0"), ("grouped_mm", "experts.gate_up_proj:1.1")])
def test_experts_of_mixtral_are_cut_as_captured(world: World, implementation: str, axis: str) -> None:
    model, batch = mixtral(rows=8, experts_implementation=implementation)
    expected = reference.train(model, lambda output, _: output.loss, [batch] * 3, optimizer)
    for run, shard in world.run(train_mixtral, implementation, axis, (3.0, 1.0), num_ranks=2):
        assert sum(name.endswith(axis) for name in shard) == 2, "in both layers"
        assert max(abs(a - b) for a, b in zip(run.losses, expected.losses, strict=True)) < 1e-5
        assert difference(run.state, expected.state) < 1e-5
