"""Lowered graphs as texts and facts: what is entered, what is refused and in which words, which operators are known."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from whale.axes import Axes, discover
from whale.axes.operators import OPERATORS, entry_of
from whale.axes.values import axes_of
from whale.capture import capture
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Shard
from whale.runtime.program.lowering import lower
from whale.runtime.program.marks import op_of
from whale.runtime.program.shard import ShardProgram, lower_shards
from whale.runtime.program.shard.communication import enter, leave
from whale.runtime.program.shard.layout import ShardLayout

torch.set_num_threads(1)


class Block(nn.Module):
    """A feed-forward block with everything that matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.gain, self.both = nn.Parameter(torch.ones(1, 10)), nn.Parameter(torch.ones(()))
        self.offset = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x))) * self.gain + self.offset
        return F.mse_loss(self.down(hidden * self.both) * self.both, y)


Captured = tuple[ModelGraph, Axes, fx.Graph]


@pytest.fixture(scope="module")
def block() -> Captured:
    return _captured(Block(), (torch.randn(3, 4, 6), torch.randn(3, 4, 6)))


def _captured(model: nn.Module, batch: Any) -> Captured:
    graph, program = capture(model, batch, lambda output, _: output)
    names = [op.name for op in graph.ops if op.kind == "call"]
    stage = lower(program.graph, graph, names, (), [graph.loss[0].sum], torch.device("cpu"))
    return graph, discover(graph), stage.module.graph


def _lowered(captured: Captured, *shards: Shard) -> ShardProgram:
    graph, axes, local = captured
    return lower_shards(local, graph, axes, shards, 0)


HIDDEN = Shard("gain:1", (3, 7))


def test_one_entrance_and_one_exit_per_feed_forward(block: Captured) -> None:
    program = _lowered(block, HIDDEN)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(leave) == 1
    entered = [node for node in program.graph.nodes if node.target is enter]
    assert [node.args[0].name for node in entered] == ["layer_norm", "p_both"]
    assert set(program.parameters) == {"up.weight", "up.bias", "down.weight", "gain"}
    assert program.graph.find_nodes(op="placeholder")[0].name == "split_group"


class Smoothed(nn.Module):
    """A convolution, which needs the sequence whole, and a loss that can work on parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 5, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), y)


def test_ops_of_other_stages_do_not_refuse_the_cuts_of_a_stage_without_ops() -> None:
    """As an evaluation leaves one: it runs all that reads a shared parameter on the first of the stages that hold it."""
    graph, axes, _ = _captured(Smoothed(), (torch.randn(3, 4, 6), torch.randn(3, 5, 6)))
    (op,) = [op for op in graph.ops if op.target.startswith("aten.conv1d")]
    (sequence,) = axes.ops[op.name].outputs[0][2]
    assert axes.ops[op.name].roles[str(sequence)].kind == "whole"
    empty = fx.Graph()
    empty.output(())
    program = lower_shards(empty, graph, axes, (Shard(str(sequence), (2, 4)),), 0)
    assert [node.op for node in program.graph.nodes] == ["placeholder", "output"]
    assert not program.parameters and not program.partial


def test_gradients_of_parameters_read_by_parts_alone_are_partial(block: Captured) -> None:
    """`offset` is; `both` is read whole too, so it is entered; the bias of `down` is added after the sum."""
    graph, axes, local = block
    assert _lowered(block, HIDDEN).partial == {"offset"}
    complete = lower_shards(local, graph, axes, (HIDDEN,), 1, complete=["offset"])
    assert not complete.partial
    (entered,) = [node for node in complete.graph.nodes if node.target is enter and node.args[0].target == "p_offset"]
    assert op_of(entered) is None


class Written(nn.Module):
    """Writes through one view; another is made when all is written."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(6, 10), nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.up(x) * self.gain
        before = hidden.view(-1, 40)
        before.mul_(2)
        after = hidden.view(-1, 40)
        return F.mse_loss(before + after, y)


def test_a_view_may_be_a_copy_where_nobody_writes_through_it_later() -> None:
    """A part is not always laid out as the whole, so a view of it may not be possible."""
    program = _lowered(_captured(Written(), (torch.randn(3, 4, 6), torch.randn(3, 40))), Shard("gain:0", (3, 7)))
    shaped = [node.target for node in program.graph.nodes if node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default)]
    assert shaped == [torch.ops.aten.view.default, torch.ops.aten.reshape.default]


def test_the_given_graph_stays_as_it_is(block: Captured) -> None:
    before = str(block[2])
    _lowered(block, HIDDEN)
    assert str(block[2]) == before


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ((Shard("nonsense", (1, 2)),), "the cut names 'nonsense', which is not an axis of the model"),
        ((Shard("batch", (1, 2)),), "a split cannot cut the batch"),
        ((Shard("gain:1", (4, 7)),), "gain:1 4:7 add up to 11, not the 10 of gain:1"),
        ((Shard("gain:1", (0, 10)),), "cut gain:1 0:10 gives a device of the split group nothing"),
        ((HIDDEN, Shard("input_0:1", (1, 1, 2))), "cuts input_0:1 1:1:2 and gain:1 3:7 of one stage have different numbers of sizes"),
        ((HIDDEN, Shard("input_0:1", (1, 3))), "meets two axes that are cut"),
        ((Shard("norm.weight:0", (2, 4)),), "aten.layer_norm.default (%layer_norm) needs norm.weight:0 whole, which is cut"),
    ],
)
def test_what_cannot_be_is_refused_in_words(block: Captured, shards: tuple[Shard, ...], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        _lowered(block, *shards)
    assert words in str(caught.value)


def test_refusals_name_the_users_line(block: Captured) -> None:
    with pytest.raises(PlanError) as caught:
        _lowered(block, Shard("norm.weight:0", (2, 4)))
    assert "test_lower.py:" in str(caught.value)


def test_an_operator_without_a_lowering_is_refused(block: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = replace(entry_of("aten.linear.default"), on_parts=None)
    monkeypatch.setattr("whale.runtime.program.shard.lower.operator_of", lambda op: unknown)
    with pytest.raises(PlanError, match=r"aten.linear.default \(%linear\) cannot be cut along gain:1: it has no lowering"):
        _lowered(block, HIDDEN)


def test_every_entry_names_a_lowering_that_there_is() -> None:
    named = {entry.on_parts for entry in OPERATORS.values() if entry.on_parts is not None}
    missing = []
    for name in named:
        file, _, function = name.partition(".")
        if not callable(getattr(import_module(f"whale.runtime.program.shard.{file}"), function, None)):
            missing.append(name)
    assert not missing


class Merged(nn.Module):
    """Rows and hidden features in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outside = self.up(x).reshape(-1)
        inside = self.up(x).permute(1, 2, 0).reshape(5, -1)
        return (outside.sin().sum() + inside.cos().sum() + y.sum()) / 2


def test_what_is_held_of_a_dimension_with_rows() -> None:
    graph, axes, local = _captured(Merged(), (torch.randn(3, 5, 6), torch.randn(3)))
    shard = Shard("up.weight:0", (1, 3))
    layout = ShardLayout(graph, axes, (shard,), 1, list(axes.ops))
    held = {
        name: layout.held(dims[-1], shard.axis)
        for name, dims in ((op, axes.ops[op].outputs[0]) for op in axes.ops)
        if dims and shard.axis in axes_of(dims[-1])
    }
    outside, inside = (next(h for n, h in held.items() if n.startswith("sin")), next(h for n, h in held.items() if n.startswith("cos")))
    assert (outside.units, outside.count, outside.rows_outside, outside.has_rows) == (20, 15, True, True)
    assert (inside.units, inside.count, inside.rows_outside, inside.has_rows) == (4, 3, False, True)
    lower_shards(local, graph, axes, (shard,), 0)
