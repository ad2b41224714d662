"""Checkpoints of split models: each rank writes its own regions once and reads its own, whatever plan wrote them; and initial weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import whale
from tests.captures import captured_once
from tests.distributed.world import World
from tests.unit.runtime.checkpoint.test_boxes import stored_tensors
from whale.dry_run import LiveBytes
from whale.hardware.cluster_file import parse_cluster
from whale.runtime.checkpoint.model_files import export_weights

WIDTH, HEADS, CLASSES, SLACK = 48, 6, 64, 64 << 10
"""SLACK: bytes for random states and what ranks tell each other."""
CLUSTER = """
name: unlike
hosts:
  - {{name: big, devices: {big}}}
  - {{name: small, devices: {small}}}
network: {{bandwidth: 50 Gbit/s, latency: 20 us}}
"""


T = TypeVar("T")


class Attention(nn.Module):
    """A fused projection, whose heads lie in combs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, WIDTH))


class Model(nn.Module):
    """Attention, two layers and a classifier, under the scopes of a case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        if case == "plain":
            self._fill()
        elif case == "two and two":
            with whale.replicate(2), whale.split(2):
                self._fill()
        elif case == "last":
            with whale.replicate(1):
                self.attention, self.up = Attention(), nn.Linear(WIDTH, 4 * WIDTH)
            with whale.split(2):
                self.down, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        else:
            with whale.split(int(case)):
                self._fill()

    def _fill(self) -> None:
        self.attention, self.up = Attention(), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.up(x + self.attention(x)))))


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def make_engine(case: str, cluster: str | None, seed: int, device: str = "cpu") -> tuple[Any, nn.Module, dict[str, torch.Tensor]]:
    made = captured_once(_built, case, seed, device)
    engine = whale.parallelize(
        made.model,
        loss=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        batch=made.batch,
        cluster=None if cluster is None else parse_cluster(cluster, "unlike.yaml"),
    )
    return engine, made.model, made.batch


def _built(case: str, seed: int, device: str) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 5, WIDTH).double(), "labels": torch.randint(0, CLASSES, (8, 5))}
    torch.manual_seed(seed)
    with torch.device(device):
        return Model(case).double(), batch, loss_fn


def _prepare(*arguments: Any) -> None:
    captured_once(_built, *arguments)


def run(world: World, function: Callable[..., T], case: str, cluster: str | None, *arguments: Any, seed: int, num_ranks: int) -> list[T]:
    """Runs a function on ranks that find the model of a case captured already."""
    world.prepare(_prepare, case, seed, "cpu")
    return world.run(function, case, cluster, *arguments, num_ranks=num_ranks)


def num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        losses: of the two steps after the checkpoint.
        peak: bytes of tensors made for it.
        held: bytes of the parameters.
        largest: bytes of the largest whole parameter.
        shapes: of what it holds.
        weights: the whole weights when it was made.
    """

    losses: list[float]
    peak: int
    held: int
    largest: int
    shapes: dict[str, tuple[int, ...]]
    weights: dict[str, torch.Tensor]


def save(rank: int, size: int, case: str, cluster: str | None, folder: str) -> Outcome:
    engine, model, batch = make_engine(case, cluster, seed=0)
    for _ in range(2):
        engine.step(batch)
    weights = engine.state_dict()
    with LiveBytes() as memory:
        engine.save(folder)
    return finish(engine, model, batch, memory.peak, weights)


def load(rank: int, size: int, case: str, cluster: str | None, folder: str) -> Outcome:
    engine, model, batch = make_engine(case, cluster, seed=1)
    with LiveBytes() as memory:
        engine.load(folder)
    return finish(engine, model, batch, memory.peak, engine.state_dict())


def finish(engine: Any, model: nn.Module, batch: Any, peak: int, weights: dict[str, torch.Tensor]) -> Outcome:
    losses = [float(engine.step(batch)) for _ in range(2)]
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.tensors.items()}
    largest = max(parameter.nbytes for parameter in model.parameters())
    engine.close()
    return Outcome(losses, peak, num_bytes(engine.tensors.values()), largest, shapes, weights)


ONE_OF_EACH = CLUSTER.format(big="[V100-32GB]", small="[T4]")
THREE = CLUSTER.format(big="[V100-32GB]", small="[T4, T4]")
TWO_OF_EACH = CLUSTER.format(big="[V100-32GB, V100-32GB]", small="[T4, T4]")
PLANS = [
    ("2", ONE_OF_EACH, 2),
    ("2", None, 2),
    ("3", THREE, 3),
    ("last", None, 3),
    ("two and two", TWO_OF_EACH, 4),
    ("plain", None, 2),
    ("plain", None, 1),
]


@pytest.mark.parametrize(("case", "cluster", "num_ranks"), PLANS[:1] + PLANS[4:6], ids=["unlike", "replicated", "whole"])
def test_any_plan_goes_on_from_any_other(world: World, tmp_path: Path, case: str, cluster: str | None, num_ranks: int) -> None:
    folder = str(tmp_path / "saved")
    written = run(world, save, case, cluster, folder, seed=0, num_ranks=num_ranks)
    export_weights(tmp_path / "saved", tmp_path / "exported", 1)
    exported = [load_file(file) for file in (tmp_path / "exported").glob("*.safetensors")]
    assert all(torch.equal(value, written[0].weights[name]) for own in exported for name, value in own.items())
    assert {name for own in exported for name in own} == written[0].weights.keys()
    for other, other_cluster, other_ranks in PLANS:
        for outcome in run(world, load, other, other_cluster, folder, seed=1, num_ranks=other_ranks):
            assert all(torch.equal(value, written[0].weights[name]) for name, value in outcome.weights.items())
            assert outcome.losses == pytest.approx(written[0].losses, abs=1e-12)


def test_cut_and_combs_are_among_the_plans(world: World, tmp_path: Path) -> None:
    outcomes = run(world, save, "2", ONE_OF_EACH, str(tmp_path / "saved"), seed=0, num_ranks=2)
    heads = [outcome.shapes["attention.qkv.weight"][0] * HEADS // (3 * WIDTH) for outcome in outcomes]
    assert sum(heads) == HEADS and heads[0] > heads[1] > 0
    stored = stored_tensors(tmp_path / "saved")["model.attention.qkv.weight"]
    assert sorted(piece.box.shape[0] for piece in stored.pieces) == sorted(3 * [count * WIDTH // HEADS for count in heads])


@pytest.mark.parametrize(("case", "cluster", "num_ranks"), PLANS[:5], ids=["unlike", "even", "three", "last", "replicated"])
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    world: World, tmp_path: Path, case: str, cluster: str | None, num_ranks: int
) -> None:
    outcomes = run(world, save, case, cluster, str(tmp_path / "saved"), seed=0, num_ranks=num_ranks)
    stored = stored_tensors(tmp_path / "saved")
    for name, whole in outcomes[0].weights.items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            assert stored[key].shape == tuple(whole.shape)
            written = torch.zeros(whole.shape)
            for piece in stored[key].pieces:
                piece.box.of(written).add_(1)
            assert written.eq(1).all()
    for rank, outcome in enumerate(outcomes):
        written_here = {key for key, tensor in stored.items() for piece in tensor.pieces if piece.file == f"rank_{rank}.safetensors"}
        own = {key.removeprefix("model.") for key in written_here if key.startswith("model.")}
        assert own <= outcome.shapes.keys()


def test_no_rank_needs_the_whole_model(world: World, tmp_path: Path) -> None:
    """Saving: copies of what lies in combs. Loading: the optimizer's room, and three stored pieces at a time."""
    folder = str(tmp_path / "saved")
    for outcome in run(world, save, "2", ONE_OF_EACH, folder, seed=0, num_ranks=2):
        assert outcome.peak <= outcome.held + SLACK
    for case, cluster, num_ranks in PLANS[:3]:
        for outcome in run(world, load, case, cluster, folder, seed=1, num_ranks=num_ranks):
            assert outcome.peak <= 2 * outcome.held + 3 * outcome.largest + SLACK


def start(
    rank: int, size: int, case: str, cluster: str | None, device: str, seed_step: int
) -> tuple[dict[str, torch.Tensor], list[str], bool]:
    """The weights that engines start from; what was warned of, and whether the user's model is as it was."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, model, _ = make_engine(case, cluster, 7 + seed_step * rank, device)
    torch.manual_seed(7 + seed_step * rank)
    is_untouched = device == "meta" or all(
        torch.equal(a, b) for a, b in zip(Model("plain").double().parameters(), model.parameters(), strict=True)
    )
    weights = engine.state_dict()
    engine.close()
    return weights, [str(warning.message) for warning in caught if "different weights" in str(warning.message)], is_untouched


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_plans_start_from_the_same_weights(world: World, device: str) -> None:
    expected, _, _ = world.run(start, "plain", None, device, 0, num_ranks=1)[0]
    for case, cluster, num_ranks in PLANS[:5]:
        world.prepare(_prepare, case, 7, device)
        for weights, messages, is_untouched in world.run(start, case, cluster, device, 0, num_ranks=num_ranks):
            assert is_untouched and not messages
            assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_parts_of_rank_0s_weights_are_taken_where_ranks_differ(world: World) -> None:
    expected, _, _ = world.run(start, "plain", None, "cpu", 0, num_ranks=1)[0]
    outcomes = world.run(start, "2", ONE_OF_EACH, "cpu", 1, num_ranks=2)
    assert all(is_untouched for _, _, is_untouched in outcomes)
    assert len(outcomes[0][1]) == 1 and not outcomes[1][1]
    for weights, _, _ in outcomes:
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
