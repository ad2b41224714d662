"""Gradients are rounded to be accumulated or summed, by choice: the numbers are those of a plain loop that rounds likewise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.captures import captured_once
from tests.distributed.test_state_law import assert_as_planned, held_bytes
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.estimate import Costs, estimate
from whale.ir.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "own": None}
NUM_ROWS, NUM_STEPS = 12, 6


@dataclass(frozen=True)
class Case:
    """How a model is trained.

    Attributes:
        dtype: that gradients are summed in.
        accumulated: that they are accumulated in.
        feeds_back: whether what is lost is added later.
        zero: which forms are shared out among owners.
        num_ranks: devices.
        more: settings of the plan.
        clears: what comes before the fourth step: ``load`` of a checkpoint, ``replan``, or ``skip``, a step that is left out; or "".
    """

    dtype: str
    feeds_back: bool = False
    zero: int = 0
    clears: str = ""
    accumulated: str = "own"
    num_ranks: int = 2
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        sums = {
            "gradient.dtype": self.accumulated,
            "gradient.sum_dtype": self.dtype,
            "gradient.error_feedback": self.feeds_back,
            "gradient.skip_nonfinite": self.clears == "skip",
        }
        state = {"memory.zero": str(self.zero), "memory.optimizer_states": 1, "communication.bucket_bytes": 300}
        return sums | state | {"pipeline.num_micro_batch": 3, "planning.search": "off"} | dict(self.more)


CASES = (
    Case("bf16"),
    Case("fp16", zero=2),
    Case("bf16", feeds_back=True),
    Case("fp16", feeds_back=True, zero=1),
    Case("bf16", feeds_back=True, zero=2),
    Case("bf16", feeds_back=True, clears="load"),
    Case("bf16", feeds_back=True, clears="replan"),
    Case("bf16", feeds_back=True, clears="skip"),
    Case("own", accumulated="bf16", clears="load"),
    Case("own", accumulated="bf16", num_ranks=1, clears="replan"),
    Case("own", accumulated="fp16", zero=1, clears="replan"),
    Case("own", accumulated="bf16", zero=2),
    Case("bf16", accumulated="fp16", zero=3),
    Case("float32", accumulated="bf16"),
    Case("fp16", accumulated="bf16", feeds_back=True, clears="skip"),
    Case("own", accumulated="bf16", more=(("memory.offload", "optimizer"),)),
    Case("own", accumulated="bf16", zero=2, more=(("memory.offload", "optimizer+parameters"),)),
    Case("own", accumulated="bf16", more=(("pipeline.num_stages", 2), ("pipeline.schedule", "zb_h1"))),
    Case("own", accumulated="bf16", more=(("pipeline.num_stages", 2), ("recompute.policy", "full"))),
)


def build() -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)), make_batch(0), loss


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def make_batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(NUM_ROWS, 5, generator=random), "y": torch.randn(NUM_ROWS, 3, generator=random)}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def prepare() -> Any:
    return captured_once(build).capture()[0]


def train(rank: int, num_ranks: int, case: Case, folder: str) -> tuple[dict[str, Tensor], Plan, Any]:
    made = captured_once(build)
    cluster = make_cluster((1.0,) * num_ranks)
    engine = whale.parallelize(made.model, loss=made.loss, optimizer=optimizer, batch=made.batch, config=case.config, cluster=cluster)
    for step in range(NUM_STEPS):
        if step == 3 and case.clears == "load":
            engine.save(Path(folder) / "checkpoint")
            engine.load(Path(folder) / "checkpoint")
        elif step == 3 and case.clears == "replan":
            engine.replan(engine.plan)
        elif step == 3 and case.clears == "skip":
            engine.step(make_batch(3) | {"y": torch.full((NUM_ROWS, 3), torch.inf)})
        engine.step(make_batch(step))
    state = engine.state_dict()
    assert state is not None
    found = {name: value.clone() for name, value in state.items()}, engine.plan, held_bytes(engine)
    engine.close()
    return found


def plain(case: Case, pieces: Any) -> dict[str, Tensor]:
    """The same in a plain loop: each replica's own gradients, accumulated in a type, and rounded with what it has lost before."""
    model = build()[0]
    lost: dict[tuple[int, str], Tensor] = {}
    steps = optimizer(model.parameters())
    for step in range(NUM_STEPS):
        if step == 3 and case.clears:
            lost.clear()
        batch, sums = make_batch(step), dict[str, Tensor]()
        for replica, rows in enumerate(pieces):
            mine = dict[str, Tensor]()
            for start, stop in rows:
                model.zero_grad()
                error = F.mse_loss(model(batch["input"][start:stop]), batch["y"][start:stop], reduction="sum")
                error.backward(torch.tensor(1 / batch["y"].numel()))
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    each = parameter.grad.to(DTYPES[case.accumulated])
                    mine[name] = mine[name] + each if name in mine else each
            for name, own in mine.items():
                whole = own + lost.get((replica, name), 0.0)
                sent = whole.to(DTYPES[case.dtype]) if len(pieces) > 1 else whole
                if case.feeds_back:
                    lost[replica, name] = whole - sent
                sums[name] = sums[name] + sent if name in sums else sent
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].to(mine[name].dtype).float()
        steps.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_rounded_gradients(world: World, tmp_path: Path, case: Case) -> None:
    graph = world.prepare(prepare)
    ranks = world.run(train, case, str(tmp_path), num_ranks=case.num_ranks)
    expected = plain(case, ranks[0][1].all_micro_batch_rows(NUM_ROWS))
    for found, plan, (device, *held) in ranks:
        assert_equal(found, expected)
        if len(plan.replicas) > 1:  # else what is left is what the optimizer got, which the estimate has in its step alone
            own = estimate(plan, graph, make_cluster((1.0,) * 2), Costs.of(whale.Config(case.config))).of(device)
            assert_as_planned(own, *held)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
