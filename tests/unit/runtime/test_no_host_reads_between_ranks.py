"""Where a device carries the messages, a steady step with stages, replicas and split stages waits for no device either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import whale
from tests.examples import slow
from tests.standin import DEVICE, StandIn, put
from tests.unit.runtime.test_no_host_reads import CLASSES, WIDTH, Block, next_tokens, texts
from tests.unit.runtime.test_steps_at_scale import cluster_of
from whale.api.mode import CapturedMode, view_of
from whale.comm import World
from whale.config import Config
from whale.planning import make_plan
from whale.runtime.execute.equal_copies import EqualCopies
from whale.runtime.execute.finite import LossWatch
from whale.runtime.execute.roster import Roster
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.runtime.state.publishing import in_forms
from whale.runtime.training import train_step
from whale.schedules import schedules_of

pytestmark = pytest.mark.slow

NUM_RANKS = 4


class Stages(nn.Module):
    """A stage of one device or split over two, then another."""

    def __init__(self, is_split: bool) -> None:
        super().__init__()
        with whale.split(2) if is_split else whale.replicate(1):
            self.tokens, self.block = nn.Embedding(CLASSES, WIDTH), Block()
        with whale.replicate(2 if is_split else 1):
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.tokens(tokens)))
        return logits


class Done:
    """Communication that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def ranks_alike(rank: int, backend: str) -> Iterator[World]:
    """A world whose other ranks have the same numbers: sums are products, and what is received is left as it is."""

    def multiply(tensor: Tensor, *arguments: object, group: dist.ProcessGroup | None = None, **keywords: object) -> Done:
        tensor.mul_(dist.get_world_size(group))
        return Done()

    def leave(*arguments: object, **keywords: object) -> Done:
        return Done()

    def mirror(received: Tensor, sent: Tensor, *sizes: object, **keywords: object) -> Done:
        if received.shape == sent.shape:  # it may be a sum
            received.copy_(sent)
        return Done()

    def new_group(ranks: list[int], backend: str | None = None, **keywords: Any) -> Any:
        return groups_of(ranks, **keywords)

    names, groups_of = ("isend", "irecv", "all_gather", "reduce_scatter"), dist.new_group
    dist.init_process_group("fake", rank=rank, world_size=NUM_RANKS, store=FakeStore())
    try:
        own = {"all_reduce": multiply, "all_to_all_single": mirror, "new_group": new_group, "get_backend_config": lambda group: backend}
        alike = mock.patch.object(EqualCopies, "are_equal", return_value=True)  # a product is not a sum of unlike signs
        stand_ins: dict[str, Any] = {**own, **dict.fromkeys(names, leave)}
        numbers = mock.patch.object(LossWatch, "_check")  # a loss of what was not received need not be one
        with mock.patch.multiple(dist, **stand_ins), alike, numbers:
            yield World(rank, NUM_RANKS, 0, NUM_RANKS, DEVICE, timedelta(seconds=10))
    finally:
        dist.destroy_process_group()


@cache
def captured(is_split: bool) -> CapturedMode:
    torch.manual_seed(0)
    return CapturedMode(Stages(is_split), texts(0), next_tokens, "train")


def watch(is_split: bool, rank: int, schedule: str, backend: str = "cpu:gloo,meta:nccl") -> tuple[list[str], set[int]]:
    """What the fourth step of a rank waits for, which looks at no weights, and host memory beside the batch that it copies."""
    batch, device, mode = texts(0), StandIn(), captured(is_split)
    config = Config({"pipeline.num_micro_batch": 2, "pipeline.schedule": schedule, "gradient.clip_norm": 1.0})
    plan = make_plan(mode.graph, cluster_of(NUM_RANKS), config)
    assert max(len(replica.stages) for replica in plan.replicas) == 2 and (plan.replicas[0].stages[0].split == 2) == is_split
    holdings = Holdings.of(plan, mode.graph, discover_if_sharded(plan, mode.graph))
    with ranks_alike(rank, backend) as world, device:
        roster = Roster(plan, world, tuple(range(NUM_RANKS)))
        assert roster.rank is not None
        held = {name: holdings.cut_out(name, roster.rank, mode.program.tensors[name].detach()) for name in roster.owned}
        tensors = {name: nn.Parameter(put(value)) for name, value in held.items()}
        state = EngineState(*in_forms(holdings, roster.rank, tensors, world.device))
        state.optimizer = torch.optim.SGD(state.kept.values(), lr=0.01, foreach=True)
        runtime = Runtime(roster=roster, schedules=schedules_of(plan), holdings=holdings, captured=mode, state=state, config=config)
        try:
            for _ in range(3):
                train_step(runtime, state, view_of(mode.program.batch, batch))
            device.forget()
            train_step(runtime, state, view_of(mode.program.batch, batch))
        finally:
            runtime.close()
    return device.waits, device.arrivals - {leaf.untyped_storage().data_ptr() for leaf in batch.values()}


@pytest.mark.parametrize("rank", [0, *(slow(rank) for rank in (1, 2))])
@pytest.mark.parametrize(("is_split", "schedule"), [(False, "zb_h1"), (True, "1f1b")])
def test_a_steady_step(is_split: bool, schedule: str, rank: int) -> None:
    waits, strangers = watch(is_split, rank, schedule)
    assert waits == []
    assert strangers == set()


def test_messages_through_the_host_are_found() -> None:
    waits, strangers = watch(False, 0, "1f1b", backend="cpu:gloo,meta:gloo")
    assert any("to the host" in wait for wait in waits), waits
    assert strangers
