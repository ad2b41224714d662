"""Runs a captured program in one process and compares it with the unmodified model: loss, gradients, buffers, op facts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.capture import CapturedProgram
from whale.ir.graph import ModelGraph, Op


def loss_of(graph: ModelGraph, returned: tuple[Any, ...]) -> Tensor:
    """The loss from what a program returns."""
    values = iter(returned)
    total = torch.zeros(())
    for term in graph.loss:
        piece = next(values)
        weight = torch.as_tensor(1.0 if term.weight is None else next(values)) + term.offset
        weight = weight if term.minimum is None else weight.clamp(min=term.minimum)
        total = total + term.coefficient * piece / weight
    return total


class Checked(fx.Interpreter):
    """Runs a program and compares every value with what its op says of it."""

    def __init__(self, graph: ModelGraph, program: CapturedProgram, num_rows: int) -> None:
        super().__init__(program.module())
        self._ops = graph.by_name
        self._num_rows = num_rows
        self._made: list[tuple[Op, list[Tensor]]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            return value
        op = self._ops[n.name]
        items = value if isinstance(value, (tuple, list)) else (value,)
        tensors = [item for item in items if isinstance(item, Tensor)]
        assert len(tensors) == len(op.outputs), op
        self._made.append((op, tensors))
        for tensor, spec in zip(tensors, op.outputs, strict=True):
            assert str(tensor.dtype) == f"torch.{spec.dtype}", op
            if -1 not in spec.row_factors:
                assert tuple(tensor.shape) == spec.shape_at(self._num_rows), op
        return value

    def check_gradients(self) -> None:
        """Which values have gradients; known only when all in-place ops have run."""
        for op, tensors in self._made:
            assert any(tensor.requires_grad for tensor in tensors) == op.requires_grad, op


def assert_same(
    model: nn.Module,
    graph: ModelGraph,
    program: CapturedProgram,
    batch: Any,
    eager: Callable[[nn.Module, Any], Tensor],
    tolerance: float = 1e-6,
) -> None:
    """The program's loss, gradients and buffers equal the model's on this batch; ops are what they are said to be."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    torch.manual_seed(0)
    expected = eager(reference, batch)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}

    own = copy.deepcopy(model)  # holds the program's changes to buffers
    own.zero_grad()
    mine = dict(own.named_parameters(remove_duplicate=False)) | dict(own.named_buffers(remove_duplicate=False))
    tensors: Mapping[str, Tensor] = {**program.tensors, **mine}
    bound = CapturedProgram(program.graph, tensors, program.batch, program.sources)
    torch.manual_seed(0)
    with torch.enable_grad():
        checked = Checked(graph, bound, program.batch.rows(batch))
        loss = loss_of(graph, checked.run(*bound.values(batch).values()))
        checked.check_gradients()
    close(loss, expected, tolerance, "loss")
    loss.backward()
    for name, parameter in own.named_parameters():
        close(parameter.grad, gradients[name], tolerance, name)
    for name, buffer in own.named_buffers():
        close(buffer, dict(reference.named_buffers())[name], tolerance, name)


def close(value: Tensor | None, expected: Tensor | None, tolerance: float, name: str) -> None:
    """Equal up to a tolerance relative to the largest magnitude; no gradient is a gradient of zero."""
    if value is None or expected is None:
        assert all(item is None or not item.any() for item in (value, expected)), name
        return
    scale = max(1e-2, float(expected.detach().abs().max())) if expected.numel() else 1.0
    assert float((value - expected).detach().abs().max() if value.numel() else 0.0) <= tolerance * scale, name


def asserting(x: Tensor, h: Tensor) -> Tensor:
    """A forward pass with an assertion as users write it: pytest rewrites those of its own files."""
    assert x.long().max().item() < 100, "too large"
    return h.sum()
