"""Measuring a model's ops: each distinct one once, at several rows, in a world of one; what cannot be run is said."""

from __future__ import annotations

import dataclasses
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from whale.capture import capture
from whale.cli import main
from whale.comm import World
from whale.deferred import WeightQueue, deferred
from whale.errors import ClusterError
from whale.estimate.memory.memory import weight_share
from whale.hardware import DeviceProfile, parse_cluster
from whale.ir.graph import ModelGraph
from whale.ir.profile import KindProfile, Profile, read_profile
from whale.measure import devices_at_hand, profiling
from whale.measure.op_times import Inputs, OpRounds, PassRounds
from whale.measure.profiling import Known, RankTimes, distinct_ops, own_kind, pooled_kind, profile_model, rows_to_measure
from whale.measure.samples import RoundTimer

ALONE = World(0, 1, 0, 1, torch.device("cpu"), timedelta(seconds=60))


class Model(nn.Module):
    """Two alike blocks, an embedding, a size that is read, and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = torch.relu(block(x)) + x.reshape(x.shape[0] * 3, 8).view(x.shape)
        first, second = torch.var_mean(x, -1)
        return first + second.masked_fill(ids == 0, 0.0)


def inputs(device: str = "cpu") -> tuple[ModelGraph, Inputs]:
    with torch.device(device):
        model = Model()
    batch = {"ids": torch.arange(24).view(8, 3) % 11}
    graph, program = capture(model, batch, lambda output, batch: output.square().mean())
    return graph, Inputs(graph, program.graph, program.values(batch), torch.device("cpu"))


def measure(graph: ModelGraph, own: Inputs, known: Profile | None = None, again: bool = False) -> tuple[Profile, list[str]]:
    told: list[str] = []
    profile = profile_model(ALONE, devices_at_hand(1), graph, own, Known(known, again), 2, told.append)
    return profile, told


@cache
def measured() -> tuple[ModelGraph, Inputs, Profile, list[str]]:
    """The model on the CPU, and what is measured of it for the first time."""
    graph, own = inputs()
    return graph, own, *measure(graph, own)


@pytest.mark.slow
def test_a_model_without_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph, own = inputs("meta")
    (kind,) = measure(graph, own)[0].kinds
    assert {op.signature for op in kind.ops} == set(distinct_ops(graph)) and {op.reason for op in kind.ops} == {""}


def test_each_distinct_op_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph, _, profile, told = measured()
    ops = distinct_ops(graph)
    assert sum("aten.linear" in name for name in ops) == 1
    (kind,) = profile.kinds
    assert kind.rows == rows_to_measure(graph) == (1, 2, 8)
    assert {op.signature for op in kind.ops} == set(ops)
    assert {op.reason for op in kind.ops} == {""}
    for op in kind.ops:
        assert len(op.forward) == 3 and min(op.forward) > 0
        assert len(op.backward) == (3 if op.signature.endswith("with gradient") else 0)
    assert len(kind.forward) == 3 and len(kind.backward) in (0, 3)  # none where other work makes so small a model's passes scatter
    assert told[0].startswith(f"{len(ops)} of {len(ops)} distinct ops at 1, 2, 8 rows")


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph, own, profile, _ = measured()
    again, told = measure(graph, own, profile)
    assert again == profile and len(told) == 1 and told[0].startswith("0 of ")
    other = dataclasses.replace(profile, model="another")
    replaced, told = measure(graph, own, other)
    assert told[0].startswith(
        f"the profile in the file is of another model (another); it is replaced by that of this model ({profile.model})"
    )
    assert replaced.model == profile.model and told[1].startswith("0 of ")
    assert measure(graph, own, profile, again=True)[0].kinds[0].ops != profile.kinds[0].ops


def test_an_operator_that_fails_alone_keeps_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph, own, *_ = measured()
    node = own.node_of[next(op.name for op in graph.ops if "relu" in op.target)]

    def broken(*_: object) -> Tensor:
        raise ValueError("not here\nand more")

    monkeypatch.setattr(node, "target", broken)
    monkeypatch.setattr(profiling, "time_passes", lambda *_: PassRounds())
    (kind,) = measure(graph, own)[0].kinds
    reasons = {op.signature.partition("(")[0]: op.reason for op in kind.ops if op.reason}
    assert reasons == {"aten.relu.default": "ValueError: not here"}
    assert kind.forward == ()


def test_ops_take_longer_by_what_waiting_for_the_core_adds_to_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph, own = inputs()
    monkeypatch.setattr(profiling, "time_passes", lambda *_: PassRounds((1.0,), (3.0,), stretch=3.0))
    monkeypatch.setattr(profiling, "time_op", lambda *_: OpRounds((1.0, 1.0), (2.0, 4.0)))
    (kind,) = measure(graph, own)[0].kinds
    assert {op.forward for op in kind.ops} == {(3.0, 3.0, 3.0)} and {op.backward for op in kind.ops} == {(9.0, 9.0, 9.0)}


def test_rounds_of_a_pass_come_before_between_and_after_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph, own = inputs()
    order: list[str] = []

    def passes(clock: RoundTimer, *_: object) -> PassRounds:
        order.append("pass")
        return PassRounds((1.0,) * clock.num_rounds, (3.0,) * clock.num_rounds, stretch=float(len(order)))

    def op(*_: object) -> OpRounds:
        order.append("op")
        return OpRounds((1.0,), ())

    monkeypatch.setattr(profiling, "time_passes", passes)
    monkeypatch.setattr(profiling, "time_op", op)
    (kind,) = profile_model(ALONE, devices_at_hand(1), graph, own, Known(None, again=False), 3, lambda _: None).kinds
    num_ops = len(distinct_ops(graph))
    first = num_ops // 2
    passes = ["pass"] * 3
    assert order == [*passes, *["op"] * 3 * first, *passes, *["op"] * 3 * (num_ops - first), *passes]
    assert {figure.num_samples for figure in kind.forward} == {3}
    stretch = (3 + (6 + 3 * first) + (9 + 3 * num_ops)) / 3
    assert [each.forward[0] for each in kind.ops] == pytest.approx([stretch] * len(kind.ops)), "stretched by what all rounds say"


def test_passes_that_had_no_room_once_have_no_figures() -> None:
    found = PassRounds((1.0,), (2.0,), stretch=2.0)
    assert found.joined(PassRounds()) == PassRounds().joined(found) == PassRounds()


CLUSTER = """hosts:
  - {name: a, devices: [T4, {model: cpu, num_cores: 2}]}
  - {name: b, devices: {model: cpu, num_cores: 4}}
network: ethernet-10g
"""


def test_a_rank_stands_for_a_device_of_its_model() -> None:
    cluster = parse_cluster(CLUSTER)
    assert own_kind(cluster, DeviceProfile("b", "cpu", 1), 5) == cluster.devices[2].kind
    assert own_kind(cluster, DeviceProfile("elsewhere", "cpu", 1), 1) == cluster.devices[2].kind
    assert own_kind(cluster, DeviceProfile("elsewhere", "T4", 1), 1) == cluster.devices[0].kind
    with pytest.raises(ClusterError, match=r"this device .H100. is not in cluster 'cluster' .T4, cpu"):
        own_kind(cluster, DeviceProfile("b", "H100", 1), 0)


SCRIPT = """
import torch

def build(width=8):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
    return model, (torch.randn(4, width),), lambda output, batch: output.square().mean()
"""


def test_the_verb_writes_what_the_other_verbs_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("profiled.py").write_text(SCRIPT)
    words = ["profile", "profiled.py:build", "--rounds", "2", "--output", "p.json"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "distinct ops at 1, 4 rows" in said.err and "linear.default(" in said.out and "written to p.json" in said.out
    assert len(read_profile("p.json").kinds) == 1
    assert main(["plan", "profiled.py:build", "--profile", "p.json"]) == 0
    assert main(["plan", "profiled.py:build", "--explain", "--set", "cluster.profile=p.json"]) == 0
    assert main(words) == 0
    assert "0 of 4 distinct ops" in capsys.readouterr().err
    assert main(["plan", "profiled.py:build", "--profile", "p.json", "--arg", "width=4"]) == 1
    assert "the profile was measured on another model" in capsys.readouterr().err
    assert main(["plan", "profiled.py:build", "--profile", "p.json", "--ranks", "2"]) == 1
    assert "the profile has no times for device" in capsys.readouterr().err


def test_a_captured_model_cannot_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "model.json", "--output", "p.json"]) == 1
    assert "has no code to measure; whale profile needs FILE.py:FUNCTION" in capsys.readouterr().err


def test_what_waiting_weights_add_is_a_median_of_all_ranks_and_never_less_than_nothing() -> None:
    (kind,) = parse_cluster("hosts: [{devices: cpu}]").devices
    few, many = PassRounds((2.0,), (3.0,), 1.0, (-0.2,)), PassRounds((4.0,), (7.0,), 3.0, (0.5,))
    ranks = [RankTimes(kind, "here", {}, (few, each)) for each in (many, dataclasses.replace(many, stretch=1.0))]
    known = KindProfile(kind, "here", "", (1, 4), ())
    assert pooled_kind(ranks, known, (), (1, 4)).apart == (0.0, 1.0), "in the stretch of each rank"
    nothing = [dataclasses.replace(each, passes=(PassRounds((2.0,), (3.0,)),)) for each in ranks]
    assert pooled_kind(nothing, known, (), (4,)).apart == ()


def test_passes_with_and_without_waiting_weights_are_the_same_passes() -> None:
    graph, own = inputs()
    waiting = own.waiting
    assert waiting is not None
    assert [node.target for node in waiting.graph.nodes].count(deferred) == sum(weight_share(graph, op.name) > 0 for op in graph.ops)
    arguments, parameters = own.of_graph(4)
    whole, queue = fx.GraphModule(nn.Module(), own.nodes), WeightQueue()
    expected = torch.autograd.grad(whole(*arguments)[0], parameters)
    waiting(queue, *arguments)[0].backward()
    queue.run()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(("both", "backward"), [((3.0, 5.0, 4.0), (2.0,)), ((3.0, 1.0, 2.0), ())], ids=["longer", "lost in noise"])
def test_a_backward_pass_that_is_lost_in_noise_is_told(both: tuple[float, ...], backward: tuple[float, ...]) -> None:
    (kind,) = parse_cluster("hosts: [{devices: cpu}]").devices
    ranks = [RankTimes(kind, "here", {}, (PassRounds((2.0, 2.0, 2.0), both),))]
    found = pooled_kind(ranks, KindProfile(kind, "here", "", (4,), ()), (), (4,))
    assert tuple(figure.value for figure in found.backward) == backward
    assert [figure.value for figure in found.forward] == [2.0]
    assert any("within noise (here)" in line for line in Profile("model", (found,)).warnings) == (not backward)
