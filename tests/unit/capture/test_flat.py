"""FLOPs of ops against closed forms, `as_strided` of operands that lie otherwise, the versions of torch that are taken."""

from __future__ import annotations

import configparser
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph
from torch.utils.flop_counter import FlopCounterMode

from whale.capture.capture import TESTED, check_version
from whale.capture.flat.aliasing import strided
from whale.capture.flat.ops import op_flops
from whale.errors import CaptureError, OpFault

torch.set_num_threads(1)


def graph_of(function: Callable[..., Tensor], parameters: list[Tensor], batch: list[Tensor], dynamic: bool = False) -> Graph:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(value) for value in parameters])

        def forward(self, *batch: Tensor) -> Tensor:
            return function(*self.weights, *batch)

    rows = torch.export.Dim("rows", min=2)
    shapes = (tuple({0: rows} for _ in batch),) if dynamic else None
    return torch.export.export(Model(), tuple(batch), dynamic_shapes=shapes, strict=False).graph


def total(graph: Graph) -> tuple[int, int]:
    counts = [op_flops(node) for node in graph.nodes]
    return sum(forward for forward, _ in counts), sum(backward for _, backward in counts)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [], [(6, 3, 4), (5, 4)]),
    "matmul": (torch.matmul, [], [(6, 3, 4), (4, 5)]),
    "batched": (torch.matmul, [], [(6, 3, 4), (6, 4, 5)]),
    "bmm": (torch.bmm, [], [(6, 3, 4), (6, 4, 5)]),
    "addmm": (torch.addmm, [], [(5,), (6, 4), (4, 5)]),
    "einsum": (lambda a, b: torch.einsum("bik,kj->bij", a, b), [], [(6, 3, 4), (4, 5)]),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1), [], [(6, 4, 8, 8), (5, 4, 3, 3)]),
    "conv transposed": (F.conv_transpose2d, [], [(6, 4, 8, 8), (4, 5, 3, 3)]),
    "attention": (F.scaled_dot_product_attention, [], [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_agree_with_torch(name: str) -> None:
    function, _, shapes = PRODUCTS[name]
    values = [torch.randn(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*[value.to("meta") for value in values])
    assert total(graph_of(function, [], values))[0] == counter.get_total_flops()


def test_backward_counts_operands_with_a_gradient() -> None:
    graph = graph_of(F.linear, [], [torch.randn(6, 4), torch.randn(5, 4)])
    call = next(node for node in graph.nodes if node.op == "call_function")
    x, weight = call.args[:2]
    for gradients, factor in (({x: True, weight: True}, 2), ({x: False, weight: True}, 1), ({x: False, weight: False}, 0)):
        forward, backward = op_flops(call, {**gradients, call: factor > 0})
        assert (forward, backward) == (2 * 6 * 4 * 5, factor * forward)


def test_a_bias_is_no_factor() -> None:
    graph = graph_of(lambda w, b, x: F.linear(x, w, b), [torch.randn(5, 4), torch.randn(5)], [torch.randn(6, 4)])
    assert total(graph) == (240, 480)


def test_symbolic_sizes_count_at_their_hints() -> None:
    graph = graph_of(lambda w, x: (x @ w).relu(), [torch.randn(4, 5)], [torch.randn(6, 4)], dynamic=True)
    assert total(graph) == (240 + 30, 480 + 30)


def test_views_are_free_and_pointwise_ops_count_elements() -> None:
    graph = graph_of(lambda x: x.view(3, 8).t().unsqueeze(0) + 1, [], [torch.randn(6, 4)])
    assert total(graph) == (24, 24)
    lookup = graph_of(lambda w, i: F.embedding(i, w), [torch.randn(1000, 8)], [torch.zeros(3, 2, dtype=torch.long)])
    assert total(lookup)[0] == 48


@pytest.mark.slow
def test_recurrent_layers() -> None:
    model = torch.nn.LSTM(4, 5, num_layers=2, batch_first=True)
    exported = torch.export.export(model, (torch.randn(3, 7, 4),), strict=False)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    counts = [op_flops(node)[0] for node in exported.graph.nodes if "lstm" in str(node.target)]
    assert counts == [2 * 3 * 7 * weights]


def test_recurrent_cells() -> None:
    cell = torch.nn.LSTMCell(4, 5)
    graph = graph_of(
        lambda *tensors: torch.lstm_cell(tensors[4], tensors[5:], *tensors[:4]),
        list(cell.parameters()),
        [torch.randn(3, 4), torch.randn(3, 5), torch.randn(3, 5)],
    )
    assert total(graph)[0] == 2 * 3 * (20 * 4 + 20 * 5)


@pytest.mark.parametrize("offset", [0, 2])
def test_an_operand_that_lies_otherwise_is_laid_as_it_was(offset: int) -> None:
    x = torch.arange(24.0).view(4, 6).t().requires_grad_()  # strides (1, 6)
    expected = x.as_strided((3, 4), (6, 1), offset)
    other = x.detach().contiguous().requires_grad_()
    for operand in (x, other):
        torch.testing.assert_close(strided(operand, (1, 6), (3, 4), (6, 1), offset), expected)
    strided(other, (1, 6), (3, 4), (6, 1), offset).square().sum().backward()
    (found,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(other.grad, found)


def test_what_lies_beside_the_elements_is_not_copied() -> None:
    x = torch.arange(24.0).view(4, 6)[:, :3]
    torch.testing.assert_close(strided(x, (6, 1), (4, 6), (6, 1), 0), torch.arange(24.0).view(4, 6))
    with pytest.raises(OpFault, match="reads memory that is not part of its tensor"):
        strided(x.contiguous(), (6, 1), (4, 6), (6, 1), 0)


def test_this_one_is_tested() -> None:
    check_version(torch.__version__)


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.130.0", "3.0.0a0"])
def test_others_are_named(version: str) -> None:
    with pytest.raises(CaptureError, match=f"torch {version} is not supported"):
        check_version(version)


def test_what_is_installed_is_what_was_tested() -> None:
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[3] / "setup.cfg")
    required = [line for line in settings["options"]["install_requires"].split() if line.startswith("torch")]
    newest = int(TESTED[-1].split(".")[1])
    assert required == [f"torch>={TESTED[0]},<2.{newest + 1}"]
