"""The law for split: unmodified Hugging Face models, alone and in pipelines of two stages, cut evenly and unevenly.

Parts of these models compute in float32 whatever their weights are, so the bound is float32's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch
from torch import nn

import whale
from tests import reference
from tests.captures import Captured, captured_once
from tests.distributed.split_training import whole_gradients
from tests.distributed.training import OPTIMIZERS, largest_of
from tests.distributed.world import World
from tests.examples import further
from tests.hf_models import ALL, BUILDERS, OTHERS
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.plan import Plan

TOLERANCE = 1e-5
ROWS = (4, 6, 5)
"""Of the batch of each step."""

STAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gpt2": (("transformer.wte", "transformer.wpe", "transformer.h.0"), ("transformer.h.1", "transformer.ln_f", "lm_head")),
    "bert": (("bert.embeddings", "bert.encoder.layer.0"), ("bert.encoder.layer.1", "cls")),
    "t5": (("encoder",), ("decoder", "lm_head")),
    "vit": (("vit.embeddings", "vit.layers.0"), ("vit.layers.1", "vit.layernorm", "classifier")),
    "resnet": (("resnet.embedder", "resnet.encoder.stages.0"), ("resnet.encoder.stages.1", "resnet.pooler", "classifier")),
    "llama": (("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm", "lm_head")),
    "mixtral": (("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm", "lm_head")),
}
"""Per family, the modules of a first and of a second stage; what is in neither joins its neighbours."""

Speeds = tuple[tuple[float, ...], ...]
"""Of the devices of each host, relative."""


@dataclass(frozen=True)
class Case:
    """A family, where it is split, and on what.

    Attributes:
        family: key of `ALL`.
        widths: devices per stage: 1 is a stage that is whole on its device.
        speeds: of the devices.
        config: settings by key.
    """

    family: str
    widths: tuple[int, ...]
    speeds: Speeds
    config: tuple[tuple[str, Any], ...] = ()


FLOPS = 1e5
"""Of a device of speed 1: so few that it pays to cut whatever can be cut."""


def make_cluster(case: Case) -> Cluster:
    hosts = tuple(
        Host(f"host{number}", tuple(_device(f"host{number}", index, speed) for index, speed in enumerate(speeds)), Link(1e9, 1e-6))
        for number, speeds in enumerate(case.speeds)
    )
    return Cluster("test", hosts, Link(1e9, 1e-6))


def _device(host: str, index: int, speed: float) -> Device:
    flops = FLOPS * speed
    return Device(f"{host}/{index}", host, "cpu", (("float32", flops), ("float64", flops)), 1 << 30, flops)


def build(case: Case) -> nn.Module:
    model = ALL[case.family]()[0].double().train()
    if dict(case.config).get("pipeline.num_micro_batch", 1) > 1:
        for module in model.modules():  # which would normalise each micro-batch by itself
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    return model


def make_batches(family: str) -> list[dict[str, torch.Tensor]]:
    batches = [ALL[family](rows, seed)[1] for seed, rows in enumerate(ROWS)]
    return [{name: value.double() if value.is_floating_point() else value for name, value in batch.items()} for batch in batches]


def captured_case(case: Case) -> Captured:
    """Captured once for all speeds."""
    return captured_once(_built, replace(case, speeds=()))


def _built(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return build_in_scopes(case), make_batches(case.family)[0]


def _prepare(case: Case) -> None:
    captured_case(case)


def build_in_scopes(case: Case) -> nn.Module:
    if len(case.widths) == 1:
        with whale.split(case.widths[0]):
            return build(case)
    model = build(case)
    for number, (width, names) in enumerate(zip(case.widths, STAGES[case.family], strict=True)):
        scope = whale.replicate(1, name=f"stage{number}") if width == 1 else whale.split(width, name=f"stage{number}")
        for name in names:
            whale.tag(model.get_submodule(name), scope)
    return model


def train_rank(rank: int, num_ranks: int, case: Case, expected: reference.Run) -> tuple[reference.Run, Plan]:
    """Trains the case; its gradients are put into the expected whole ones."""
    batches, made = make_batches(case.family), captured_case(case)
    engine = whale.parallelize(
        made.model, optimizer=OPTIMIZERS["adam"], batch=made.batch, config=dict(case.config), cluster=make_cluster(case)
    )
    try:
        losses: list[float] = []
        for number, batch in enumerate(batches):
            losses.append(float(engine.step(batch)))
            if number == 0:
                gradients = whole_gradients(engine, expected.gradients)
        state = engine.state_dict()
        assert state is not None
        return reference.Run(losses, gradients, reference.copy_of(state)), engine.plan
    finally:
        engine.close()


def train_reference(case: Case) -> reference.Run:
    """Once for all layouts and speeds."""
    return _train_plainly(replace(case, widths=(), speeds=()))


@lru_cache(maxsize=2)
def _train_plainly(case: Case) -> reference.Run:
    return reference.train(build(case), lambda output, batch: output.loss, make_batches(case.family), OPTIMIZERS["adam"])


def sizes_of(plan: Plan) -> list[tuple[int, ...]]:
    return [shard.sizes for replica in plan.replicas for stage in replica.stages for shard in stage.shards]


Kind = Literal["even", "uneven"]
LAYOUTS: dict[tuple[str, Kind], tuple[tuple[int, ...], Speeds]] = {
    ("alone", "even"): ((2,), ((1.0, 1.0),)),
    ("alone", "uneven"): ((2,), ((1.0, 3.0),)),
    ("last stage", "even"): ((1, 2), ((1.0,), (1.0, 1.0))),
    ("both stages", "uneven"): ((2, 2), ((1.0, 2.0), (1.0, 3.0))),
}


EVEN = ("gpt2", "resnet", *further(name for name in BUILDERS if name not in ("gpt2", "resnet")))
"""Families that are cut into equal parts, too: a decoder and a model of images."""


@pytest.mark.parametrize(
    ("family", "layout", "kind"), [(family, *own) for family in BUILDERS for own in LAYOUTS if own[1] == "uneven" or family in EVEN]
)
def test_law(world: World, family: str, layout: str, kind: Kind) -> None:
    widths, speeds = LAYOUTS[layout, kind]
    num_micro_batch = 1 if layout == "alone" else 2
    check(world, Case(family, widths, speeds, (("pipeline.num_micro_batch", num_micro_batch),)), kind)


@pytest.mark.parametrize("family", OTHERS)
def test_law_of_other_models(world: World, family: str) -> None:
    widths, speeds = LAYOUTS["alone", "uneven"]
    check(world, Case(family, widths, speeds), "uneven")


def check(world: World, case: Case, kind: Kind) -> None:
    expected = train_reference(case)
    world.prepare(_prepare, case)
    results = world.run(train_rank, case, expected, num_ranks=sum(case.widths))
    plan = results[0][1]
    assert [len(stage.virtual_device.devices) for stage in plan.replicas[0].stages] == list(case.widths)
    assert [stage.split for stage in plan.replicas[0].stages] == list(case.widths)
    uneven = [sizes for sizes in sizes_of(plan) if max(sizes) - min(sizes) > 1]
    assert uneven if kind == "uneven" else not uneven, sizes_of(plan)
    error, where = largest_of([run for run, _ in results], expected)
    assert error < TOLERANCE, where
