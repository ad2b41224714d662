"""Two halves that take turns: one's messages travel while the other computes, forward and backward; together they are the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parts import cut_out
from tests.wire import Device, on_devices
from whale.axes import Axes, discover
from whale.axes.batch import halve
from whale.capture import CapturedProgram, capture
from whale.ir.graph import ModelGraph
from whale.ir.plan import Shard
from whale.runtime.program.lowering import StageProgram, StageShards, lower
from whale.runtime.program.marks import HALF, op_of
from whale.runtime.program.shard.communication import finish, start

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks; the second input has its rows in another dimension, a buffer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x) + self.shift, y)


CUTS = tuple(Shard(f"blocks.{index}.up.weight:0", (3, 7)) for index in range(3))


@cache
def captured() -> tuple[ModelGraph, CapturedProgram, Axes]:
    torch.manual_seed(0)
    model = Model().double()
    rows = torch.randn(4, 3, 6).double(), torch.randn(4, 3, 6).double()
    graph, program = capture(model, rows, lambda output, _: output)
    return graph, program, discover(graph)


def lowered(position: int | None, *, halved: bool = False) -> StageProgram:
    graph, program, axes = captured()
    ops = [op.name for op in graph.ops if op.kind == "call"]
    terms = [name for term in graph.loss for name in (term.sum, term.weight) if name is not None]
    halving = halve(graph, axes, ops, CUTS, terms) if halved else None
    shards = None if position is None else StageShards(axes, CUTS, position)
    return lower(program.graph, graph, ops, (), terms, torch.device("cpu"), shards=shards, halving=halving)


def test_between_the_ends_of_every_message_the_other_half_computes() -> None:
    nodes = list(lowered(0, halved=True).module.graph.nodes)
    begun = {node: index for index, node in enumerate(nodes) if node.target is start}
    assert len(begun) == 2 * 6  # a block is entered and left
    between = 0
    for index, node in enumerate(nodes):
        if node.target is finish:
            (source,) = node.all_input_nodes
            halves = {found.meta.get(HALF) for found in nodes[begun[source] + 1 : index]}
            assert node.meta[HALF] not in halves
            between += 1 - node.meta[HALF] in halves
    assert between >= 2 * 6 - 2  # but for the last ones


def test_what_has_no_rows_is_computed_once() -> None:
    program = lowered(0, halved=True)
    assert program.inputs == lowered(0).inputs
    computed = Counter(op_of(node) for node in program.module.graph.nodes)
    assert computed["linear"] == 2
    given = Counter(node.target for node in program.module.graph.find_nodes(op="placeholder"))
    assert given["p_blocks_0_up_weight"] == 1


class Logged(Device):
    """A device that writes down when messages are begun and waited for."""

    def __init__(self, device: Device) -> None:
        vars(self).update(vars(device), log=[])

    log: list[tuple[str, str]]

    def all_reduce(self, total: Tensor, own: Tensor, how: Any, what: str) -> Callable[[], None]:
        arrival = super().all_reduce(total, own, how, what)
        self.log.append(("begin", what))

        def wait() -> None:
            self.log.append(("wait", what))
            arrival()

        return wait


def run(device: Device | None, rows: int, *, halved: bool = False) -> tuple[float, dict[str, Tensor], list[tuple[str, str]]]:
    """Loss sum, gradients (whole ones, or the parts of a device) and log."""
    _, program, axes = captured()
    stage = lowered(None if device is None else device.position, halved=halved)
    group = None if device is None else Logged(device)
    draw = torch.Generator().manual_seed(1)  # of its own: the devices are threads
    x, y = (torch.randn(rows, 3, 6, generator=draw).double() for _ in range(2))
    given: dict[str, Any] = {"input_0": x, "input_1": y, "num_rows": rows}
    own: dict[str, Tensor] = {}
    for name, value in program.tensors.items():
        part = value if device is None else part_of(name, value, axes, device.position)
        own[name] = part.detach().clone().requires_grad_(name != "shift")
    known: dict[str, Any] = {**given, "split_group": group}
    values = stage.module(*(own[program.sources[name]] if name in program.sources else known[name] for name in stage.inputs))
    torch.autograd.backward(values[0])
    gradients = {name: value.grad for name, value in own.items() if value.grad is not None}
    return values[0].item(), gradients, [] if group is None else group.log


def part_of(name: str, value: Tensor, axes: Axes, position: int) -> Tensor:
    return cut_out(value, axes.parameters[name], axes, CUTS, position) if name in axes.parameters else value


@pytest.mark.parametrize("rows", [4, 5, 2])
def test_the_halves_are_the_whole(rows: int) -> None:
    """On parts of unlike sizes, for even and odd numbers of rows."""
    loss, gradients, _ = run(None, rows)
    axes = captured()[2]
    for position, (found, parts, _) in enumerate(on_devices(lambda device: run(device, rows, halved=True), (0, 1))):
        assert found == pytest.approx(loss, rel=1e-12)
        assert parts.keys() == gradients.keys()
        for name, expected in gradients.items():
            torch.testing.assert_close(parts[name], part_of(name, expected, axes, position), rtol=1e-10, atol=1e-12)


def test_messages_travel_while_the_other_half_goes_on() -> None:
    """Between the beginning of a message and the wait for it stands the beginning of another, but for the last one each way."""
    captured()  # by one thread: the devices are several
    for _, _, log in on_devices(lambda device: run(device, 4, halved=True), (0, 1)):
        alone = [what for (kind, what), (after, _) in pairwise(log) if kind == "begin" and after == "wait"]
        assert sum(kind == "begin" for kind, _ in log) == 2 * 6
        assert len(alone) <= 2 * 3, log
        assert sorted(what for kind, what in log if kind == "begin") == sorted(what for kind, what in log if kind == "wait")
    for _, _, log in on_devices(lambda device: run(device, 4), (0, 1)):
        assert [kind for kind, _ in log] == ["begin", "wait"] * 6


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return (hidden - hidden.mean(0)).square().mean()


def test_samples_that_are_mixed_are_not_halved() -> None:
    graph, _ = capture(Mixer(), (torch.randn(4, 3),), lambda output, _: output)
    ops = [op.name for op in graph.ops if op.kind == "call"]
    faults = halve(graph, discover(graph), ops, (), [term.sum for term in graph.loss]).faults
    assert any("combines samples" in fault for fault in faults)
