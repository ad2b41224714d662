"""Gathered inputs that are kept in parts: the same numbers bit for bit, one gather more each in the backward pass, and less kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parts import cut_out
from tests.wire import Device, on_devices
from whale.axes import Axes, discover
from whale.axes.values import axes_of
from whale.capture import CapturedProgram, capture
from whale.deferred import WeightQueue
from whale.ir.graph import ModelGraph
from whale.ir.plan import Shard
from whale.runtime.program.lowering import StageProgram, StageShards, lower
from whale.runtime.program.regather import KeepingParts, RegatheredWhole

torch.set_num_threads(1)


class Model(nn.Module):
    """Two branches read one normalised tensor; what the second one reads is reshaped first. The end is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        entered = self.norm(x)
        gate = self.gate(entered.flatten(0, 1)).unflatten(0, entered.shape[:2])
        return F.mse_loss(x + self.down(F.gelu(self.up(entered)) * gate), y)


@cache
def captured() -> tuple[ModelGraph, CapturedProgram, Axes]:
    torch.manual_seed(0)
    rows = torch.randn(4, 3, 6).double(), torch.randn(4, 3, 6).double()
    graph, program = capture(Model().double(), rows, lambda output, _: output)
    return graph, program, discover(graph)


def cuts() -> tuple[Shard, ...]:
    """Positions between the products, features inside."""
    graph, _, axes = captured()
    features = [op.name for op in graph.ops if op.kind == "call" and op.name in axes.ops and "up.weight:0" in axes.ops[op.name].roles]
    down = next(op.name for op in graph.ops if op.operator == "linear" and "p_down_weight" in op.inputs)
    views = [op.name for op in graph.ops if "view" in op.tags]
    return (
        Shard("up.weight:0", (3, 7)),
        Shard("input_0:1", (1, 2), whole_in=(*features, *views), scattered=(down,)),
    )


def lowered(position: int | None, *, again: bool, waits: bool) -> StageProgram:
    graph, program, axes = captured()
    ops = [op.name for op in graph.ops if op.kind == "call"]
    terms = [name for term in graph.loss for name in (term.sum, term.weight) if name is not None]
    shards = None if position is None else StageShards(axes, cuts(), position)
    last = [name for name in ops if graph.by_name[name].operator in ("mse_loss", "sub", "square")][-1:]
    segments = [last] if again else []
    return lower(program.graph, graph, ops, (), terms, torch.device("cpu"), shards=shards, segments=segments, splits_backward=waits)


def run(device: Device | None, *, again: bool = False, waits: bool = False) -> tuple[dict[str, Tensor], list[str], int]:
    """Loss sum and gradients (whole ones, or the parts of a device), what was gathered backward, and bytes kept of whole inputs."""
    _, program, axes = captured()
    stage = lowered(None if device is None else device.position, again=again, waits=waits)
    queue = WeightQueue()
    draw = torch.Generator().manual_seed(1)  # of its own: the devices are threads
    x, y = (torch.randn(4, 3, 6, generator=draw).double() for _ in range(2))
    given: dict[str, Any] = {"input_0": x, "input_1": y, "num_rows": 4, "split_group": device, "weight_queue": queue}
    own: dict[str, Tensor] = {}
    for name, value in program.tensors.items():
        part = value if device is None else cut_out(value, axes.parameters[name], axes, cuts(), device.position)
        own[name] = part.detach().clone().requires_grad_()
    kept = dict[int, int]()

    def note(value: Tensor) -> Tensor:
        if value.numel() == x.numel() and value.untyped_storage().data_ptr() not in (x.data_ptr(), y.data_ptr()):
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        values = stage.module(*(own[program.sources[name]] if name in program.sources else given[name] for name in stage.inputs))
    if device is not None:
        device.enter_phase("backward")
    torch.autograd.backward(values[0])
    queue.run()
    found = {name: value.grad for name, value in own.items() if value.grad is not None} | {"loss": values[0].detach()}
    moved = [] if device is None else [each.what for each in device.messages if each.phase == "backward"]
    return found, moved, sum(kept.values())


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "weight gradients wait"])
def test_what_is_kept_in_parts_is_gathered_again(waits: bool) -> None:
    expected, _, _ = run(None)
    kept, parts = (on_devices(lambda device, a=again: run(device, again=a, waits=waits), (0, 1), is_gloo=False) for again in (False, True))
    _, _, axes = captured()
    for name, value in expected.items():
        found = [own[name] for own, _, _ in parts]
        if any(shard.axis in axes_of(dimension) for shard in cuts() for dimension in axes.parameters.get(name, ())):
            for position, own in enumerate(found):
                torch.testing.assert_close(own, cut_out(value, axes.parameters[name], axes, cuts(), position), rtol=1e-10, atol=1e-12)
        elif name != "loss":  # the devices have terms of it, which are summed once per step
            torch.testing.assert_close(found[0] + found[1], value, rtol=1e-10, atol=1e-12)
    for (first, moved, whole), (again, moved_again, in_parts) in zip(kept, parts, strict=True):
        assert all(torch.equal(again[name], own) for name, own in first.items())
        gathers = [sum(what.startswith("all-gather") for what in each) for each in (moved, moved_again)]
        assert gathers[1] - gathers[0] == 2, "for either form once"
        assert whole == 2 * 4 * 3 * 6 * 8 and in_parts == 0


@pytest.mark.parametrize("contents", [nullcontext(), FakeTensorMode()], ids=["real", "without contents"])
def test_what_lies_elsewhere_is_kept(contents: AbstractContextManager[object]) -> None:
    nothing: Any = None
    with contents:
        part = torch.ones(4, 6)
        gathered = torch.cat([part, part]).requires_grad_()
        whole = RegatheredWhole(gathered, part, slots=nothing, group=nothing, what="all-gather")
        assert whole.holds(gathered) and whole.holds(gathered.flatten(0, 1)) and not whole.holds(torch.ones(8, 6))
        result = KeepingParts(torch.softmax)((whole,), gathered, -1)
        kept: Tensor = result.grad_fn._saved_result
        assert kept.untyped_storage()._cdata == result.untyped_storage()._cdata, "what softmax made was never gathered"
        del gathered, result, kept
        assert not any(whole.holds(each) for each in [torch.ones(8, 6) for _ in range(64)]), "whatever comes to lie in its place"
