"""The tree of modules: what stands together, and what is summed; and the table of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.planning.graphs import chain, cluster, scope
from whale.cli.plan import Module, TreePiece, module_of, print_plan, tree_of
from whale.cli.planned import Planned
from whale.config import Config
from whale.estimate import Costs, estimate
from whale.estimate.prices.prices import Prices
from whale.ir import division
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.plan import plan as plan_value
from whale.planning import make_plan


def layer(number: int, stage: int, *, deep: bool = True) -> list[TreePiece]:
    way = ("blocks", "h", str(number))
    return [
        TreePiece((*way, "attention") if deep else way, stage, f"h/{stage}", 10, 1.0),
        TreePiece((*way, "mlp"), stage, f"h/{stage}", 20, 2.0),
    ]


def lines(module: Module, depth: int = 0) -> list[str]:
    own = f"{'  ' * depth}{module.name or '-'} {module.stages} {sum(module.held.values())} {sum(module.busy.values()):g}"
    return [own, *(line for inside in module.inside for line in lines(inside, depth + 1))]


def test_numbered_modules_that_are_placed_alike_stand_together() -> None:
    ends = [TreePiece(("embedding",), 0, "h/0", 5, 0.5), TreePiece(("head",), 1, "h/1", 7, 3.0), TreePiece((), 1, "h/1", 0, 1.0)]
    pieces = [ends[0], *layer(0, 0), *layer(1, 0), *layer(2, 1), *ends[1:]]
    assert lines(module_of("", pieces)) == [
        "- (0, 1) 102 13.5",
        "  embedding (0,) 5 0.5",
        "  blocks.h (0, 1) 90 9",
        "    0 .. 1 (0,) 60 6",
        "      attention (0,) 20 2",
        "      mlp (0,) 40 4",
        "    2 (1,) 30 3",
        "      attention (1,) 10 1",
        "      mlp (1,) 20 2",
        "  head (1,) 7 3",
    ]


def test_modules_that_are_built_otherwise_stay_apart() -> None:
    found = module_of("", [*layer(0, 0), *layer(1, 0, deep=False), *layer(2, 0)])
    assert [each.name for each in found.inside[0].inside] == ["0", "1", "2"]


def test_nothing_is_lost_on_any_device() -> None:
    pieces = [*layer(0, 0), *layer(1, 0), *layer(2, 1, deep=False)]
    found = module_of("", pieces)
    assert found.held == {device: sum(p.num_bytes for p in pieces if p.device == device) for device in ("h/0", "h/1")}
    assert found.busy == {device: sum(p.seconds for p in pieces if p.device == device) for device in ("h/0", "h/1")}


@pytest.mark.parametrize("policy", ["none", "full", {0: 0.5}])
def test_the_tree_of_a_plan_has_what_each_device_holds_and_computes(policy: object) -> None:
    is_equal(chain(4, width=64), {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4, "recompute.policy": policy})


def test_the_tree_of_a_split_has_the_parts_of_its_devices() -> None:
    assert is_equal(chain(2, [(scope(0, 2, kind="split"),)] * 2, width=64), {}).is_sharded


def is_equal(graph: ModelGraph, settings: Mapping[str, object]) -> Plan:
    """What is summed over a tree is what the estimate has of each device."""
    config, made = Config(settings), cluster((1e9, 1e9))
    hosts = tuple(replace(host, devices=tuple(replace(own, host_seconds=1e-3) for own in host.devices)) for host in made.hosts)
    here = replace(made, hosts=hosts)
    plan, costs = make_plan(graph, here, config, rows=16), Costs.for_model(config, graph, here)
    found = Planned(graph, config, here, plan, estimate(plan, graph, here, costs))
    for replica in plan.replicas:
        tree = tree_of(found, replica, Prices(graph, here, costs))
        for device, seconds in tree.busy.items():
            own = found.step.of(device)
            assert seconds == pytest.approx(own.busy - own.optimizer) and tree.held[device] == sum(own.stage_bytes)
        assert {found.step.of(device).devices[0] for stage in replica.stages for device in stage.virtual_device.devices} == set(tree.busy)
    return plan


def test_rows_are_divided_once_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, here, num_calls = chain(1), cluster((1e9,) * 6), 0
    config = Config({"planning.search": "off"})
    plan = make_plan(graph, here, config, rows=12)
    found = Planned(graph, config, here, plan, estimate(plan, graph, here, Costs.for_model(config, graph, here)))

    def counted(*arguments: Any, **named: Any) -> tuple[int, ...]:
        nonlocal num_calls
        num_calls += 1
        return division.divide(*arguments, **named)

    monkeypatch.setattr(plan_value, "divide", counted)
    print_plan(found)
    assert len(plan.replicas) == 6 and num_calls == 1
    assert str(plan) and num_calls == 2
