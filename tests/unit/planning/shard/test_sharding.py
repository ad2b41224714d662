"""Cuts of captured models: Megatron's patterns come out by themselves, sizes follow speed and memory, plans are golden."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import nn

import whale
from tests import hf_models
from tests.unit.planning.graphs import cluster
from tests.unit.planning.texts import plan_text
from whale.axes import discover
from whale.capture import capture
from whale.capture.scopes import Annotation
from whale.config import Config
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Shard
from whale.planning import make_plan, retarget_plan
from whale.planning.verify import verify

pytestmark = pytest.mark.slow
SLOW_PAIR = cluster((1e9, 1e9))
UNLIKE_PAIR = cluster((3e9, 1e9))


class Scoped(nn.Module):
    """A model that runs under scopes."""

    def __init__(self, model: nn.Module, scopes: Callable[[], tuple[Annotation, ...]]) -> None:
        super().__init__()
        self.inner, self.scopes = model, scopes

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        opened = self.scopes()
        for each in opened:
            each.__enter__()
        try:
            return self.inner(**batch)
        finally:
            for each in reversed(opened):
                each.__exit__(None, None, None)


def split_two() -> tuple[Annotation, ...]:
    return (whale.split(2),)


@lru_cache
def captured(family: str, mode: str = "train", **settings: object) -> ModelGraph:
    model, batch = getattr(hf_models, family)(**settings)
    graph, _ = capture(Scoped(model, split_two), batch, mode=mode)
    return graph


@lru_cache
def gpt2_plan() -> Plan:
    return make_plan(captured("gpt2"), SLOW_PAIR, Config())


def cuts_of(plan: Plan, stage: int = 0) -> dict[str, tuple[int, ...]]:
    return {shard.axis.removeprefix("inner."): shard.sizes for shard in plan.replicas[0].stages[stage].shards}


def test_gpt2_is_cut_by_heads_columns_and_vocabulary(golden: Callable[[str, str], None]) -> None:
    """Fused qkv by heads, feed-forward column then row, and the tied vocabulary from the table to the loss."""
    plan = make_plan(captured("gpt2", vocab_size=601), SLOW_PAIR, Config())
    assert cuts_of(plan) == {
        "transformer.wte.vocabulary": (301, 300),
        "transformer.h.0.attn.heads": (2, 2),
        "transformer.h.0.mlp.c_fc.weight:1": (64, 64),
        "transformer.h.1.attn.heads": (2, 2),
        "transformer.h.1.mlp.c_fc.weight:1": (64, 64),
    }
    golden("plans/split_gpt2.txt", plan_text(plan))


def test_sizes_follow_the_devices_speed(golden: Callable[[str, str], None]) -> None:
    plan = make_plan(captured("gpt2", vocab_size=601), UNLIKE_PAIR, Config())
    shards = cuts_of(plan)
    assert shards["transformer.h.0.attn.heads"] == (3, 1)
    assert shards["transformer.h.1.mlp.c_fc.weight:1"] == (96, 32)
    golden("plans/split_gpt2_uneven.txt", plan_text(plan))


def test_memory_moves_units_to_the_larger_device() -> None:
    graph = captured("gpt2", vocab_size=601)
    free = make_plan(graph, UNLIKE_PAIR, Config())
    need = [estimate.parameter_bytes + estimate.activation_bytes for estimate in free.replicas[0].stages[0].estimates]
    assert need[0] > need[1]
    tight = cluster((3e9, 1e9), memory=int(sum(need) / 2 * 1.06 / 0.9))
    plan = make_plan(graph, tight, Config())
    assert cuts_of(plan)["transformer.h.0.mlp.c_fc.weight:1"][0] < 96
    assert all(e.parameter_bytes + e.activation_bytes <= e.capacity for e in plan.replicas[0].stages[0].estimates)
    assert next(choice.bound for choice in plan.choices if choice.pass_name == "sharding") == "memory"


def test_grouped_queries_are_cut_by_their_key_value_heads() -> None:
    shards = cuts_of(make_plan(captured("llama", vocab_size=601), SLOW_PAIR, Config()))
    assert {axis for axis in shards if "heads" in axis} == {f"model.layers.{layer}.self_attn.heads" for layer in (0, 1)}
    assert shards["model.layers.0.mlp.gate_proj.weight:0"] == (24, 24)
    assert shards["classes"] == (301, 300)


def test_convolutions_are_cut_by_channels() -> None:
    shards = cuts_of(make_plan(captured("resnet"), SLOW_PAIR, Config()))
    assert sum("channels" in axis for axis in shards) >= 4


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "vit", "resnet", "llama", "mixtral"])
def test_every_family_gains_and_its_plan_is_sound(family: str) -> None:
    graph = captured(family)
    plan = make_plan(graph, SLOW_PAIR, Config())
    verify(plan, graph, SLOW_PAIR)
    stage = plan.replicas[0].stages[0]
    whole = make_plan(graph, cluster((1e9, 1e9, 1e9)), Config())  # the third device is idle
    assert whole.idle_devices == ("h0/2",)
    assert stage.split == 2 and stage.shares == (4,) and len(stage.estimates) == 2
    axes = discover(graph)
    for shard in stage.shards:
        assert sum(shard.sizes) == axes.by_name[shard.axis].size


def test_parameters_are_divided_and_what_stays_whole_is_not() -> None:
    plan = make_plan(captured("gpt2"), SLOW_PAIR, Config())
    held = [estimate.parameter_bytes for estimate in plan.replicas[0].stages[0].estimates]
    everything = sum(parameter.spec.num_bytes * 4 for parameter in captured("gpt2").parameters if parameter.kind == "parameter")
    assert everything / 2 < max(held) < everything * 0.6


def test_identical_blocks_are_one_decision() -> None:
    plan = make_plan(captured("gpt2", n_layer=6), SLOW_PAIR, Config())
    shards = cuts_of(plan)
    assert {shards[f"transformer.h.{layer}.attn.heads"] for layer in range(6)} == {(2, 2)}
    assert "6 x inner.transformer.h.*.attn.heads 2:2" in str(plan)


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_cuts_are_carried_to_other_modes(mode: str) -> None:
    graph, other = captured("gpt2", vocab_size=601), captured("gpt2", mode, vocab_size=601)
    plan = make_plan(graph, SLOW_PAIR, Config())
    carried = retarget_plan(plan, graph, other)
    verify(carried, other, SLOW_PAIR)
    assert carried.replicas[0].stages[0].shards == plan.replicas[0].stages[0].shards
    assert carried.replicas[0].stages[0].split == 2


def spoil(plan: Plan, shards: tuple[Shard, ...]) -> Plan:
    replica = plan.replicas[0]
    stage = dataclasses.replace(replica.stages[0], shards=shards)
    return dataclasses.replace(plan, replicas=(dataclasses.replace(replica, stages=(stage,)),))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ((), "but cuts no axis"),
        ((Shard("inner.transformer.h.0.attn.heads", (2, 1)),), "the sizes add up to 3, not 4"),
        ((Shard("inner.transformer.h.0.attn.heads", (4, 0)),), "a device has no part"),
        ((Shard("inner.transformer.h.0.attn.heads", (4,)),), "each needs one size"),
        ((Shard("inner.transformer.h.0.attn.heads", (2, 2)),) * 2, "2 times, not once"),
        ((Shard("nonsense", (2, 2)),), "is not an axis of the model"),
        ((Shard("batch", (2, 2)),), "divided by shares"),
        ((Shard("inner.transformer.hidden", (16, 16)),), "needs inner.transformer.hidden whole, which is cut"),
        (
            (Shard("inner.transformer.h.0.attn.heads", (2, 2)), Shard("inner.transformer.h.0.attn.head_dim", (4, 4))),
            "meets two axes that are cut",
        ),
    ],
)
def test_faults_of_cuts_are_named(shards: tuple[Shard, ...], message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        verify(spoil(gpt2_plan(), shards), captured("gpt2"), SLOW_PAIR)
