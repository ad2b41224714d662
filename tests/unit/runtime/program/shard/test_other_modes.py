"""The law of plans that are carried over: a plan by hand serves evaluation, prediction and other sizes with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, event, given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests.captures import captured_once
from tests.distributed.split_training import cut_anew
from tests.distributed.test_unlike_replicas import unlike
from tests.distributed.training import make_cluster
from tests.examples import at_most
from tests.models import MORE_BLOCKS, Block, Description, build, descriptions, make_batch
from tests.wire import Device, on_devices
from whale.api.mode import ModeName
from whale.axes import discover
from whale.capture import CapturedProgram
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Replica, Shard, Stage
from whale.planning import carry_plan, make_plan, retarget_plan
from whale.runtime.execute.rank_stages import shards_of
from whale.runtime.program.lowering import StageProgram
from whale.runtime.program.shard import GROUP
from whale.runtime.program.stage_source import StageSource
from whale.runtime.state.holdings import Holdings

NUM_ROWS = 14


@dataclass(frozen=True)
class Carried:
    """A plan for another capture of the model that it was made for.

    Attributes:
        plan: for the capture.
        holdings: of the training.
        model, program: the capture.
        values: of its placeholders.
    """

    plan: Plan
    holdings: Holdings
    model: ModelGraph
    program: CapturedProgram
    values: Mapping[str, Any]

    def lowered(self, replica: Replica, stage: Stage, position: int) -> StageProgram:
        """The program of a device."""
        shards = shards_of(replica, stage, self.model, discover(self.model), self.holdings, position)
        captured = SimpleNamespace(graph=self.model, graph_for=lambda _: self.program.graph)
        source = StageSource(captured, replica, stage, set(), torch.device("cpu"), False, shards)
        return source(NUM_ROWS)

    def returned(self, replica: Replica) -> dict[str, Tensor | int]:
        """What the stages of a replica return, one after another; devices of a split group are threads."""
        found: dict[str, Tensor | int] = {}
        for stage in replica.stages:
            run = partial(self._run, replica, stage, dict(found))
            made = [run(None)] if stage.split == 1 else on_devices(run, range(stage.split))
            for other in made[1:]:
                torch.testing.assert_close(other, made[0], rtol=0, atol=0)
            found |= made[0]
        return found

    @torch.no_grad()
    def _run(self, replica: Replica, stage: Stage, received: Mapping[str, Tensor | int], device: Device | None) -> dict[str, Tensor | int]:
        program = self.lowered(replica, stage, 0 if device is None else device.position)
        arguments = self._arguments(program, replica, stage, device, received)
        return dict(zip(program.outputs, program.module(*arguments), strict=True))

    def _arguments(
        self, program: StageProgram, replica: Replica, stage: Stage, device: Device | None, received: Mapping[str, Tensor | int]
    ) -> list[object]:
        lacks = self.holdings.lacks(replica.index, stage)
        rank = self.plan.rank_of[stage.virtual_device.devices[0 if device is None else device.position]]
        found: list[object] = []
        for name, kind, key in zip(program.inputs, program.kinds, program.keys, strict=True):
            if kind == GROUP:
                found.append(device)
            elif kind in ("parameter", "buffer") and key not in lacks:
                found.append(self.holdings.cut_out(key, rank, self.values[name]))
            else:
                found.append(received[name] if kind == "received" else self.values[name])
        return found

    def check(self) -> None:
        """What stages return is what the whole program returns; of stages that divide rows, that there are programs."""
        stages = [(replica, stage) for replica in self.plan.replicas for stage in replica.stages]
        if any(shard.axis == BATCH for _, stage in stages for shard in stage.shards):
            for replica, stage in stages:
                for position in range(stage.split):
                    self.lowered(replica, stage, position)
            return
        with torch.no_grad():
            whole = self.program.module()(*self.values.values())
        names = [str(node) for node in self.program.graph.output_node().args[0]]
        expected = {name: value for name, value in zip(names, whole, strict=True) if self.model.by_name[name].kind == "call"}
        for replica in self.plan.replicas:
            found = self.returned(replica)
            assert expected.keys() <= found.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_a_last_stage_without_ops(mode: str) -> None:
    """Its training divides a sequence that a convolution of the first stage makes whole."""
    blocks = (Block("convolution"), Block("convolution", repeats=2))
    description = Description(tokens=True, blocks=blocks, extra_at=1, tied=True, loss="mse")
    made = captured_once(build, description, 0, NUM_ROWS)
    (train, _), (other, program) = made.capture(), made.capture(mode)
    config = whale.Config({"replicas": [{"num_stages": 2, "split": 2, "num_micro_batch": 1}]})
    plan = make_plan(train, make_cluster((1.0,) * 4), config)
    first, last = plan.replicas[0].stages
    last = replace(last, shards=(Shard("values:1", (1, 2)),))
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=(first, last)),))
    carried = retarget_plan(plan, train, other)
    assert [bool(stage.ops) for stage in carried.replicas[0].stages] == [True, False]
    Carried(carried, Holdings.of(plan, train, discover(train)), other, program, program.values(made.batch)).check()


class Turned(nn.Module):
    """Layers, of which an evaluation calls the first one last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        for layer in (first, *rest) if self.training else (*rest, first):
            x = layer(x).tanh()
        return x


def turned() -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    return Turned().double(), torch.randn(NUM_ROWS, 64, dtype=torch.float64), lambda output, batch: F.mse_loss(output, batch)


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_a_stage_borrows_what_another_stage_of_its_devices_holds_in_parts(mode: str) -> None:
    """The first and the last stage are on the same devices; in other modes the last one reads all of what the first one holds."""
    made = captured_once(turned)
    (train, _), (other, program) = made.capture(), made.capture(mode)
    config = whale.Config({"replicas": [{"num_stages": 2, "split": 2, "num_micro_batch": 2, "schedule": "zb_v"}]})
    plan = make_plan(train, make_cluster((1.0,) * 4), config)
    carried = retarget_plan(plan, train, other)
    first, *_, last = carried.replicas[0].stages
    assert first.virtual_device == last.virtual_device and set(first.parameters) < set(last.parameters) and not first.ops
    Carried(carried, Holdings.of(plan, train, discover(train)), other, program, program.values(made.batch)).check()


@at_most(15, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_plan_serves_other_modes_and_sizes(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from((("convolution", "pool", "linear"), (*MORE_BLOCKS, "batch_norm"))))
    description = replace(data.draw(descriptions(kinds=kinds)), placement="none", copies=None, as_tuple=False)
    kind = data.draw(st.sampled_from(("2 x 2", "2 x 2", "1 x 2", "1 x 3", "joined")))
    num_stages, split = (2, 1) if kind == "joined" else map(int, kind.split(" x "))
    replica = {"num_stages": num_stages, "split": split, "num_micro_batch": 1}
    case = unlike(*[replica] * (2 if kind == "joined" else 1), rows=(NUM_ROWS,))
    case = replace(case, description=description, seed=data.draw(st.integers(0, 999)))
    made = captured_once(build, description, case.seed, NUM_ROWS)
    train, _ = made.capture()
    try:
        planned = make_plan(train, make_cluster(case.speeds), whale.Config(dict(case.config)))
    except (whale.PlanError, whale.AnnotationError) as error:  # too few places to cut at, or nothing to split
        note(str(error))
        assume(False)
        raise
    longer = description.sequence + data.draw(st.integers(-1, 3))
    mode: ModeName = data.draw(st.sampled_from(("train", "eval", "predict")))
    has_other_sizes = mode == "train" or data.draw(st.booleans())
    batch = make_batch(replace(description, sequence=longer), NUM_ROWS, case.seed) if has_other_sizes else made.batch
    other, program = made.capture(mode, batch)
    for bridged in (False, True):
        plan = cut_anew(planned, train, case, bridged=bridged)
        note(f"{case!r}\n{plan}")
        carried = (carry_plan if mode == "train" else retarget_plan)(plan, train, other)
        is_full = all(stage.ops for replica in carried.replicas for stage in replica.stages)
        event(f"{mode}, {'all stages have ops' if is_full else 'a stage has none'}")
        Carried(carried, Holdings.of(plan, train, discover(train)), other, program, program.values(batch)).check()
