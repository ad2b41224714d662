"""Where parameters lie, and whose gradients make them up: replicas that disagree, copies and terms, and each thing worked out once."""

from __future__ import annotations

import pytest

from tests.unit.planning.transformers import transformer
from whale.axes import Axes, Axis, discover
from whale.config import Config
from whale.errors import PlanError
from whale.hardware import parse_cluster
from whale.ir.plan import Shard
from whale.planning.plan import make_plan
from whale.sharding import Region
from whale.sharding.parameters import Holder, ParameterShardings, Pattern, parameter_shardings

AXES = Axes((Axis("batch", 4), Axis("heads", 4), Axis("width", 3)), {}, {"w": (("heads",), ("width",)), "b": (("width",),)}, ())


def shardings(*holders: Holder) -> ParameterShardings:
    devices = {device for holder in holders for device in holder.devices}
    return ParameterShardings(holders, AXES, tuple(f"d{number}" for number in range(1 + max(devices))))


def heads(start: int, stop: int) -> Region:
    return Region((("heads", start, stop),))


def split(*sizes: int, partial: frozenset[str] = frozenset(), whole: tuple[str, ...] = ()) -> Pattern:
    return Pattern(("w", "b"), len(sizes), (Shard("heads", sizes, whole_parameters=whole),), partial)


def test_replicas_need_not_agree() -> None:
    known = shardings(Holder((0, 0), (0, 1), split(3, 1)), Holder((1, 0), (2, 3), split(2, 2)), Holder((2, 0), (4,), Pattern(("w", "b"))))
    weight = known.gradient("w")
    assert [(piece.region, piece.owners) for piece in weight.pieces] == [
        (heads(0, 2), (0, 2, 4)),
        (heads(2, 3), (0, 3, 4)),
        (heads(3, 4), (1, 3, 4)),
    ]
    assert all(piece.contributors == frozenset(piece.owners) for piece in weight.pieces)
    assert weight.held[4] == heads(0, 4) == weight.hull and known.is_sharded("w")
    assert known.places("w") == ((0, 0), (1, 0), (2, 0))


def test_one_device_of_a_group_speaks_for_copies_and_all_for_partial_gradients() -> None:
    (copies,) = shardings(Holder((0, 0), (0, 1, 2, 3), split(3, 1))).gradient("b").pieces
    assert copies.owners == (0, 1, 2, 3) and copies.contributors == {0, 2}  # two groups that saw other rows
    (alone,) = shardings(Holder((0, 0), (0, 1), split(3, 1))).gradient("b").pieces
    assert alone.is_complete
    (partial,) = shardings(Holder((0, 0), (0, 1), split(3, 1, partial=frozenset({"b"})))).gradient("b").pieces
    assert partial.contributors == {0, 1} and not partial.is_complete


def test_a_parameter_may_be_whole_beside_others_in_parts() -> None:
    assert not shardings(Holder((0, 0), (0, 1), split(3, 1, whole=("w",)))).is_sharded("w")


def test_a_device_holds_one_part() -> None:
    known = shardings(Holder((0, 0), (0, 1), split(3, 1)), Holder((0, 1), (0, 1), split(2, 2)))
    with pytest.raises(PlanError, match=r"several parts of a parameter \(w on d0: heads\[0:3\] and heads\[0:2\]\)"):
        known.gradient("w")


def test_elements_of_a_part() -> None:
    known = shardings(Holder((0, 0), (0, 1), split(3, 1)))
    assert known.space("w").num_elements(heads(0, 3)) == 9


@pytest.mark.parametrize("num_replicas", [1, 64])
def test_what_lies_alike_is_worked_out_once(num_replicas: int) -> None:
    layers = [f"{index}.{name}" for index in range(12) for name in ("q", "k", "up", "bias")]
    axes = Axes(
        tuple(Axis(f"heads{index}", 8) for index in range(12)),
        {},
        {name: ((f"heads{name.partition('.')[0]}",), ()) if not name.endswith("bias") else ((),) for name in layers},
        (),
    )
    patterns = [
        Pattern(tuple(layers[half * 24 : half * 24 + 24]), 2, tuple(Shard(f"heads{index}", (5, 3)) for index in range(12)))
        for half in range(2)
    ]
    holders = [
        Holder((replica, half), (4 * replica + 2 * half, 4 * replica + 2 * half + 1), patterns[half])
        for replica in range(num_replicas)
        for half in range(2)
    ]
    known = ParameterShardings(tuple(holders), axes, tuple(f"d{number}" for number in range(4 * num_replicas)))
    for name in known.parameters:
        assert known.gradient(name) is known.gradient(name)
    distinct = {id(known.gradient(name)) for name in known.parameters}
    assert len(distinct) == 12 + 2  # one per layer for what has its heads, one per stage for what is whole


@pytest.mark.parametrize(("kinds", "are_summed"), [("2 x V100-16GB", False), ("V100-16GB, T4", True)])
def test_unlike_devices_of_a_group_sum_the_gradients_of_what_they_hold_whole(kinds: str, *, are_summed: bool) -> None:
    """Computed on each by itself they would drift apart by rounding."""
    graph = transformer(layers=1, width=64, length=16, vocabulary=128, devices=2, axis="heads")
    config = Config({"pipeline.num_micro_batch": 1, "memory.zero": "0"})
    plan = make_plan(graph, parse_cluster(f"hosts: [{{name: h, devices: [{kinds}]}}]"), config, rows=8)
    (stage,) = plan.replicas[0].stages
    assert stage.split == 2 and plan.is_alike(stage) is not are_summed
    known = parameter_shardings(plan, graph, discover(graph))
    (norm,) = known.gradient("norm.weight").pieces
    assert norm.contributors == ({0, 1} if are_summed else {0})
    assert known.gradient("blocks.0.qkv.weight").is_sharded
