"""Cuts of the training for another capture: an axis that is none there is left behind, and parameters lie as they do in training."""

from __future__ import annotations

from tests.unit.planning.graphs import Graph
from whale.axes import discover
from whale.ir.graph import ModelGraph
from whale.ir.plan import Shard, Stage, VirtualDevice
from whale.planning.retarget import retarget_shards, same_axes


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


def stage_of(graph: ModelGraph, *shards: Shard) -> Stage:
    devices = VirtualDevice(("host0/0", "host0/1"))
    parameters = tuple(each.name for each in graph.parameters)
    return Stage(0, (), (), devices, (1,), parameters, split=2, shards=shards)


def test_an_axis_that_is_none_there_is_left_behind() -> None:
    train, other = build("train"), build("predict")
    ours, theirs = discover(train), discover(other)
    names = same_axes(ours, theirs)
    lost = [axis for axis in ours.axes if axis.name not in names and not ours.held_by[axis.name]]
    held = next(axis for axis in ours.axes if ours.held_by[axis.name])
    assert lost, "the labels have an axis of their own"
    stage = stage_of(train, *(Shard(axis.name, (1, axis.size - 1)) for axis in (*lost, held)))
    found = retarget_shards(stage, ours, names, other, theirs, ("layer",))
    assert [(shard.axis, shard.sizes, shard.whole_parameters) for shard in found] == [(names[held.name], (1, held.size - 1), ())]
    assert retarget_shards(stage, ours, {}, other, theirs, ("layer",)) == (), "the program brings together what lies in parts"


def test_a_parameter_that_the_training_holds_whole_stays_so() -> None:
    train, other = build("train"), build("predict")
    ours, theirs = discover(train), discover(other)
    held = next(axis for axis in ours.axes if ours.held_by[axis.name])
    stage = stage_of(train, Shard(held.name, (1, held.size - 1), whole_parameters=("layer.weight",)))
    (found,) = retarget_shards(stage, ours, same_axes(ours, theirs), other, theirs, ("layer",))
    assert found.whole_parameters == ("layer.weight",)
