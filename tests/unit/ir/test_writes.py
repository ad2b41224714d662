"""What an op really reads: the writes before it, through views and without gradients, and the parameters that are so reached."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import Graph
from whale.ir.graph import LossTerm, ModelGraph
from whale.ir.writes import MemoryWrites, Reads, dependents, reached_parameters, written_buffers


def through_a_view(*, detached: bool = False) -> ModelGraph:
    """``out = zeros; view = out[:, 0]; view.copy_(h * w); loss = sum(out)``, where the write may be to a detached value."""
    graph = Graph()
    x, w = graph.input("x"), graph.parameter("w", 8)
    graph.call("out", "aten.zeros_like.default", x)
    graph.call("view", "aten.detach.default" if detached else "aten.select.int", "out", tags=("view",))
    graph.call("h", "aten.mul.Tensor", x, w)
    graph.call("before", "aten.sum.default", "out", width=None)
    graph.call("written", "aten.copy_.default", "view", "h", tags=("in_place",))
    graph.call("after", "aten.sum.default", "out", width=None)
    graph.loss = [LossTerm(1.0, "after", None)]
    return graph.build()


def test_an_op_reads_the_writes_before_it() -> None:
    graph = through_a_view()
    assert Reads(graph).of("before") == ("out",)
    assert Reads(graph).of("after") == ("out", "written")
    assert Reads(graph).of("written") == ("view", "h")
    assert Reads(graph).at_end("view") == ("view", "written")
    assert "p_w" in Reads(graph).ancestors(["after"])
    assert "p_w" not in Reads(graph).ancestors(["before"])


def test_of_several_writes_the_last_reads_the_others() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.call("out", "aten.zeros_like.default", x)
    graph.call("first", "aten.add_.Tensor", "out", 1.0, tags=("in_place",))
    graph.call("second", "aten.mul_.Tensor", "out", 2.0, tags=("in_place",))
    graph.call("read", "aten.exp.default", "out")
    reads = Reads(graph.build())
    assert reads.of("read") == ("out", "second")
    assert reads.of("second") == ("out", "first")


@pytest.mark.parametrize("detached", [False, True])
def test_a_write_to_a_detached_value_is_read_and_passes_no_gradient(detached: bool) -> None:
    graph = through_a_view(detached=detached)
    assert Reads(graph).of("after") == ("out", "written")
    assert reached_parameters(graph) == (frozenset() if detached else {"w"})


def test_what_depends_on_a_value_does_so_from_the_write_on() -> None:
    found = dependents(through_a_view(), ["p_w"])
    assert found == {"p_w", "h", "written", "after"}


def test_running_statistics_are_written_in_training_only() -> None:
    for training in (True, False):
        graph = Graph()
        x, mean, var = graph.input("x"), graph.parameter("mean", 8, kind="buffer"), graph.parameter("var", 8, kind="buffer")
        graph.call("norm", "aten.batch_norm.default", x, None, None, mean, var, training, 0.1, 1e-5, False)
        graph.call("later", "aten.mul.Tensor", mean, 2.0)
        built = graph.build()
        assert list(written_buffers(built)) == (["mean", "var"] if training else [])
        assert Reads(built).of("later") == ((mean, "norm") if training else (mean,))
        assert MemoryWrites(built, ["norm"]).need_same(mean, "norm") is training
