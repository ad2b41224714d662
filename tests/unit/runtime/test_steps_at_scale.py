"""What a rank does in Python for one step does not depend on how many ranks there are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import whale
from whale.api.mode import CapturedMode, view_of
from whale.comm import World
from whale.config import Config
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.planning import make_plan
from whale.runtime.execute.equal_copies import EqualCopies
from whale.runtime.execute.roster import Roster
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.publishing import in_forms
from whale.runtime.training import train_step
from whale.schedules import schedules_of

NUM_STAGES, NUM_MICRO_BATCH, NUM_LOCAL = 2, 3, 4


class Model(nn.Module):
    """A linear layer per stage."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for _ in range(NUM_STAGES):
            with whale.replicate(1):
                layers.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layers(x)
        return value


@contextmanager
def world_of(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Rank 0 of a world in which the others do just the same: sums are products, and what is received is left as it is."""

    def all_reduce(tensor: Tensor, *arguments: Any, group: dist.ProcessGroup | None = None, **keywords: Any) -> None:
        tensor.mul_(dist.get_world_size(group))

    def mirror(received: Tensor, sent: Tensor, *sizes: Any, **keywords: Any) -> None:
        if received.shape == sent.shape:  # it may be a sum
            received.copy_(sent)

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_reduce", all_reduce)
            patch.setattr(dist, "all_to_all_single", mirror)
            patch.setattr(EqualCopies, "are_equal", staticmethod(lambda told: True))  # a product is not a sum of unlike signs
            yield World(0, num_ranks, 0, NUM_LOCAL, torch.device("cpu"), timedelta(seconds=10))
    finally:
        dist.destroy_process_group()


def cluster_of(num_devices: int) -> Cluster:
    device = partial(Device, model="cpu", flops=(("float32", 1e9),), memory=1 << 30, bandwidth=1e9)
    names = [(f"host{index // NUM_LOCAL}", f"device{index}") for index in range(num_devices)]
    hosts = dict.fromkeys(host for host, _ in names)
    made = tuple(Host(host, tuple(device(name, host) for own, name in names if own == host), Link(1e9, 1e-6)) for host in hosts)
    return Cluster("cluster", made, Link(1e8, 1e-5))


def calls_of_a_step(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of Python functions in one step of rank 0, after the third."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(num_ranks // NUM_STAGES * NUM_MICRO_BATCH, 4)}
    mode = CapturedMode(Model(), batch, lambda output, _: F.mse_loss(output, torch.zeros_like(output)), "train")
    with world_of(num_ranks, monkeypatch) as world:
        config = Config({"pipeline.num_micro_batch": NUM_MICRO_BATCH, "gradient.clip_norm": 1.0})
        plan = make_plan(mode.graph, cluster_of(num_ranks), config)
        assert len(plan.replicas) == num_ranks // NUM_STAGES
        roster = Roster(plan, world, tuple(range(num_ranks)))
        holdings = Holdings.of(plan, mode.graph, None)
        tensors = {name: nn.Parameter(mode.program.tensors[name].detach().clone()) for name in roster.owned}
        state = EngineState(*in_forms(holdings, roster.rank, tensors, world.device))
        state.optimizer = torch.optim.SGD(state.kept.values(), lr=0.01)
        runtime = Runtime(roster=roster, schedules=schedules_of(plan), holdings=holdings, captured=mode, state=state, config=config)

        def step() -> Tensor:
            return train_step(runtime, state, view_of(mode.program.batch, batch))[0]

        try:
            for _ in range(3):  # the next looks at no weights
                step()
            return count_calls(step)
        finally:
            runtime.close()


def count_calls(action: Any) -> int:
    """Calls of Python functions in ``action``, without those of a garbage collection that may fall into it."""
    count = 0

    def tally(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers and callbacks are functions too
    sys.setprofile(tally)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def test_a_step_calls_as_many_functions_on_four_ranks_as_on_five_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (calls_of_a_step(num_ranks, monkeypatch) for num_ranks in (4, 512))
    assert 0 < many <= few
