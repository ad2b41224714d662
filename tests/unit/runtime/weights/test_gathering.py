"""Outputs of which only one piece is returned: whether they depend on the rows of the batch."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import Graph
from whale.ir.graph import ModelGraph, TensorSpec
from whale.runtime.weights.gathering import depends_on_rows


def written_with(source: str) -> ModelGraph:
    """``x, w; out = zeros(); out.copy_(mean(source))``: `out` itself has no inputs."""
    graph = Graph()
    graph.input("x")
    graph.parameter("w", 8)
    graph.call("out", "aten.zeros.default", spec=TensorSpec((), "float32", ()))
    graph.call("mean", "aten.mean.default", source, width=None)
    graph.call("written", "aten.copy_.default", "out", "mean", width=None, tags=("in_place",))
    return graph.build()


@pytest.mark.parametrize(("source", "expected"), [("x", True), ("p_w", False)])
def test_an_output_depends_on_what_is_written_into_it(source: str, expected: bool) -> None:
    graph = written_with(source)
    assert depends_on_rows(graph, "written") == expected
    assert depends_on_rows(graph, "out") == expected
