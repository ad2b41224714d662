"""Every rule of the split backward gives the gradients of the op it stands for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import fx, nn

from whale.axes.operators import OPERATORS
from whale.deferred import RULES, WeightQueue, defer_weights, deferred, rule_of
from whale.runtime.program.marks import NUM_DIMS, num_dims_of

aten = torch.ops.aten


def _tensor(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


_complex = partial(_tensor, dtype=torch.complex128)


CASES = {
    "linear": (aten.linear.default, lambda: (_tensor(2, 3, 4), _tensor(5, 4), _tensor(5))),
    "linear without bias": (aten.linear.default, lambda: (_tensor(3, 4), _tensor(5, 4))),
    "addmm": (aten.addmm.default, lambda: (_tensor(5), _tensor(3, 4), _tensor(4, 5))),
    "mm": (aten.mm.default, lambda: (_tensor(3, 4), _tensor(4, 5))),
    "matmul": (aten.matmul.default, lambda: (_tensor(2, 3, 4), _tensor(4, 5))),
    "embedding": (aten.embedding.default, lambda: (_tensor(7, 3), torch.randint(0, 7, (2, 4)))),
    "embedding with padding": (aten.embedding.default, lambda: (_tensor(7, 3), torch.randint(0, 7, (2, 4)), 2)),
    "conv1d": (aten.conv1d.default, lambda: (_tensor(2, 3, 8), _tensor(4, 3, 3), _tensor(4), [2], [1])),
    "conv2d": (aten.conv2d.default, lambda: (_tensor(2, 4, 6, 6), _tensor(6, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 2)),
    "conv2d defaults": (aten.conv2d.default, lambda: (_tensor(2, 3, 6, 6), _tensor(4, 3, 3, 3))),
    "conv3d": (aten.conv3d.default, lambda: (_tensor(1, 2, 4, 4, 4), _tensor(3, 2, 2, 2, 2), _tensor(3))),
    "complex linear": (aten.linear.default, lambda: (_complex(2, 3, 4), _complex(5, 4), _complex(5))),
    "complex addmm": (aten.addmm.default, lambda: (_complex(5), _complex(3, 4), _complex(4, 5))),
    "complex mm": (aten.mm.default, lambda: (_complex(3, 4), _complex(4, 5))),
    "complex matmul": (aten.matmul.default, lambda: (_complex(2, 3, 4), _complex(4, 5))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_gradients_of_its_op(name: str) -> None:
    torch.manual_seed(0)
    target, make = CASES[name]
    args = make()
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    output = target(*args)
    seed = torch.randn_like(output)
    expected = torch.autograd.grad(output, tensors, seed)

    queue = WeightQueue()
    deferred(queue, target, (), *args).backward(seed)
    rule = rule_of(target)
    assert rule is not None
    weights = [args[p] for p in rule.weights if p < len(args) and args[p] is not None]
    assert all(weight.grad is None for weight in weights), "weight gradients must wait"
    queue.run()
    for tensor, gradient in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_every_rule_is_tested() -> None:
    named = {name: entry.weights for name, entry in OPERATORS.items() if entry.weights is not None}
    assert {target._schema.name.removeprefix("aten::") for target, _ in CASES.values()} == set(named)
    assert set(named.values()) == set(RULES)


def test_a_convolution_that_pads_by_a_word_is_left_as_it_is() -> None:
    graph = fx.Graph()
    queue, x, w = (graph.placeholder(name) for name in ("queue", "x", "w"))
    graph.output(graph.call_function(aten.conv1d.padding, (x, w, None, [1], "same")))
    assert defer_weights(graph, {"w"}, queue, lambda node: 3) == 0


def test_shared_and_frozen_weights() -> None:
    weight, bias, x = _tensor(4, 4), _tensor(4, grad=False), _tensor(3, 4)
    seed = torch.randn(3, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(aten.linear(aten.linear(x, weight, bias), weight), [weight], seed)
    queue = WeightQueue()
    hidden = deferred(queue, aten.linear.default, (), x, weight, bias)
    deferred(queue, aten.linear.default, (), hidden, weight).backward(seed)
    told: list[torch.Tensor] = []

    def is_final(parameter: torch.Tensor) -> None:
        told.append(parameter)
        torch.testing.assert_close(parameter.grad, expected)

    assert [id(parameter) for parameter in queue.parameters()] == [id(weight), id(weight)]
    queue.run(is_final)
    assert len(told) == 1 and told[0] is weight, "told once, after its last use"
    assert bias.grad is None


def test_complex_convolutions_give_all_their_gradients_at_once() -> None:
    """Torch has no backward kernel for them: autograd takes them apart."""
    x, weight = _complex(2, 3, 8), _complex(4, 3, 3)
    output = aten.conv1d.default(x, weight)
    seed = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, weight], seed)
    queue = WeightQueue()
    deferred(queue, aten.conv1d.default, (), x, weight).backward(seed)
    assert not queue.parameters()
    for tensor, gradient in zip((x, weight), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_an_in_place_change_in_between_is_seen() -> None:
    x, weight = _tensor(3, 4), _tensor(5, 4)
    hidden = x * 1
    output = deferred(WeightQueue(), aten.linear.default, (), hidden, weight)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_only_direct_uses_of_parameters_are_replaced() -> None:
    class Two(nn.Module):
        def forward(self, queue: object, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return aten.linear.default(aten.linear.default(x, w), w * 2)

    graph = fx.symbolic_trace(Two()).graph
    queue, *_ = graph.nodes
    for node in graph.nodes:
        node.meta[NUM_DIMS] = 2
    assert defer_weights(graph, {"w"}, queue, num_dims_of) == 1
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets.count(deferred) == 1 and targets.count(aten.linear.default) == 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_weights_behind_casts_wait_too(is_shared: bool) -> None:
    class Mixed(nn.Module):
        def forward(self, queue: object, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            low, bias = aten.to.dtype(w, torch.bfloat16), aten.to.dtype(b, torch.bfloat16)
            y = aten.linear.default(aten.to.dtype(x, torch.bfloat16), low, bias)
            return y, low.sum() if is_shared else y

    graph = fx.symbolic_trace(Mixed()).graph
    queue, *_ = graph.nodes
    for node in graph.nodes:
        node.meta[NUM_DIMS] = 2
    assert defer_weights(graph, {"w", "b"}, queue, num_dims_of) == 1
    casts = [node for node in graph.nodes if node.target is aten.to.dtype]
    assert len(casts) == 1 + is_shared, "a cast that nobody else reads is done with the op"
    x, w, b = (_tensor(*shape, dtype=torch.float32) for shape in ((3, 4), (5, 4), (5,)))
    expected = torch.autograd.grad(nn.functional.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).float().sum(), [x, w, b])
    pending = WeightQueue()
    fx.GraphModule(nn.Module(), graph)(pending, x, w, b)[0].float().sum().backward()
    assert w.grad is None and b.grad is None
    pending.run()
    for tensor, gradient in zip((x, w, b), expected, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype is torch.float32
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)
