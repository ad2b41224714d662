"""Segments give the gradients that the whole graph gives, run their ops once more, and queue weight gradients once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.deferred import WeightQueue, defer_weights
from whale.runtime.program.marks import NUM_DIMS, OP, num_dims_of
from whale.runtime.program.segments import with_segments

aten = torch.ops.aten


def graph_of(queue: bool = False, count: Callable[[Tensor], Tensor] | None = None) -> fx.Graph:
    """x, w -> two layers, a tensor changed in place, dropout."""
    graph = fx.Graph()
    waiting = graph.placeholder("queue") if queue else None
    x, w = graph.placeholder("x"), graph.placeholder("w")
    first = graph.call_function(aten.linear.default, (x, w), name="first")
    counted = graph.call_function(count or aten.gelu.default, (first,), name="counted")
    changed = graph.call_function(aten.mul_.Tensor, (counted, 0.5), name="changed")
    dropped = graph.call_function(aten.dropout.default, (changed, 0.4, True), name="dropped")
    second = graph.call_function(aten.linear.default, (dropped, w), name="second")
    graph.output((graph.call_function(aten.add.Tensor, (second, changed), name="end"),))
    for node in graph.nodes:
        node.meta = {OP: node.name, NUM_DIMS: 2}
    if waiting is not None:
        defer_weights(graph, {"w"}, waiting, num_dims_of)
    return graph


def run(module: nn.Module, *first: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    (value,) = module(*first, x, w)
    torch.manual_seed(2)  # what is drawn in between changes nothing
    value.square().sum().backward()
    for queue in first:
        queue.run()
    assert x.grad is not None and w.grad is not None
    return value, x.grad, w.grad


SEGMENTS = (("first", "counted", "changed", "dropped"), ("second",))


def test_the_numbers_are_the_same_bit_for_bit() -> None:
    expected = run(fx.GraphModule(nn.Module(), graph_of()))
    for segments in (SEGMENTS, SEGMENTS[:1], SEGMENTS[1:], (SEGMENTS[0] + SEGMENTS[1],)):
        found = run(with_segments(graph_of(), segments, {"dropped"}))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weight_gradients_wait_once() -> None:
    expected = run(fx.GraphModule(nn.Module(), graph_of()))
    module, queue = with_segments(graph_of(queue=True), SEGMENTS, {"dropped"}), WeightQueue()
    added: list[object] = []
    add = queue.add
    queue.add = lambda *item: (added.append(item), add(*item))[1]
    found = run(module, queue)
    assert len(added) == 2
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def test_a_segment_runs_once_more_and_only_for_backward() -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sigmoid()

    module = with_segments(graph_of(count=count), SEGMENTS, {"dropped"})
    with torch.no_grad():
        module(torch.ones(3, 4), torch.ones(4, 4))
    assert len(calls) == 1
    run(module)
    assert len(calls) == 3
