"""Kernels of a compiled graph: what each reads and writes, and what the backward pass keeps, as torch's own partitioner has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.planning.graphs import Graph
from whale.capture import capture
from whale.estimate.costs.fusion import fused, kept_by_kernels
from whale.estimate.costs.op_table import op_table, output_lines
from whale.estimate.memory.memory import kept_tensors
from whale.ir.graph import ModelGraph
from whale.runtime.program.randomness import dropout

ROWS, WIDTH = 64, 48


class ByFormula(nn.Module):
    """GELU as GPT-2 writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


class Dropped(nn.Module):
    """GELU and dropout; compiled as a stage's program has it."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x)
        if torch.compiler.is_dynamo_compiling():
            return dropout(x, 0.1, torch.zeros((), dtype=torch.long))
        return F.dropout(x, 0.1)


class Block(nn.Module):
    def __init__(self, activation: nn.Module, in_half: bool) -> None:
        super().__init__()
        self.norm, self.activation, self.in_half = nn.LayerNorm(WIDTH), activation, in_half
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x))
        if self.in_half:
            inner = self.activation(inner.bfloat16().float() * 2).bfloat16().float()
        return x + self.down(self.activation(inner))


class Blocks(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module], in_half: bool = False, is_cast: bool = False) -> None:
        super().__init__()
        self.is_cast = is_cast
        self.blocks = nn.ModuleList(Block(activation(), in_half) for _ in range(3))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_cast):
            x = x + self.first(x)
            for block in self.blocks:
                x = block(x)
            found: Tensor = self.last(x).float().softmax(-1)
        return found


MODELS = {
    "formula": lambda: Blocks(ByFormula),
    "relu": lambda: Blocks(nn.ReLU),
    "gelu": lambda: Blocks(nn.GELU),
    "dropout": lambda: Blocks(Dropped),
    "casts": lambda: Blocks(ByFormula, in_half=True),
    "autocast": lambda: Blocks(nn.GELU, is_cast=True),
}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def saved_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """What a compiled model keeps for its backward pass of rows, but for the batch; no weights, or casts of them."""
    torch._dynamo.reset()
    run = torch.compile(lambda x, y: loss(model(x), {"y": y}), backend="aot_eager_decomp_partition")
    given = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *batch.values())}
    seen: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        if (place := value.untyped_storage().data_ptr()) not in given and ROWS in value.shape:
            seen[place] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        run(batch["x"], batch["y"])
    return sum(seen.values())


def planned_bytes(graph: ModelGraph, *, compiled: bool) -> float:
    kept, sizes = dict(kept_tensors(graph)), output_lines(graph)
    found = kept_by_kernels(graph, sizes, kept) if compiled else kept
    return sum(sizes[name].at(ROWS) for name in {name for names in found.values() for name in names})


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_is_what_torch_keeps(name: str) -> None:
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}
    model = MODELS[name]()
    graph, _ = capture(model, batch, loss)
    planned, saved = planned_bytes(graph, compiled=True), saved_bytes(model, batch)
    assert (0.98 if name == "autocast" else 0.95) * saved <= planned <= (1.25 if name == "casts" else 1.05) * saved


def test_a_formula_is_one_kernel_which_keeps_what_products_read() -> None:
    graph, _ = capture(Blocks(ByFormula), {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}, loss)
    alone, together = op_table(graph), op_table(graph, fused=True)
    assert alone.launches.sum() - together.launches.sum() >= 3 * 8, "of each block 7 of its GELU, and its sum or normalisation"
    inner = [name for name, number in fused(graph).of.items() if number == fused(graph).of["tanh"]]
    assert len(inner) == 8, "pow, mul, add, mul, tanh, add, mul, mul"
    wide = ROWS * 4 * WIDTH * 4
    assert together.bytes_per_row[[graph.position[name] for name in inner]].sum() * ROWS == 2 * wide, "reads one, writes one"
    assert planned_bytes(graph, compiled=True) < planned_bytes(graph, compiled=False) / 2


def test_no_kernel_waits_for_itself() -> None:
    """A residual: the second sum reads the first one, directly and through a product."""
    graph = Graph()
    graph.call("first", "aten.add.Tensor", graph.linear("layer0", graph.input("x")), graph.linear("layer1", "x"), tags=("pointwise",))
    graph.call("second", "aten.add.Tensor", "first", graph.linear("layer2", "first"), tags=("pointwise",))
    graph.sum_loss(graph.linear("layer3", "second"))
    kernels = fused(graph.build())
    assert kernels.of["first"] != kernels.of["second"] and {"first", "second"} <= kernels.writes


@pytest.mark.parametrize(("op", "num_kernels"), [("alpha_dropout", 3), ("dropout", 1), ("dropout_", 1)])
def test_what_draws_from_the_generator_is_a_kernel_of_its_own(op: str, num_kernels: int) -> None:
    graph = Graph()
    h = graph.linear("layer0", graph.input("x"))
    graph.call("before", "aten.tanh.default", h, tags=("pointwise",))
    graph.call("dropped", f"aten.{op}.default", "before", tags=("random", "pointwise", *(["in_place"] if op.endswith("_") else [])))
    graph.call("after", "aten.tanh.default", "dropped", tags=("pointwise",))
    graph.sum_loss(graph.linear("layer1", "after"))
    kernels = fused(graph.build())
    assert len({kernels.of[name] for name in ("before", "dropped", "after")}) == num_kernels
