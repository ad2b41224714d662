"""Repeated blocks: the graph of a deeper model, as its own capture says it."""

from __future__ import annotations

import contextlib
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale
from tests.examples import slow
from whale.capture import capture
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph
from whale.workloads import repeat_blocks
from whale.workloads.repeat import count_blocks


class Block(nn.Module):
    """Norm, layers, dropout and a residual; checkpointed on demand."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.relu(self.up(self.norm(x)))), 0.1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return x * scale


class Tower(nn.Module):
    """Blocks between two layers, all of which read one value of the first."""

    def __init__(self, layers: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block(16, checkpointed) for _ in range(layers))
        self.last_norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = x.sigmoid()
        for block in self.blocks:
            x = block(x, scale)
        out: Tensor = self.last(self.last_norm(x))
        return out


def of(model: nn.Module) -> ModelGraph:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["y"])

    return capture(model, {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.long)}, loss)[0]


@cache
def tower(layers: int, checkpointed: bool) -> ModelGraph:
    return of(Tower(layers, checkpointed))


@pytest.mark.parametrize(("captured", "layers"), [(2, 4), slow(2, 5), slow(3, 5)])
@pytest.mark.parametrize("checkpointed", [False, slow(True)])
def test_it_is_the_graph_of_the_deeper_model(captured: int, layers: int, checkpointed: bool) -> None:
    assert repeat_blocks(tower(captured, checkpointed), layers) == tower(layers, checkpointed)


def test_as_many_blocks_as_there_are_change_nothing() -> None:
    assert repeat_blocks(tower(2, False), 2) is tower(2, False)


def test_fewer_blocks_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"--blocks 2 is fewer than the 4 blocks"):
        repeat_blocks(tower(4, False), 2)
    with pytest.raises(CaptureError, match=r"1000000 blocks are more than 10,000"):
        repeat_blocks(tower(4, False), 1_000_000)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(CaptureError, match="the model has no repeated blocks"):
        repeat_blocks(tower(1, False), 4)


class Dense(nn.Module):
    """What is behind the blocks reads each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x).relu()
            found.append(x)
        out: Tensor = self.last(torch.cat(found, 1))
        return out


def test_blocks_that_are_read_from_behind_do_not_count_as_repeated() -> None:
    with pytest.raises(CaptureError, match="the model has no repeated blocks"):
        repeat_blocks(of(Dense()), 6)


class Scoped(nn.Module):
    """Scopes around the first layer, inside each block (one of them inside the other), around all blocks, and around the last layer."""

    def __init__(self, layers: int, around: str) -> None:
        super().__init__()
        self.around = around
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(layers))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def block(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        up, middle, down = layers
        with whale.replicate(2):
            x = up(x).relu()
            with whale.split(2):
                x = middle(x)
        with whale.split(2):
            pass  # a number without ops
        return torch.tanh(x) + down(x)

    def forward(self, x: Tensor) -> Tensor:
        with whale.replicate(1):
            x = self.first(x)
        with whale.replicate(2, name="all") if self.around else contextlib.nullcontext():
            for layers in self.blocks:
                x = self.block(layers, x)
        with whale.split(2):
            out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("around", ["", slow("all")])
def test_scopes_inside_blocks_are_in_each_block_anew(around: str) -> None:
    deep = of(Scoped(5, around))
    assert len({scope.key for op in deep.ops for scope in op.scope}) == 12 + (around == "all")
    assert repeat_blocks(of(Scoped(2, around)), 5) == deep


class Staged(nn.Module):
    """Four equal blocks: three under one scope, and one under another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with whale.replicate(1):
            x = torch.tanh(self.first(x))
            for block in self.blocks[:3]:
                x = block(x).relu()
        with whale.replicate(1):
            out: Tensor = self.last(self.blocks[3](x).relu())
        return out


def test_blocks_of_another_stage_are_not_repeated() -> None:
    graph = of(Staged())
    assert count_blocks(graph) == 3
    first = next(scope.key for op in graph.ops for scope in op.scope)
    linear = [op for op in repeat_blocks(graph, 5).ops if op.operator == "linear"]
    assert sum(first in {scope.key for scope in op.scope} for op in linear) == 6  # with the one before the blocks
