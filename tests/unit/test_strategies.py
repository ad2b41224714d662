"""The files of ``strategies/`` do what their headers say: every recipe is planned, every cluster is planned for."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.pages import captures_kept
from tests.printed import FIRST, head_quote
from whale.capture import capture
from whale.cli import main
from whale.cli.inputs import read_graph
from whale.config import load_config, read_plan
from whale.hardware import load_cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import make_plan, write_plan
from whale.planning.verify import verify

ROOT = Path(__file__).parents[2] / "strategies"
CLUSTERS = sorted((ROOT / "clusters").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


class Chain(nn.Module):
    """Four layers, in two scopes of the given sizes, or in none."""

    def __init__(self, scopes: tuple[int, int] | None) -> None:
        super().__init__()
        if scopes is None:
            self.front, self.back = self.half(), self.half()
            return
        with whale.replicate(device_count=scopes[0], name="front"):
            self.front = self.half()
        with whale.replicate(device_count=scopes[1], name="back"):
            self.back = self.half()

    def half(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x))


@cache
def graph_of(scopes: tuple[int, int] | None) -> ModelGraph:
    with torch.device("meta"):
        model = Chain(scopes)
    return capture(model, (torch.zeros(64, 64, device="meta"),), lambda output, batch: output.square().mean())[0]


@cache
def graph_of_experts() -> ModelGraph:
    """The mixture of experts of the examples, 8 in each of 2 layers."""
    return read_graph(str(ROOT.parent / "examples" / "moe.py:build"), [])


@cache
def graph_of_gpt() -> ModelGraph:
    """The GPT of the examples, its layers split in two stages."""
    return read_graph(str(ROOT.parent / "examples" / "train_gpt.py:build"), ["stages=2", "split=2"])


EXAMPLES = {"experts": graph_of_experts, "gpt": graph_of_gpt}


@dataclass(frozen=True)
class Expected:
    """What a recipe gives on so many devices: devices per stage of each replica, and of those in `unlike`.

    The model is a chain in `scopes`, or one of the examples: `experts` or `gpt`.
    """

    cluster: str
    replicas: int
    devices_per_stage: tuple[int, ...]
    schedule: str = "1f1b"
    num_micro_batch: int = 1
    scopes: tuple[int, int] | None = None
    example: str = ""
    unlike: tuple[tuple[int, tuple[int, ...]], ...] = ()


EXPECTED = {
    "aiao": Expected("cpu_4", 2, (1,) * 4, "aiao", num_micro_batch=4),
    "data_parallel": Expected("cpu_2", 2, (1,)),
    "gpt_3d": Expected("a100_8", 2, (2, 2), num_micro_batch=4, example="gpt"),
    "gradient_accumulation": Expected("cpu_2", 2, (1,), num_micro_batch=4),
    "interleaved": Expected("cpu_2", 1, (1,) * 4, "interleaved", num_micro_batch=8),
    "mixture_of_experts": Expected("v100_t4", 1, (4,) * 5, example="experts"),
    "mixed_pipeline": Expected("v100_t4", 2, (1, 1), num_micro_batch=8),
    "mixed_split": Expected("v100_t4", 2, (2,)),
    "pipeline": Expected("cpu_2", 1, (1, 1), num_micro_batch=8),
    "pipeline_by_scopes": Expected("cpu_4", 2, (1, 1), num_micro_batch=4, scopes=(1, 1)),
    "pipeline_data_parallel": Expected("cpu_4", 2, (1, 1), num_micro_batch=4),
    "pipeline_gpipe": Expected("cpu_2", 1, (1, 1), "gpipe", num_micro_batch=4),
    "pipeline_with_nested_data_parallel": Expected("cpu_4", 1, (3, 1), num_micro_batch=4, scopes=(3, 1)),
    "recompute_auto": Expected("cpu_2", 1, (1, 1), num_micro_batch=4),
    "recompute_early": Expected("cpu_2", 1, (1, 1), "recompute_early", num_micro_batch=8),
    "shifted_critical_path": Expected("cpu_4", 1, (1,) * 4, "shifted_critical_path", num_micro_batch=8),
    "uneven_data_parallel": Expected("v100_t4", 4, (1,)),
    "unlike_replicas": Expected("v100_t4", 2, (1, 1), num_micro_batch=8, unlike=((1, (2,)),)),
    "zero_bubble": Expected("cpu_2", 1, (1, 1), "zb_h1", num_micro_batch=8),
    "zero_bubble_v": Expected("cpu_2", 1, (1,) * 4, "zb_v", num_micro_batch=8),
}


def model_for(expected: Expected) -> ModelGraph:
    return EXAMPLES[expected.example]() if expected.example else graph_of(expected.scopes)


@cache
def plan_for(recipe: Path, expected: Expected) -> Plan:
    config = load_config(recipe, environment={})
    if config.cluster.file is not None:
        assert Path(config.cluster.file).stem == expected.cluster
    cluster = load_cluster(ROOT / "clusters" / f"{expected.cluster}.yaml")
    graph = model_for(expected)
    plan = make_plan(graph, cluster, config)
    verify(plan, graph, cluster)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_give_what_they_promise(recipe: Path) -> None:
    expected = EXPECTED[recipe.stem]
    plan = plan_for(recipe, expected)
    assert (plan.pipelines[0].schedule, plan.pipelines[0].num_micro_batch, len(plan.replicas)) == (
        expected.schedule,
        expected.num_micro_batch,
        expected.replicas,
    )
    for replica in plan.replicas:
        wanted = dict(expected.unlike).get(replica.index, expected.devices_per_stage)
        assert tuple(len(stage.virtual_device.devices) for stage in replica.stages) == wanted
    assert not plan.idle_devices


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_plans_of_recipes_are_written_down_and_read_back(recipe: Path, tmp_path: Path) -> None:
    expected = EXPECTED[recipe.stem]
    plan, graph = plan_for(recipe, expected), model_for(expected)
    path = tmp_path / "plan.yaml"
    path.write_text(write_plan(plan, graph))
    config = load_config(recipe, environment={}).with_values(read_plan(path))
    read = make_plan(graph, load_cluster(ROOT / "clusters" / f"{expected.cluster}.yaml"), config)
    assert replace(read, choices=()) == replace(plan, choices=())


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in sorted(ROOT.rglob("*.yaml")) if FIRST in file.read_text()], ids=lambda path: path.stem)
def test_heads_say_what_their_command_prints(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT.parent)
    torch.set_num_threads(1)
    command = re.search(r"^# (?:Command:)? +whale ((?:plan|simulate) .*)$", file.read_text(), re.MULTILINE)
    with captures_kept():
        assert command is not None and main(shlex.split(command[1])) == 0
    head_quote(file).check(capsys.readouterr().out, update=request.config.getoption("--update-golden"))


def test_a_faster_device_takes_more_rows() -> None:
    plan = plan_for(ROOT / "recipes" / "uneven_data_parallel.yaml", EXPECTED["uneven_data_parallel"])
    rows = {
        replica.stages[0].virtual_device.devices[0]: stop - start
        for replica, (start, stop) in zip(plan.replicas, plan.replica_rows(64), strict=True)
    }
    assert min(rows["big/0"], rows["big/1"]) > max(rows["small/0"], rows["small/1"])


@pytest.mark.slow
def test_a_faster_device_has_more_experts() -> None:
    plan = plan_for(ROOT / "recipes" / "mixture_of_experts.yaml", EXPECTED["mixture_of_experts"])
    layers = [stage for stage in plan.replicas[0].stages if stage.split == 4]
    held = [{shard.axis: shard.sizes for shard in stage.shards} for stage in layers]
    assert [each[f"blocks.{layer}.gate.experts:0"] for layer, each in enumerate(held)] == [(3, 3, 1, 1)] * 2


@pytest.mark.parametrize("path", [path for path in CLUSTERS if path.stem != "a100_3072"], ids=lambda path: path.stem)
def test_clusters_can_be_planned_for(path: Path) -> None:
    cluster = load_cluster(path)
    plan = make_plan(graph_of(None), cluster, whale.Config())
    verify(plan, graph_of(None), cluster)
    assert len(plan.devices) + len(plan.idle_devices) == len(cluster.devices)


@pytest.mark.slow
def test_three_thousand_devices_can_be_planned_for() -> None:
    cluster = load_cluster(ROOT / "clusters" / "a100_3072.yaml")
    plan = make_plan(graph_of(None), cluster, whale.Config(), rows=3072)
    assert {replica.share for replica in plan.replicas} == {plan.replicas[0].share}
    assert len(plan.devices) == 3072
