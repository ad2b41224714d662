"""A dry run tells each device's memory, runs alike ranks once, and refuses what it cannot run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import whale
import whale.dry_run as module
from tests.examples import slow
from tests.unit.runtime.test_steps_at_scale import cluster_of
from whale.api.mode import CapturedMode
from whale.config import Config
from whale.dry_run import DryRun, _in_type, dry_run
from whale.errors import ConfigError, OpFault
from whale.estimate import Costs, estimate
from whale.hardware import compute_type, parse_cluster
from whale.ir.plan import Form, states_of
from whale.planning import make_plan
from whale.planning.plan import plan_and_estimate

WIDTH, ROWS = 64, 24


class Model(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        with whale.replicate(1):
            self.first = nn.Linear(WIDTH, WIDTH)
        with whale.replicate(1):
            self.second = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.second(self.first(x))
        return value


def to_zero(output: Tensor, _: object) -> Tensor:
    return F.mse_loss(output, output.new_zeros(output.shape))


@cache
def captured(model: type[nn.Module] = Model) -> CapturedMode:
    with torch.device("meta"):
        return CapturedMode(model(), {"x": torch.zeros(ROWS, WIDTH)}, to_zero, "train")


def dry(num_devices: int, **settings: Any) -> DryRun:
    config = Config({"pipeline.num_micro_batch": 2} | {key.replace("__", "."): value for key, value in settings.items()})
    mode = captured()
    return dry_run(make_plan(mode.graph, cluster_of(num_devices), config), mode, config)


def test_alike_ranks_are_run_once() -> None:
    found = dry(8)
    assert found.num_run == 2
    assert {frozenset(devices) for devices, _ in found.peaks} == {frozenset(f"device{n}" for n in range(start, 8, 2)) for start in (0, 1)}
    assert len(found.of) == 8 and found.of["device0"] is found.of["device2"]


def test_ranks_with_other_rows_are_run_for_themselves() -> None:
    assert dry(10).num_run == 4  # five replicas take 4 or 5 of the 24 rows each


FED_BACK = {"sum_dtype": "bfloat16", "feeds_back": True}


@pytest.mark.parametrize(
    "optimizer, sums, of_weights",
    [
        (None, {}, 1),
        (None, FED_BACK, 2),
        slow(None, {"gradient_dtype": "bfloat16"}, 0.5),
        (Form("float32", "owners"), {}, 1),
        slow(Form("float64"), {}, 1),
        (Form("float32", home="host"), {}, 1),
    ],
)
def test_what_is_held_is_what_the_estimate_says(optimizer: Form | None, sums: Any, of_weights: float) -> None:
    mode, config = captured(), Config({"pipeline.num_micro_batch": 2})
    plan = replace(make_plan(mode.graph, cluster_of(4), config), keeper_shares=(1, 2, 3, 4))
    plan = replace(plan, parameter_states=states_of(mode.graph.parameters, optimizer=optimizer, **sums))
    step, found = estimate(plan, mode.graph, cluster_of(4)), dry_run(plan, mode, config)
    for device, peak in found.of.items():
        use, num_tensors = step.of(device).peak, 2
        # those in the optimizer's type are there during its step alone, where the peak may be; those that are sent before it
        gradients = min(use.gradients, use.weights * of_weights)
        assert 0 <= peak.held_bytes - (use.weights + gradients + use.optimizer) <= (4 * num_tensors + 4) * 512
        assert peak.held_bytes < peak.num_bytes
        assert peak.action[1] == "B" or optimizer is not None
        assert peak.op.startswith("aten.")


class Deep(nn.Module):
    """Many gradients beside few activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layers(x)
        return value


@pytest.mark.parametrize("zero", [1, 3])
def test_a_host_holds_a_copy_of_its_own(zero: int) -> None:
    mode = captured(Deep)
    config = Config({"planning.search": "off", "memory.zero": zero, "communication.bucket_bytes": 4 * WIDTH * (WIDTH + 1)})
    apart = make_plan(mode.graph, cluster_of(4), config)
    assert len(apart.replicas) == 4
    held = []
    for plan in (apart, replace(apart, keeper_groups=(0, 0, 1, 1))):
        step, found = estimate(plan, mode.graph, cluster_of(4), Costs.of(config)), dry_run(plan, mode, config)
        for device, peak in found.of.items():
            use = step.of(device).peak
            assert abs(peak.num_bytes - use.total) <= 60 * 512
        held.append(sum(peak.held_bytes for peak in found.of.values()))
    assert held[1] > 1.2 * held[0]


@pytest.mark.parametrize("num_micro_batch", [1, 2])
def test_gradients_are_let_go_when_their_sums_have_come(num_micro_batch: int) -> None:
    """Of one micro-batch they are never there together; of several they are, in the last backward pass with one bucket more."""
    mode, bucket = captured(Deep), 4 * WIDTH * (WIDTH + 1)
    settings = {"pipeline.num_micro_batch": num_micro_batch, "communication.bucket_bytes": bucket, "planning.search": "off"}
    plans = [make_plan(mode.graph, cluster_of(2), Config(settings | {"memory.zero": zero})) for zero in (1, 2)]
    found = [dry_run(plan, mode, Config(settings)).of["device0"].num_bytes for plan in plans]
    steps = [estimate(plan, mode.graph, cluster_of(2), Costs.of(Config(settings))) for plan in plans]
    for peak, step in zip(found, steps, strict=True):
        assert 0.95 * step.of("device0").peak.total <= peak <= step.of("device0").peak.total + 60 * 512
    assert found[1] - found[0] <= (-2 if num_micro_batch == 1 else 0) * bucket


@pytest.mark.parametrize("offload", ["none", slow("optimizer+parameters")])
@pytest.mark.parametrize("again", ["none", "blocks"])
def test_weights_are_there_while_they_are_read(offload: str, again: str) -> None:
    """What is gathered, or comes from hosts, is held in parts, and by buckets where ops read it."""
    mode, bucket = captured(Deep), 4 * WIDTH * (WIDTH + 1)
    settings = {"pipeline.num_micro_batch": 2, "communication.bucket_bytes": bucket, "planning.search": "off", "recompute.policy": again}
    asked = Config(settings | {"memory.zero": "3", "memory.offload": offload})
    plan = make_plan(mode.graph, cluster_of(2), asked)
    found, step = dry_run(plan, mode, asked), estimate(plan, mode.graph, cluster_of(2), Costs.of(asked))
    for device, peak in found.of.items():
        use = step.of(device).peak
        assert 0 <= peak.held_bytes - use.weights - use.optimizer <= 60 * 512
        assert 0.94 * use.total <= peak.num_bytes <= use.total + 64 * 512
    whole = dry_run(make_plan(mode.graph, cluster_of(2), Config(settings | {"memory.zero": "2"})), mode, Config(settings))
    assert found.of["device0"].num_bytes <= whole.of["device0"].num_bytes - 2 * bucket


@pytest.mark.parametrize("kept", [0, slow(1), slow(2), 3])
def test_optimizers_keep_what_the_settings_say(kept: int) -> None:
    weight_bytes = 4 * WIDTH * WIDTH
    held = dry(4, memory__optimizer_states=kept).of["device0"].held_bytes
    assert (2 + kept) * weight_bytes <= held < (3 + kept) * weight_bytes


class Complex(nn.Module):
    """A real and a complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.second(self.first(x).to(torch.complex64)).abs()
        return value


def test_complex_parameters_are_stepped_too() -> None:
    mode, config = captured(Complex), Config({"planning.search": "off"})
    plan = make_plan(mode.graph, cluster_of(1), config)
    use, (peak,) = estimate(plan, mode.graph, cluster_of(1)).of("device0").peak, dry_run(plan, mode, config).of.values()
    assert 0 <= peak.held_bytes - use.weights - use.optimizer <= 60 * 512


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not support memory\.optimizer_states: 5") as caught:
        dry(2, memory__optimizer_states=5)
    assert "set memory.optimizer_states to 0..3, or leave out the dry run" in (caught.value.hint or "")


@pytest.mark.parametrize(("zero", "other", "action"), [("1", "V100-32GB", "STEP"), ("3", "V100-32GB", "0B0"), ("1", "3090", "0B0")])
def test_each_rank_runs_in_its_own_half_type(zero: str, other: str, action: str) -> None:
    """Between unlike ones weights travel in float32: the step that sends them, not the backward pass, then needs most."""
    hosts = f"[{{name: a, devices: 1 x A100-80GB}}, {{name: b, devices: 1 x {other}}}]"
    there = parse_cluster(f"name: c\nnetwork: infiniband-hdr\nhosts: {hosts}\n")
    settings = {"memory.zero": zero, "memory.zero_within": "all", "communication.bucket_bytes": 100_000}
    config, width = Config({"precision.dtype": "half", "planning.search": "off"} | settings), 256
    with torch.device("meta"):
        mode = CapturedMode(
            nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU()))),
            {"input": torch.zeros(ROWS, width)},
            to_zero,
            "train",
            device="cpu",
            precision=compute_type(config, there),
        )
    plan, step = plan_and_estimate(mode.graph, there, config)
    types = []
    with mock.patch.object(module, "_in_type", lambda graph_for, own, rows: types.append(own) or _in_type(graph_for, own, rows)):
        peaks = dry_run(plan, mode, config).of
    assert {*types} == {torch.bfloat16} | ({torch.float16} if other == "V100-32GB" else set())
    for name, peak in peaks.items():
        use = step.of(name).peak
        over = use.total - use.communicators - peak.num_bytes
        assert peak.action == action
        assert -0.03 * peak.num_bytes < over < 0.01 * peak.num_bytes


class Checks(nn.Module):
    """Looks at what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layer(x)
        if value.max() > 100:
            raise ValueError
        return value


def test_a_model_that_looks_at_values_is_named() -> None:
    mode, config = captured(Checks), Config()
    with pytest.raises(OpFault, match="a dry run cannot run this model") as caught:
        dry_run(make_plan(mode.graph, cluster_of(1), config), mode, config)
    assert caught.value.where is not None and "test_dry_run.py" in str(caught.value.where)


def test_a_rank_among_others_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match="a rank of a process group already"):
            dry(2)
    finally:
        dist.destroy_process_group()
