"""Plans for devices with half-precision types of their own: each at its own speed, and said in the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from whale.config import Config
from whale.errors import ConfigError, PlanError
from whale.estimate import Costs
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace
from whale.estimate.prices.prices import Prices
from whale.hardware import compute_type, parse_cluster
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import from_json, to_json
from whale.planning import retarget_plan
from whale.planning.plan import make_plan
from whale.planning.verify.verify import verify
from whale.search import decide
from whale.workloads import GPT

ROWS = 16


def cluster_of(*models: str) -> Cluster:
    hosts = "".join(f"  - {{name: h{number}, devices: 1 x {model}}}\n" for number, model in enumerate(models))
    return parse_cluster(f"name: mixed\nnetwork: infiniband-hdr\nhosts:\n{hosts}")


MIXED = cluster_of("A100-80GB", "V100-32GB", "3090", "T4")


@cache
def graph_in(setting: str) -> ModelGraph:
    models = {"half": MIXED, "fp16": MIXED, "bf16": cluster_of("A100-80GB")}
    precision = compute_type(Config({"precision.dtype": setting}), models[setting])
    return GPT(layers=2, hidden=64, heads=4, sequence=32, vocabulary=128).graph("cuda", precision)


@cache
def planned(setting: str, **settings: object) -> Plan:
    return make_plan(graph_in(setting), MIXED, Config({"planning.search": "off", **settings}), rows=ROWS)


def test_a_plan_says_each_devices_type() -> None:
    plan = planned("half")
    assert dict(zip(plan.device_models, plan.half_types, strict=True)) == {
        "A100-80GB": "bfloat16",
        "V100-32GB": "float16",
        "3090": "bfloat16",
        "T4": "float16",
    }
    assert "half precision: bfloat16 on A100-80GB, 3090; float16 on V100-32GB, T4" in str(plan)
    assert planned("fp16").half_types == () and "half precision" not in str(planned("fp16"))
    assert from_json(Plan, to_json(plan)) == plan


@pytest.mark.parametrize(("device", "setting"), [("h0/0", "bf16"), ("h1/0", "fp16"), ("h2/0", "bf16"), ("h3/0", "fp16")])
def test_each_device_computes_at_the_speed_of_its_type(device: str, setting: str) -> None:
    one, other = (Prices(graph_in(each), MIXED, Costs()) for each in ("half", setting))
    found, expected = (prices.seconds(MIXED.by_name[device], 4.0) for prices in (one, other))
    for field in ("forward_fixed", "forward_per_row", "backward_fixed", "backward_per_row"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field))


def test_what_unlike_devices_of_a_group_exchange_costs_twice_the_bytes() -> None:
    graph = graph_in("half")
    op = next(op for op in graph.ops if op.target.startswith("aten.linear"))
    full = next(op for op in graph.ops if op.target.startswith("aten.layer_norm"))
    like, unlike = (
        CollectiveCosts(Prices(graph, MIXED, Costs()), StagePlace((group,), 4.0, 1, 1)) for group in (("h0/0", "h2/0"), ("h0/0", "h1/0"))
    )
    assert unlike.payload(op) == like.payload(op) * 2 and unlike.payload(full) == like.payload(full)


def test_weights_go_to_unlike_owners_in_the_type_that_is_stepped() -> None:
    """Twice the bytes of a gather, of what is read in half precision; between like devices as before."""
    seconds = {}
    for models in (("A100-80GB", "3090"), ("A100-80GB", "V100-32GB")):
        devices = tuple(replace(device, host="h0") for device in cluster_of(*models).devices)
        cluster = Cluster("one", (Host("h0", devices, Link(1e9, 1e-5)),), None)
        wide, narrow = (
            make_plan(graph_in(each), cluster, Config({"planning.search": "off", "memory.zero": "3"}), rows=ROWS)
            for each in ("half", "fp16")
        )
        seconds[models[1]] = wide.step_seconds / narrow.step_seconds
    assert seconds["3090"] == pytest.approx(1.0, rel=1e-3) and seconds["V100-32GB"] > 1.01


def test_the_search_plans_for_it_and_a_plan_is_carried_to_evaluation() -> None:
    plan, _ = decide(None, graph_in("half"), MIXED, Config(), rows=ROWS)
    assert plan.half_types == tuple(
        dict(zip(planned("half").devices, planned("half").half_types, strict=True))[name] for name in plan.devices
    )
    again = retarget_plan(plan, graph_in("half"), graph_in("half"))
    assert again.half_types == plan.half_types


def test_a_plan_with_other_types_than_the_devices_is_refused() -> None:
    plan = planned("half")
    odd = replace(plan, half_types=("float16",) * 4)
    with pytest.raises(PlanError, match=r"other half-precision types than the devices \(h0/0: float16 in the plan, bfloat16 in mixed"):
        verify(odd, graph_in("half"), MIXED)
    with pytest.raises(PlanError, match=r"h1/0: no type in the plan, float16 in mixed"):
        verify(replace(plan, half_types=()), graph_in("half"), MIXED)


def test_a_graph_for_devices_with_types_is_refused_where_one_has_none() -> None:
    devices = [replace(MIXED.devices[0], flops=(("float32", 1e12),), model="old"), *MIXED.devices[1:]]
    old = replace(MIXED, hosts=tuple(replace(host, devices=(device,)) for host, device in zip(MIXED.hosts, devices, strict=True)))
    with pytest.raises(ConfigError, match=r"finds neither bfloat16 nor float16 on h0/0 \(old\): old has float32"):
        make_plan(graph_in("half"), old, Config({"planning.search": "off"}), rows=ROWS)
