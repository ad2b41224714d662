"""Split stages: alone, replicated, in pipelines, colocated; on equal and unlike devices; and their checkpoints."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.world import World
from whale.hardware.cluster_file import parse_cluster

CLASSES, WIDTH = 11, 8
TWO_KINDS = """
name: unlike
hosts:
  - {name: big, devices: [V100-32GB]}
  - {name: small, devices: [T4]}
network: {bandwidth: 50 Gbit/s, latency: 20 us}
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Attending(Block):
    """A block after causal attention with two heads over one for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(hidden).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        query, key, value = (part.unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return super().forward(hidden + mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Embedding, two blocks and a classifier, under the scopes of a case."""

    def __init__(self, case: str, axis: str | None = None) -> None:
        super().__init__()
        if case in ("alone", "axis"):
            with whale.split(2, axis=axis):
                self.embed, self.first, self.second, self.head = nn.Embedding(CLASSES, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES)
        elif case == "sequence":
            with whale.split(2, axis="sequence"):
                self.embed, self.first = nn.Embedding(CLASSES, WIDTH), Attending()
            with whale.split(axis="sequence"):
                self.second, self.head = Attending(), nn.Linear(WIDTH, CLASSES)
        elif case == "replicated":
            with whale.replicate(2), whale.split(2):
                self.embed, self.first, self.second, self.head = nn.Embedding(CLASSES, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES)
        elif case in ("last stage", "both stages", "unlike groups"):
            with whale.replicate(1) if case == "last stage" else whale.split(2):
                self.embed, self.first = nn.Embedding(CLASSES, WIDTH), Block()
            with whale.split(3 if case == "unlike groups" else 2):
                self.second, self.head = Block(), nn.Linear(WIDTH, CLASSES)
        else:
            whale.set_default_strategy(whale.replicate(2))
            self.embed, self.first, self.second = nn.Embedding(CLASSES, WIDTH), Block(), Block()
            with whale.split(2):
                self.head = nn.Linear(WIDTH, CLASSES)
                if case == "colocated and tied":
                    self.last = Block()
                    self.head.weight = self.embed.weight
            whale.set_default_strategy(None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.embed(ids)))
        return self.head(self.last(hidden) if hasattr(self, "last") else hidden)


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def make(case: str, axis: str | None = None) -> tuple[Model, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Model(case, axis).double()
    ids = torch.randint(0, CLASSES, (12, 5))
    labels = ids.clone()
    labels[::3, :2] = -100
    return model, {"ids": ids, "labels": labels}


def captured_case(case: str, axis: str | None = None) -> Captured:
    """The model, its batch and loss, captured for training, evaluation and prediction."""
    made = captured_once(_built, case, axis)
    made.capture("eval")
    made.capture("predict", {"ids": made.batch["ids"]})
    return made


def _built(case: str, axis: str | None) -> tuple[Model, dict[str, torch.Tensor], Any]:
    return *make(case, axis), loss_fn


def prepare(case: str, axis: str | None = None) -> None:
    """Captures where ranks are forked from."""
    captured_case(case, axis)


def train(rank: int, size: int, case: str, axis: str | None, unlike: bool, folder: str | None) -> tuple[float, dict[str, tuple[int, ...]]]:
    """The largest difference from the plain model, in anything; and the shapes of what this rank holds."""
    made = captured_case(case, axis)
    model, batch = made.model, made.batch
    engine = parallelize(model, batch, unlike)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model(batch["ids"]), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        worst = max(worst, abs(float(engine.step(batch)) - float(loss)))
        optimizer.step()
    worst = max(worst, difference(engine, model, batch))
    if folder is not None:
        engine.save(folder)
        engine.step(batch)
        engine.load(folder)
        worst = max(worst, difference(engine, model, batch))
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.tensors.items()}
    engine.close()
    return worst, shapes


def parallelize(model: nn.Module, batch: dict[str, torch.Tensor], unlike: bool = False) -> Any:
    cluster = parse_cluster(TWO_KINDS, "unlike.yaml") if unlike else None
    return whale.parallelize(
        model,
        loss=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        batch=batch,
        config={"pipeline.num_micro_batch": 2, "gradient.clip_norm": 0.5},
        cluster=cluster,
    )


def difference(engine: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    state = engine.state_dict()
    weights = max(float((state[name] - value).abs().max()) for name, value in model.state_dict().items())
    with torch.no_grad():
        output = model(batch["ids"])
        evaluation = abs(float(engine.evaluate(batch)) - float(loss_fn(output, batch)))
    return max(weights, evaluation, float((engine.predict({"ids": batch["ids"]}) - output).abs().max()))


@pytest.mark.parametrize(
    ("case", "num_ranks", "unlike"),
    [
        ("alone", 2, False),
        ("alone", 2, True),
        ("replicated", 4, False),
        ("last stage", 3, False),
        ("both stages", 4, False),
        ("sequence", 5, False),
        ("colocated", 2, False),
        ("colocated and tied", 2, False),
    ],
)
def test_a_split_model_trains_as_the_plain_one(world: World, case: str, num_ranks: int, unlike: bool, tmp_path: Path) -> None:
    world.prepare(prepare, case)
    for worst, _ in world.run(train, case, None, unlike, str(tmp_path / "saved"), num_ranks=num_ranks):
        assert worst < 1e-11


def test_an_axis_insisted_on_is_cut(world: World) -> None:
    results = world.run(train, "axis", "first.up.weight:0", False, None, num_ranks=2)
    assert max(worst for worst, _ in results) < 1e-12
    assert sum(shapes["first.up.weight"][0] for _, shapes in results) == 24
    assert all(shapes["first.up.weight"][0] < 24 for _, shapes in results)


def load_elsewhere(rank: int, size: int, folder: str) -> float:
    """A checkpoint of a split model, read by one rank, continues as the plain model does."""
    model, batch = make("last stage")
    engine = parallelize(model, batch)
    engine.load(folder)
    reference = train_plain(3)
    return max(float((engine.state_dict()[name] - value).abs().max()) for name, value in reference.state_dict().items())


def train_plain(num_steps: int) -> nn.Module:
    model, batch = make("alone")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_fn(model(batch["ids"]), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


def save_only(rank: int, size: int, folder: str) -> None:
    model, batch = make("alone")
    engine = parallelize(model, batch)
    for _ in range(3):
        engine.step(batch)
    engine.save(folder)
    engine.close()


def test_another_plan_reads_the_checkpoint(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    world.run(save_only, folder, num_ranks=2)
    assert max(world.run(load_elsewhere, folder, num_ranks=3)) < 1e-12


def words_of_parts(rank: int, size: int) -> tuple[list[str], bool]:
    """What is said where the parameters are gone through, twice; and whether they are parts."""
    model, batch = make("axis", "first.up.weight:0")
    engine = parallelize(model, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            norms = [parameter.norm() for parameter in engine.parameters()]
            assert len(norms) == len(engine.parameters.items())
    is_part = any(parameter.shape != model.get_parameter(name).shape for name, parameter in engine.parameters.items())
    engine.close()
    return [str(each.message) for each in caught], is_part


def test_norms_of_parts_are_not_without_a_word(world: World) -> None:
    ((text,), is_part), (others, is_other) = world.run(words_of_parts, num_ranks=2)
    assert is_part and is_other and not others
    assert "engine.parameters has only this rank's part of" in text and "Clip by gradient.clip_norm" in text


def mixing_optimizer(rank: int, size: int) -> str:
    model, batch = make("alone")
    try:
        whale.parallelize(model, loss=loss_fn, optimizer=partial(torch.optim.Adafactor, lr=1e-2), batch=batch)
    except whale.ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_that_mixes_elements_is_refused(world: World) -> None:
    for message in world.run(mixing_optimizer, num_ranks=2):
        assert "elementwise" in message and "Adafactor" in message
