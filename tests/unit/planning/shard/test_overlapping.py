"""Whether split stages compute in two halves: where that is predicted to pay, where it is asked for, and not where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import whale
from tests.unit.planning.graphs import cluster
from whale.axes import discover
from whale.capture import capture
from whale.config import Config
from whale.errors import PlanError
from whale.hardware import load_cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, program_of
from whale.planning import make_plan
from whale.planning.verify import verify

CLUSTERS = Path(__file__).parents[4] / "strategies" / "clusters"
GPUS = load_cluster(str(CLUSTERS / "v100_t4.yaml"))
TWO = cluster((1e9, 1e9))
CPUS = replace(TWO, hosts=tuple(replace(host, devices=tuple(replace(d, model="cpu") for d in host.devices)) for host in TWO.hosts))


class FeedForward(nn.Module):
    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        with whale.split(num_parts):
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def graph(width: int, rows: int, num_parts: int) -> ModelGraph:
    with torch.device("meta"):
        batch = {"x": torch.zeros(rows, width), "y": torch.zeros(rows, width)}
        return capture(FeedForward(width, num_parts), batch, lambda output, batch: nn.functional.mse_loss(output, batch["y"]))[0]


LARGE, PAIR, TINY = graph(1024, 1024, 4), graph(1024, 1024, 2), graph(8, 4, 2)


def plan(model: ModelGraph, machine: whale.Cluster, **config: object) -> Plan:
    return make_plan(model, machine, Config({name.replace("__", "."): value for name, value in config.items()}))


def choice(found: Plan) -> Choice:
    return next(each for each in found.choices if each.pass_name == "overlap")


def is_halved(found: Plan) -> bool:
    return found.replicas[0].stages[0].overlap


def test_halves_where_messages_take_time() -> None:
    found, plain = plan(LARGE, GPUS), plan(LARGE, GPUS, communication__overlap=False)
    assert is_halved(found) and not is_halved(plain)
    assert found.step_seconds < plain.step_seconds
    assert "its rows at once" in choice(found).runner_up
    assert choice(plain).bound == "communication.overlap: false"
    assert "in two alternating halves" in str(found)


def test_rows_at_once_where_starting_kernels_takes_time() -> None:
    found = plan(TINY, GPUS)
    assert not is_halved(found)
    assert "in two halves" in choice(found).runner_up
    assert is_halved(plan(TINY, GPUS, communication__overlap=True))


def test_on_cpus_only_if_asked_for() -> None:
    assert not is_halved(plan(PAIR, CPUS))
    assert is_halved(plan(PAIR, CPUS, communication__overlap=True))


def test_not_where_it_cannot_be() -> None:
    found = plan(PAIR, CPUS, communication__overlap=True, pipeline__num_micro_batch=1024)
    assert not is_halved(found)
    assert choice(found).bound == "it takes one row at a time"


def test_a_plan_that_cannot_be_is_refused() -> None:
    found = plan(PAIR, CPUS)
    stage = found.replicas[0].stages[0]
    for recomputed in (stage.ops[:2], (stage.ops[0], stage.ops[-1])):
        program = program_of(stage.ops, [recomputed], in_halves=True)
        wrong = replace(found, replicas=(replace(found.replicas[0], stages=(replace(stage, program=program),)),))
        with pytest.raises(PlanError, match="it is not one segment that is kept"):
            verify(wrong, PAIR, CPUS, discover(PAIR))
