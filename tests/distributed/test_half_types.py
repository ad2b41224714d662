"""With a half-precision type per device a training equals one process in which each part computes in the type of its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.test_state_law import held_bytes
from tests.distributed.training import three_steps
from tests.distributed.world import World
from tests.examples import at_most, further
from whale.comm import Groups, connect
from whale.errors import CaptureError, PlanError
from whale.estimate import Costs, estimate
from whale.hardware import compute_type, half_type
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.plan import Plan, Stage
from whale.ir.precision import HALF, Precision
from whale.planning.plan import make_plan
from whale.runtime.program.shard.communication import Group, enter, gather, largest, leave
from whale.runtime.program.shard.slots import Slots

NUM_ROWS, WIDTH = 12, 6
FLOPS = {
    "A100-80GB": (("bfloat16", 4e9), ("float16", 4e9), ("float32", 2e9)),
    "3090": (("bfloat16", 3e9), ("float16", 3e9), ("float32", 2e9)),
    "V100-32GB": (("float16", 3e9), ("float32", 1e9)),
    "T4": (("float16", 2e9), ("float32", 1e9)),
    "P4": (("float32", 1e9),),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.AdamW, lr=0.01),
}


def make_cluster(models: tuple[str, ...], num_hosts: int = 1) -> Cluster:
    """Hosts of these devices, which CPU ranks stand for."""
    each, hosts = len(models) // num_hosts, []
    for number in range(num_hosts):
        own = enumerate(models[number * each : (number + 1) * each])
        devices = tuple(Device(f"host{number}/{index}", f"host{number}", model, FLOPS[model], 1 << 30, 1e9) for index, model in own)
        hosts.append(Host(f"host{number}", devices, Link(1e9, 1e-6)))
    return Cluster("test", tuple(hosts), Link(1e8, 1e-5) if num_hosts > 1 else None)


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.into(self.norm(self.into(x))))


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        limit = torch.finfo(x.dtype).min  # of the type at hand
        y = self.middle(x)
        logits: Tensor = self.last(torch.where(y < limit, y, y.softmax(-1) * y))
        return logits


class Model(nn.Module):
    """Two parts, of which the second reads a weight of the first again where they are tied."""

    def __init__(self, kind: str, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        scopes: dict[str, Any] = {
            "pipeline": partial(whale.replicate, 1),
            "rows": partial(whale.replicate, 2),
            "split": partial(whale.split, 2),
        }
        made = []
        for part in (Front, Back):
            with scopes.get(kind, nullcontext)():
                made.append(part())
        self.front, self.back = made
        if is_tied:
            self.back.middle.weight = self.front.into.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.back(self.front(x))
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def make_batch(seed: int, factor: float = 1.0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_ROWS, 5, WIDTH, generator=random) * factor
    return {"x": x, "labels": torch.randint(3, (NUM_ROWS, 5), generator=random)}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        models: of the devices.
        kind: ``data``: replicas; ``pipeline``: two stages; ``rows``: two, whose two devices divide the rows; ``split``: groups of two.
        optimizer: one of `OPTIMIZERS`.
        zero, offload: which forms are shared out, and which are on hosts.
        config: further settings.
        num_hosts: that the devices are on.
    """

    models: tuple[str, ...]
    kind: str
    optimizer: str = "sgd"
    zero: int = 0
    offload: str = "none"
    is_tied: bool = False
    config: tuple[tuple[str, Any], ...] = ()
    num_hosts: int = 1

    @property
    def cluster(self) -> Cluster:
        return make_cluster(self.models, self.num_hosts)

    @property
    def settings(self) -> dict[str, Any]:
        memory = {
            "memory.zero": str(self.zero),
            "memory.offload": self.offload,
            "memory.optimizer_states": 1 if self.optimizer == "sgd" else 2,
            "communication.bucket_bytes": 200,
        }
        return {"precision.dtype": "half", "planning.search": "off", **memory, **dict(self.config)}


def build(kind: str, is_tied: bool) -> tuple[nn.Module, Any, Any]:
    return Model(kind, is_tied=is_tied), make_batch(0), loss


def prepare(case: Case) -> None:
    captured(case)


def captured(case: Case) -> Captured:
    made, cluster = captured_once(build, case.kind, case.is_tied), case.cluster
    precision = compute_type(whale.Config(case.settings), cluster)
    assert precision is not None and precision.by_device
    graphs = [
        made.capture(precision=replace(precision, dtype=dtype))[0] for dtype in {half_type(each) for each in cluster.devices} if dtype
    ]
    assert len({graph.fingerprint for graph in graphs}) == 1
    return made


def train(rank: int, num_ranks: int, case: Case, path: str) -> tuple[list[float], dict[str, Tensor], Plan, set[torch.dtype], Any]:
    """Three steps, the last after a checkpoint was saved and loaded; the plan, the half types in which this rank reads weights, and the
    bytes of what lives from step to step.
    """
    made = captured(case)
    engine = whale.parallelize(
        made.model,
        loss=loss,
        optimizer=OPTIMIZERS[case.optimizer],
        batch=made.batch,
        config=case.settings,
        cluster=case.cluster,
    )
    losses, state = three_steps(engine, make_batch, path)
    read = {each.dtype for each in engine.state.tensors.values()} & {torch.bfloat16, torch.float16}
    found = losses, state, engine.plan, read, held_bytes(engine)
    engine.close()
    return found


def rows_of(stage: Stage, start: int, stop: int) -> list[tuple[str, tuple[int, int]]]:
    """The devices of a stage, of a split group the first, with their rows of a micro-batch."""
    return list(zip(stage.virtual_device.devices, stage.row_intervals(stop - start, start), strict=True))[:: stage.split]


def parts_of(model: Model, batch: dict[str, Tensor], plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and summed loss of each device's rows of each micro-batch, in order: each part under the autocast of its device, a tensor
    at a border cast by who reads it.
    """
    own = {device: getattr(torch, dtype) for device, dtype in zip(plan.devices, plan.half_types, strict=True)}
    for replica, pieces in zip(plan.replicas, plan.all_micro_batch_rows(NUM_ROWS), strict=True):
        for start, stop in pieces:
            (first, *_), last = replica.stages, replica.stages[-1]
            handed: list[Tensor] = []
            for device, (low, high) in rows_of(first, start, stop):
                with torch.autocast("cpu", own[device]):
                    handed += [row.unsqueeze(0) for row in model.front(batch["x"][low:high])]
            for device, (low, high) in rows_of(last, start, stop):
                read = handed[low - start : high - start]
                with torch.autocast("cpu", own[device]):
                    arrived = torch.cat([row if row.dtype == torch.float32 else row.to(own[device]) for row in read])
                    logits = model.back(arrived)
                    each = F.cross_entropy(logits.flatten(0, 1), batch["labels"][low:high].flatten(), reduction="none")
                yield logits, each.float().sum()


def single_process(case: Case, plans: Sequence[Plan]) -> tuple[list[float], dict[str, Tensor]]:
    """The same in a plain loop; a plan per step."""
    model, losses = Model("data", is_tied=case.is_tied), []
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step, plan in enumerate(plans):
        total, scale = 0.0, 2.0**16 if "float16" in plan.half_types else 1.0
        for _, each in parts_of(model, make_batch(step), plan):
            total += float(each.detach()) / (NUM_ROWS * 5)
            each.backward(torch.tensor(scale / (NUM_ROWS * 5)), retain_graph=True)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


PAIRS = (("A100-80GB", "V100-32GB"), ("T4", "3090"))
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"pipeline.num_micro_batch": 2},
    "recomputed": {"pipeline.num_micro_batch": 2, "recompute.policy": "full"},
}


def check(world: World, folder: Path, case: Case, *, is_exact: bool) -> Plan:
    world.prepare(prepare, case)
    ranks = world.run(train, case, str(folder / "checkpoint"), num_ranks=len(case.models))
    plan: Plan = ranks[0][2]
    assert set(plan.half_types) == {half_type(each) for each in case.cluster.devices}
    losses, weights = single_process(case, [plan] * 3)
    for rank, (found, state, _, read, _) in enumerate(ranks):
        own = half_type(case.cluster.devices[rank])
        assert read <= {getattr(torch, str(own))}
        assert found == pytest.approx(losses, rel=1e-6 if is_exact else 2e-2)
        for name, expected in weights.items():
            assert state[name].dtype == torch.float32
            if is_exact:
                torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-6)
            elif case.optimizer == "sgd":
                torch.testing.assert_close(state[name], expected, rtol=2e-2, atol=2e-2)
    return plan


cases = st.builds(
    Case,
    st.sampled_from(PAIRS),
    st.sampled_from(["data", "pipeline"]),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(0, 3),
    st.sampled_from(["none", "none", "optimizer", "optimizer+parameters"]),
    st.booleans(),
    st.sampled_from([tuple(each.items()) for each in CONFIGS.values()]),
)


@at_most(12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases)
@example(Case(("A100-80GB", "V100-32GB"), "data"))
@example(Case(("A100-80GB", "V100-32GB"), "data", "adam", zero=1))
@example(Case(("V100-32GB", "A100-80GB"), "data", "adam", zero=3, offload="optimizer"))
@example(Case(("A100-80GB", "V100-32GB"), "data", zero=1, offload="optimizer+parameters"))
@example(Case(("A100-80GB", "V100-32GB"), "data", offload="optimizer+parameters", is_tied=True))
@example(Case(("T4", "3090"), "pipeline", zero=3, is_tied=True, config=tuple(CONFIGS["recomputed"].items())))
def test_the_law(world: World, tmp_path: Path, case: Case) -> None:
    """Bit by bit, but for sums of gradients of a weight that a device reads more than twice, which kernels round in another order."""
    check(world, tmp_path, case, is_exact=not (case.is_tied and case.kind == "data"))


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        *((0, "none"), (1, "optimizer+parameters"), (2, "none"), (3, "none"), (3, "optimizer+parameters")),
        *further([(0, "optimizer+parameters"), (1, "none"), (2, "optimizer+parameters")]),
    ],
)
def test_memory_is_the_plans_to_the_byte(world: World, tmp_path: Path, zero: int, offload: str) -> None:
    """With ZeRO 3 a keeper sends the weights that are stepped, and has no copy of them in half precision to send."""
    case = Case(PAIRS[0], "data", "adam", zero, offload)
    world.prepare(prepare, case)
    graph, cluster = captured(case).capture(precision=Precision(HALF, by_device=True))[0], make_cluster(case.models)
    for _, _, plan, _, (name, read, summed, kept, on_host) in world.run(train, case, str(tmp_path / "checkpoint"), num_ranks=2):
        device = estimate(plan, graph, cluster, Costs.of(whale.Config(case.settings))).of(name)
        # what is sent is counted as read, and the estimate has it among what is kept
        assert (read + kept, on_host) == (device.peak.weights + device.peak.optimizer, device.on_host)
        assert summed == device.memory[-1][1] - read - kept


def test_replicas_of_unlike_stages(world: World, tmp_path: Path) -> None:
    models = ("A100-80GB", "V100-32GB", "3090", "T4")
    plan = check(world, tmp_path, Case(models, "pipeline", zero=1, config=(("pipeline.num_micro_batch", 2),)), is_exact=True)
    assert len(plan.replicas) == 2


@pytest.mark.parametrize("zero", [2, 3])
def test_a_copy_of_the_state_on_each_host(world: World, tmp_path: Path, zero: int) -> None:
    """Keepers of each host send weights to devices of another type."""
    models, config = ("A100-80GB", "V100-32GB", "T4", "3090"), (("memory.zero_within", "host"), ("pipeline.num_micro_batch", 2))
    plan = check(world, tmp_path, Case(models, "data", "adam", zero, config=config, num_hosts=2), is_exact=True)
    assert plan.keeper_groups == (0, 0, 1, 1)


def test_stages_of_unlike_devices(world: World, tmp_path: Path) -> None:
    """Rows go from a device of one type to two of others, and their gradients back."""
    models = ("A100-80GB", "V100-32GB", "3090", "T4")
    plan = check(world, tmp_path, Case(models, "rows", zero=1, config=(("pipeline.num_micro_batch", 2),)), is_exact=True)
    assert len(plan.replicas) == 1


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_split_group_of_unlike_devices(world: World, tmp_path: Path, zero: int) -> None:
    """What its devices exchange in half precision is in float32, rounded by who reads it: as near as a split of like devices."""
    check(world, tmp_path, Case(("A100-80GB", "V100-32GB"), "split", zero=zero), is_exact=False)


class Masking(nn.Module):
    """Two stages that add one mask of the limit at hand, which hides some rows altogether."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with whale.replicate(1):
            self.first = Masked()
        with whale.replicate(1):
            self.second = Masked()

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.first(x)
        logits: Tensor = self.second(y, bias)[0]
        return logits


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        if bias is None:
            bias = torch.zeros_like(y).masked_fill(x[..., :1].expand_as(y) > 1, torch.finfo(y.dtype).min)
        return (y + bias).softmax(-1), bias


def masked(rank: int, num_ranks: int, models: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses, the weights at the end, and the half-precision type of each stage."""
    settings = {"precision.dtype": "half", "planning.search": "off"}
    cluster, optimizer = make_cluster(models), OPTIMIZERS["sgd"]
    engine = whale.parallelize(Masking(), loss=loss, optimizer=optimizer, batch=make_batch(0), config=settings, cluster=cluster)
    losses = [float(engine.step(make_batch(0))) for _ in range(2)]
    state = engine.state_dict()
    assert state is not None
    plan, stages = engine.plan, engine.plan.replicas[0].stages
    types = [plan.half_types[plan.rank_of[stage.virtual_device.devices[0]]] for stage in stages]
    found = losses, state, types
    engine.close()
    return found


@pytest.mark.parametrize(("models", "types"), [(PAIRS[0], ["float16", "bfloat16"]), (PAIRS[0][::-1], ["bfloat16", "float16"])])
def test_a_limit_is_that_of_who_reads_it(world: World, models: tuple[str, ...], types: list[str]) -> None:
    own = [getattr(torch, dtype) for dtype in types]
    model, batch = Masking(), make_batch(0)
    losses: list[float] = []
    assert (batch["x"][..., 0] > 1).any()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(2):
        with torch.autocast("cpu", own[0]):
            y, bias = model.first(batch["x"])
        with torch.autocast("cpu", own[1]):
            there = torch.where(bias == 0, 0.0, torch.finfo(own[1]).min).to(own[1])
            total = loss(model.second(y, there)[0], batch)
        (total * 2.0**16).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2.0**16
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    for found, weights, order in world.run(masked, models, num_ranks=2):
        assert order == types
        assert found == pytest.approx(losses, rel=1e-6)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6)


def exchanged(rank: int, num_ranks: int) -> list[list[float]]:
    """What a device of either type gets of limits and an overflow from a group: gathered, summed, their maximum, and as gradients."""
    peers = connect(300.0)
    dtype, ranks = (torch.bfloat16, torch.float16)[rank], (0, 1)
    group = Group(Groups(peers, [ranks]), ranks, is_unlike=True)
    limit = torch.finfo(torch.bfloat16).max
    value = torch.tensor([limit, -limit, 1e6], dtype=dtype) if rank == 0 else torch.zeros(3, dtype=dtype)
    start = torch.zeros(3, dtype=dtype, requires_grad=True)
    enter(start, group).backward(value)
    assert start.grad is not None
    slots = Slots(0, 6, (((0, 3),), ((3, 6),)), rank)
    return [each.tolist() for each in (gather(value, slots, group)[:3], leave(value, group), largest(value, group), start.grad)]


def test_limits_in_a_split_group_of_unlike_devices(world: World) -> None:
    """A gradient as large is an overflow."""
    _, (gathered, summed, greatest, gradient) = world.run(exchanged, num_ranks=2)
    limit = torch.finfo(torch.float16).max
    assert gathered == summed == [limit, -limit, torch.inf]
    assert greatest == [limit, 0.0, torch.inf]
    assert gradient == [torch.inf, -torch.inf, torch.inf]


def predictions(rank: int, num_ranks: int, case: Case) -> tuple[Tensor, float, Plan]:
    """Logits of a batch, and the loss of the evaluation."""
    made = captured(case)
    engine = whale.parallelize(made.model, loss=loss, batch=made.batch, config=case.settings, cluster=case.cluster)
    batch = make_batch(3)
    found = engine.predict({"x": batch["x"]}), float(engine.evaluate(batch)), engine.plan
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_predictions_lose_nothing_on_the_way(world: World, kind: str) -> None:
    """Each device's rows in its type; on a rank, all in the type of that rank, from float32 on the way."""
    case = Case(PAIRS[0], kind)
    world.prepare(prepare, case)
    made = world.run(predictions, case, num_ranks=2)
    model, batch, plan = Model("data", is_tied=False), make_batch(3), made[0][2]
    with torch.no_grad():
        logits = [part.float() for part, _ in parts_of(model, batch, plan)]
        total = sum(float(each) for _, each in parts_of(model, batch, plan))
    for (found, mean, _), device in zip(made, case.cluster.devices, strict=True):
        assert found.dtype == getattr(torch, str(half_type(device)))
        assert torch.equal(found, torch.cat(logits).to(found.dtype))
        assert mean == pytest.approx(total / (NUM_ROWS * 5), rel=1e-6)


def overflow(rank: int, num_ranks: int, case: Case) -> list[tuple[bool, float | None, bool]]:
    """Per step whether it was left out, the next loss scale, and whether weights changed; the second overflows in float16 alone."""
    made = captured(case)
    cluster, optimizer = case.cluster, OPTIMIZERS[case.optimizer]
    engine = whale.parallelize(made.model, loss=loss, optimizer=optimizer, batch=made.batch, config=case.settings, cluster=cluster)
    found = []
    for factor in (1.0, 1e6, 1.0):
        before = {name: value.clone() for name, value in engine.state.tensors.items()}
        value = float(engine.step(make_batch(0, factor)))
        changed = any(not torch.equal(before[name], value) for name, value in engine.state.tensors.items())
        found.append((engine.was_skipped, engine.loss_scale, changed))
        assert factor != 1.0 or value == value
    engine.close()
    return found


def test_a_step_that_overflows_on_one_device_is_left_out_on_all(world: World) -> None:
    case = Case(PAIRS[0], "data", config=(("precision.loss_scale", 1024.0),))
    world.prepare(prepare, case)
    for found in world.run(overflow, case, num_ranks=2):
        assert found == [(False, 1024.0, True), (True, 512.0, False), (False, 512.0, True)]


def refused(rank: int, num_ranks: int, case: Case) -> tuple[str, float]:
    """What a replan to devices of other half types says, and the loss of a step after it."""
    made, cluster = captured(case), make_cluster(case.models)
    engine = whale.parallelize(made.model, loss=loss, optimizer=OPTIMIZERS["sgd"], batch=made.batch, config=case.settings, cluster=cluster)
    (host,) = cluster.hosts
    others = tuple(replace(device, flops=FLOPS[case.models[0 if index else 1]]) for index, device in enumerate(host.devices))
    with pytest.raises(PlanError) as caught:
        engine.replan(cluster=replace(cluster, hosts=(replace(host, devices=others),)))
    found = str(caught.value), float(engine.step(make_batch(0)))
    engine.close()
    return found


def test_a_rank_keeps_its_type(world: World) -> None:
    case = Case(PAIRS[0], "data")
    world.prepare(prepare, case)
    found = world.run(refused, case, num_ranks=2)
    for (text, value), said in zip(
        found,
        (
            "rank 0 computes in bfloat16 since it started, but the plan makes it host0/0 (A100-80GB), in float16",
            "rank 1 computes in float16 since it started, but the plan makes it host0/1 (V100-32GB), in bfloat16",
        ),
        strict=True,
    ):
        assert said in text and value == found[0][1]


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(x.to(torch.bfloat16).relu())
        return result


def captured_with_a_type(rank: int, num_ranks: int) -> str:
    settings = {"precision.dtype": "half", "planning.search": "off"}
    with pytest.raises(CaptureError) as caught:
        whale.parallelize(Stated(), loss=loss, batch=make_batch(0), config=settings, cluster=make_cluster(PAIRS[0]))
    return str(caught.value)


def test_a_type_that_the_model_names_is_refused_on_all_ranks(world: World) -> None:
    for text in world.run(captured_with_a_type, num_ranks=2):
        assert "float16 here, but %" in text and "is bfloat16 everywhere" in text and "test_half_types.py" in text


class Depends(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.last, self.way = nn.Linear(WIDTH, 3), way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x)
        y = y.masked_fill(y < 0, torch.finfo(y.dtype).min)
        if self.way == "branches" and y.dtype == torch.float16:
            return y.clamp(min=-60000.0)
        return y.masked_fill(y < 1, torch.finfo(y.dtype).min / 2 if self.way == "computes" else 0.0)


def captured_apart(rank: int, num_ranks: int, way: str, models: tuple[str, ...]) -> str:
    if way == "differs" and rank == 2:
        way = "computes"
    settings = {"precision.dtype": "half", "planning.search": "off"}
    with pytest.raises(CaptureError) as caught:
        whale.parallelize(Depends(way), loss=loss, batch=make_batch(0), config=settings, cluster=make_cluster(models))
    return str(caught.value)


@pytest.mark.parametrize(("way", "ops"), [("branches", ("%clamp", "%lt_1")), ("computes", ("-32752.0", "-1.6947656946257677e+38"))])
def test_a_model_that_depends_on_its_half_type_is_told_so(world: World, way: str, ops: tuple[str, str]) -> None:
    """With what differs, which the limit itself is not."""
    for text in world.run(captured_apart, way, PAIRS[0], num_ranks=2):
        assert "(rank 1: %" in text and all(op in text for op in ops) and "3.3895313892515355e+38" not in text
        assert "rank 0 computes in bfloat16 and rank 1 in float16, and the model must not depend on which" in text
        assert "test_half_types.py" in text


def test_ranks_of_one_type_that_differ_are_told_so(world: World) -> None:
    for text in world.run(captured_apart, "differs", ("A100-80GB", "V100-32GB", "3090"), num_ranks=3):
        assert "ranks captured different models" in text and "precision.dtype" not in text and "PYTHONHASHSEED" in text


def replanned(rank: int, num_ranks: int, case: Case) -> tuple[list[float], list[float | None], list[Plan], dict[str, Tensor]]:
    """A step on all devices, on either alone, and on all again; and the weights at the end."""
    made, cluster = captured(case), case.cluster
    optimizer, settings = OPTIMIZERS[case.optimizer], whale.Config(case.settings)
    engine = whale.parallelize(made.model, loss=loss, optimizer=optimizer, batch=made.batch, config=settings, cluster=cluster)
    losses, scales, plans = [], [], []
    for step, devices in enumerate((None, ["host0/0"], ["host0/1"], ["host0/0", "host0/1"])):
        if devices is not None:
            engine.replan(make_plan(engine.opening.modes.train.graph, cluster.only(devices), settings))
        losses.append(float(engine.step(make_batch(step))))
        scales.append(engine.loss_scale)
        plans.append(engine.plan)
    state = engine.state_dict()
    assert state is not None
    weights = state
    engine.close()
    return losses, scales, plans, weights


@pytest.mark.parametrize("zero", [0, 3])
def test_a_training_moves_between_device_types(world: World, zero: int) -> None:
    """The weights that are stepped stay in float32, so a device of any type goes on from them; the loss scale goes and comes."""
    case = Case(PAIRS[0], "data", "adam", zero)
    world.prepare(prepare, case)
    (losses, scales, plans, weights), _ = world.run(replanned, case, num_ranks=2)
    assert [plan.half_types for plan in plans] == [("bfloat16", "float16"), ("bfloat16",), ("float16",), ("bfloat16", "float16")]
    assert scales == [65536.0, None, 65536.0, 65536.0]
    expected_losses, expected = single_process(case, plans)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6)
