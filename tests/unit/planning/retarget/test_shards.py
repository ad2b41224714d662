"""Cuts of the training for another capture: an axis that only the loss has is left behind, one that parameters have must be there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planning.graphs import Graph
from whale.axes import discover
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Shard
from whale.planning.retarget.shards import retarget_shards, same_axes


def build(mode: str) -> ModelGraph:
    graph = Graph()
    value = graph.linear("layer", graph.input("x"))
    if mode == "train":
        labels = graph.input("labels", width=6)
        graph.sum_loss(graph.call("apart", "aten.mul.Tensor", labels, labels, width=6, grad=False), "apart_sum")
        graph.sum_loss(value)
    else:
        graph.outputs = (value,)
    return graph.build(mode=mode)


def test_an_axis_that_only_the_labels_have_is_left_behind() -> None:
    train, other = build("train"), build("predict")
    ours, theirs = discover(train), discover(other)
    names = same_axes(ours, theirs)
    lost = [axis for axis in ours.axes if axis.name not in names and not ours.held_by[axis.name]]
    held = next(axis for axis in ours.axes if ours.held_by[axis.name])
    assert lost, "the labels have an axis of their own"
    cut = tuple(Shard(axis.name, (1, axis.size - 1)) for axis in (*lost, held))
    found = retarget_shards(cut, ours, names, other, theirs, ("layer",))
    assert [(shard.axis, shard.sizes) for shard in found] == [(names[held.name], (1, held.size - 1))]
    with pytest.raises(PlanError, match="an axis that is cut in training is one in predict too"):
        retarget_shards(cut, ours, {}, other, replace(theirs, axes=()), ("layer",))
