"""Advice is the difference of two searches, and says which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.estimate.test_measured import profile
from tests.unit.planning.graphs import chain
from tests.unit.planning.graphs import cluster as line_of
from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.errors import ConfigError
from whale.estimate import estimate
from whale.ir.cluster import Cluster
from whale.ir.plan import Choice
from whale.ir.serialization import to_json
from whale.planning import make_plan
from whale.search import advice, search
from whale.search.advice import About, Advice, Advised, advise, of_depth, why_slower
from whale.search.changes import faster_between, one_more

GRAPH = layers([64] * 4)


def advised(cluster: Cluster, **settings: object) -> Advised:
    return advise(GRAPH, cluster, Config({f"planning.{key}": value for key, value in settings.items()}), rows=16)


def about(found: Advised, what: About) -> list[Advice]:
    return [each for each in found.advice if each.about == what]


def test_devices_that_slow_a_run_are_to_be_left_out_and_the_others_used() -> None:
    cluster = made([[(1e10, GIB)], [(1e9, GIB)]], network=1e6)
    found = advised(cluster)
    fast, slow = about(found, "devices")
    assert found.found is not None and fast.value == found.found.value == slow.value
    alone = search(GRAPH, cluster.only(["h1/0"]), Config(), rows=16)
    assert fast.says.startswith("use the 1 1e+10: ") and fast.beside == alone.value
    assert slow.says.startswith("leave the 1e+09 out: with them it is ") and slow.beside is not None and slow.beside > found.found.value
    assert "; compute-bound: h1/0" in slow.says, "alone it does better than behind that link"


def test_devices_that_are_as_good_bring_nothing() -> None:
    found = advised(made([[(1.0001e9, GIB)], [(1e9, GIB)]], network=1e3), effort=30)
    for each in about(found, "devices"):
        assert "may be left out: the others alone are as good (" in each.says, each.says


def test_more_devices_and_faster_links_never_make_it_worse() -> None:
    found = advised(made([[(1e9, GIB)], [(1e9, GIB)]], network=1e8), effort=8)
    assert [each.about for each in found.advice] == ["devices", "more", "link", "redundancy", "memory"]
    for each in found.advice[1:3]:
        assert each.value is not None and each.beside is not None and each.value <= each.beside
    assert about(found, "devices")[0].says.startswith("use ")
    (memory,) = about(found, "memory")
    assert memory.value is not None and memory.beside is not None and memory.value <= memory.beside
    (copies,) = about(found, "redundancy")
    assert copies.says.startswith("memory.redundancy: 1 survives the loss of any one host: copies after each step")
    assert copies.value is not None and found.found is not None and copies.value > found.found.value == copies.beside


def test_a_search_that_starts_from_a_good_plan_is_never_worse_on_more_devices() -> None:
    """The line-ups of five devices are fewer than those of four: unlike ones need not be among them."""
    few = made([[(3e9, GIB)], [(1e10, 100_000)], [(1e10, GIB), (3e9, 60_000)]], network=1e9)
    more, _ = one_more(few, few.devices[0].kind)
    known = search(GRAPH, few, Config(), rows=16)
    assert search(GRAPH, more, Config(), rows=16, effort=1).value > 1.05 * known.value
    assert search(GRAPH, more, Config(), rows=16, effort=1, start=[known.strategy]).value <= known.value * (1 + 1e-9)
    assert search(GRAPH, few.only(["h0/0"]), Config(), rows=4, effort=1, start=[known.strategy]).value  # there are no devices for it


def test_a_pipeline_over_several_kinds_says_who_is_in_front() -> None:
    cluster = made([[(1e9, 200_000)], [(3e9, 200_000)]], network=3e7)
    found = advised(cluster, effort=30)
    (front,) = about(found, "front")
    assert found.found is not None
    kind = cluster.by_name[found.found.plan.replicas[0].stages[0].virtual_device.devices[0]].model
    assert front.says.startswith(f"the {kind} takes the front of the pipeline: besides parameters the first stage keeps ")
    if front.value is None:
        assert front.beside is None and "no plan with another device type there was tried" in front.says
    else:
        assert front.value == found.found.value and front.beside is not None and front.beside >= front.value


def test_a_search_that_finds_nothing_better_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "faster_between", lambda cluster, factor: faster_between(cluster, 1e-3 / factor))
    monkeypatch.setattr(advice, "one_more", lambda cluster, kind: (with_memory(cluster, 1), "without memory"))
    found = advised(made([[(1e9, GIB)], [(1e9, GIB)]], network=1e8), effort=2)
    assert found.found is not None
    (more,), (link,) = about(found, "more"), about(found, "link")
    assert more.value is None and more.beside == found.found.value and ": no gain was found (" in more.says
    assert link.value is not None and link.beside is not None and link.value > link.beside
    assert link.says.startswith("links between hosts twice as fast: no gain above 2% was found (")


def test_a_search_that_loses_the_plan_on_faster_links_does_not_make_it_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = made([[(1e9, GIB)], [(1e9, GIB)]], network=1e8)
    monkeypatch.setattr(advice, "FACTOR", 100)
    own = search(GRAPH, cluster, Config(), rows=16)
    alone = search(GRAPH, cluster.only(["h0/0"]), Config(), rows=16)

    def searched(self: object, what: str, there: Cluster, start: object = (), using: object = None, effort: object = None) -> object:
        return alone if what.startswith("links") else own

    monkeypatch.setattr(advice._Adviser, "searched", searched)
    (link,) = about(advised(cluster), "link")
    assert alone.value > own.value and link.beside == own.value and link.value is not None and link.value < own.value
    assert link.says.startswith("links between hosts twice as fast: ") and "x (" in link.says


def with_memory(cluster: Cluster, num_bytes: int) -> Cluster:
    hosts = (replace(host, devices=tuple(replace(own, memory=num_bytes) for own in host.devices)) for host in cluster.hosts)
    return replace(cluster, hosts=tuple(hosts))


@pytest.mark.slow
def test_devices_that_no_plan_uses_for_want_of_effort_are_looked_at_by_themselves() -> None:
    few = advised(made([[(1e10, GIB)] * 2, [(1e9, GIB)] * 3], network=1e6), effort=1)
    assert few.found is not None and not any("h1" in name for name in few.found.plan.devices)
    _, slow = about(few, "devices")
    assert slow.beside is not None and slow.beside > few.found.value
    assert slow.says.startswith("leave the 1e+09 out: with them it is "), slow.says


def test_several_stragglers_compute_and_wait() -> None:
    graph, here = chain(4), line_of([1e9, 1e9])
    step = estimate(make_plan(graph, here, Config({"planning.search": "off"}), rows=16), graph, here)
    assert step.straggler.name == "h0/0, h0/1"
    assert "h0/0, h0/1 compute for " in why_slower(step, 1.0) and "computes for" not in why_slower(step, 1.0)
    assert " and wait " in why_slower(step, 1.0)


def test_advice_from_measured_times(tmp_path: Path) -> None:
    graph, here, path = chain(2), line_of([1e9, 1e9]), tmp_path / "p.json"
    path.write_text(to_json(profile(graph, here)))
    found = advise(graph, here, Config({"cluster.profile": str(path), "planning.effort": 1}), rows=16)
    assert found.found is not None and found.advice[-1].about == "memory"


def test_where_nothing_fits_it_says_what_would() -> None:
    found = advised(made([[(1e9, 100_000)]], network=1e9))
    assert found.found is None and "out of memory" in found.fault
    _, more, memory = found.advice
    assert more.says.startswith("one more 1e+09 in host h0: ")
    assert memory.value is not None and memory.beside == 100_000 < memory.value

    assert [each.says for each in about(found, "state")] == ["memory.offload: auto: still nothing fits"]
    (hosts,) = about(advised(made([[(1e9, 190_000)]], network=1e9)), "state")
    assert hosts.says.startswith("memory.offload: auto: then it fits (") and "memory.offload: optimizer (" in hosts.says
    asked = advise(GRAPH, made([[(1e9, 190_000)]], network=1e9), Config({"memory.offload": "none"}), rows=16)
    assert asked.found is None and not about(asked, "state")


STATE = Choice("memory", "state", "memory.zero: 2, memory.offload: none", bound="nothing fits otherwise")


@pytest.mark.parametrize("fits", [("2",), ("0", "2")])
def test_the_state_is_named_and_why_unless_it_brings_less_than_two_percent(fits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = made([[(1e9, GIB)] * 2], network=1e12)
    plain = advised(cluster, effort=1)
    assert plain.state == "memory.zero: 0, memory.offload: none" and not about(plain, "state")

    def with_two(config: Config, num_devices: int, planned: Any, **_: Any) -> Any:
        plan, step = [planned(config.with_values({"memory.zero": zero})) for zero in fits][-1]
        return replace(plan, choices=(STATE, *plan.choices)), step

    monkeypatch.setattr(advice, "with_states", with_two)
    found = advised(cluster, effort=1)
    assert found.state == STATE.decision
    assert [each.says for each in about(found, "state")] == ([f"{STATE.decision}: {STATE.bound}"] if len(fits) == 1 else [])


def test_of_depths_that_are_as_good_the_plainest_state_is_named() -> None:
    def size(zero: str, offload: str, num_blocks: int) -> Any:
        return SimpleNamespace(
            zero=zero, offload=offload, num_blocks=num_blocks, num_parameters=num_blocks * 10**6, step=SimpleNamespace(step_seconds=1.0)
        )

    sizes = [size("0", "none", 40), size("3", "none", 100), size("3", "optimizer", 101)]
    assert of_depth(sizes).says == (
        "with 100 blocks, 100 M parameters, the model still trains (memory.zero: 3, memory.offload: none, 1 s; with 40: memory.zero: 0, "
        "memory.offload: none, 1 s)"
    )
    assert of_depth(sizes[:1]).says.endswith("(memory.zero: 0, memory.offload: none, 1 s)")


def test_a_model_that_is_divided_already_gets_no_advice() -> None:
    with pytest.raises(ConfigError, match=r"nothing to advise on: planning\.search off leaves nothing to search"):
        advised(made([[(1e9, GIB)]], network=1e9), search="off")
