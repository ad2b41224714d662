"""Advice is made of answers to the same search; its lines agree with one another, with these answers and with the plan."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.estimate.test_measured import profile
from tests.unit.planning.graphs import chain
from tests.unit.planning.graphs import cluster as line_of
from tests.unit.search.test_search import GIB, NETWORKS, layers, made, models
from whale.config import Config
from whale.errors import ConfigError, PlanError, WhaleError
from whale.estimate import estimate
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.serialization import to_json
from whale.planning import make_plan
from whale.search import advice, asking, decide, search
from whale.search.advice import About, Advice, Advised, advise, of_depth, shares
from whale.search.asking import Answer, PlanQuestion
from whale.search.changes import faster_between, one_more

GRAPH = layers([64] * 4)

CLOSE = 1 + 1e-9
"""Times whose ratio is smaller are the same."""


def advised(cluster: Cluster, **settings: object) -> Advised:
    return advise(GRAPH, cluster, Config({f"planning.{key}": value for key, value in settings.items()}), rows=16)


def about(found: Advised, what: About) -> list[Advice]:
    return [each for each in found.advice if each.about == what]


def slowed(cluster: Cluster, factors: list[float]) -> Cluster:
    return cluster.slowed(dict(zip((device.name for device in cluster.devices), factors, strict=False)))


unlike = st.tuples(st.sampled_from((1e9, 3e9, 1e10)), st.sampled_from((20_000, GIB)))


def clusters(most: int) -> st.SearchStrategy[Cluster]:
    """Hosts of unlike devices, some of them slowed."""
    hosts = st.lists(st.lists(unlike, min_size=1, max_size=most), min_size=1, max_size=3).filter(
        lambda own: 2 <= sum(map(len, own)) <= most
    )
    factors = st.lists(st.sampled_from((1.0, 1.0, 2.0, 5.0)), min_size=most, max_size=most)
    return st.builds(slowed, st.builds(made, hosts, st.sampled_from(NETWORKS)), factors)


def kinds_of(cluster: Cluster) -> dict[str, Device]:
    """Device types by what the lines call them."""
    counts = {kind: sum(device.kind == kind for device in cluster.devices) for kind in cluster.kind_names}
    return {f"{counts[kind]} x {name}" if counts[kind] > 1 else name: kind for kind, name in cluster.kind_names.items()}


def conditions(found: Advised, cluster: Cluster) -> list[tuple[Answer, Device | None, bool]]:
    """The facts about the cluster as it is, each with the device type that its plans use or do not."""
    asked = {f"{word} the {name}": (kind, word == "with") for name, kind in kinds_of(cluster).items() for word in ("with", "without")}
    alone: dict[str, tuple[Device | None, bool]] = {"": (None, True), f"one {cluster.devices[0].model}": (None, True)}
    return [(each, *(asked | alone)[each.setting]) for each in found.facts if each.setting in asked | alone]


def lines_agree(found: Advised, cluster: Cluster) -> None:
    assert found.best is not None and found.facts[0] == found.best
    as_it_is = conditions(found, cluster)
    for (stated, kind, used), (other, *_) in product(as_it_is, as_it_is):  # one is the best of all that do as it says
        if kind is None or (kind in other.kinds) is used:
            assert stated.value <= other.value * CLOSE or (stated.setting.startswith("one ")), (stated.setting, other.setting)
    text, values = found.best.objective.text, {each.setting: each.value for each in found.facts}
    for line in found.advice:
        if said := re.search(r"([\d.]+ \w+) with (?:it|them), ([\d.]+ \w+) without", line.says):
            assert said.groups() == (text(values[f"with the {line.subject}"]), text(values[f"without the {line.subject}"]))
        for now in re.findall(r"([\d.]+ \w+) now\b", line.says) if line.about != "batch" else ():
            assert now == text(found.best.value)
        if more := re.search(r"(\d+)% slower", line.says):
            ratio = values[f"with the {line.subject}"] / values[f"without the {line.subject}"]
            assert int(more[1]) == round(100 * (ratio - 1))
        assert not re.search(r"-bound", line.says)


@at_most(12)
@given(graph=models, cluster=clusters(6), rows=st.integers(1, 9), effort=st.integers(1, 4))
def test_no_two_lines_disagree_however_short_the_searches(graph: ModelGraph, cluster: Cluster, rows: int, effort: int) -> None:
    found = advise(graph, cluster, Config({"planning.effort": effort}), rows=rows)
    if found.best is not None:
        lines_agree(found, cluster)


@at_most(8)
@given(graph=models, cluster=clusters(2), rows=st.integers(1, 2))
def test_every_value_is_what_a_search_with_that_change_gives(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    """With enough effort a search on few devices looks at every plan; links change what is fast in ways that it approximates."""
    config = Config({"planning.effort": 100})
    try:
        _, step = decide(None, graph, cluster, config, rows=rows)
    except WhaleError:
        assert advise(graph, cluster, config, rows=rows).best is None
        return
    found = advise(graph, cluster, config, rows=rows)
    lines_agree(found, cluster)
    as_it_is = PlanQuestion(graph, cluster, config, rows)
    for stated, kind, used in conditions(found, cluster):
        assert step.step_seconds <= stated.value * CLOSE, "no suggestion beats the plan"
        assert as_it_is.value_of(stated.plan) == pytest.approx(stated.value, rel=1e-9)
        if kind is not None:
            there = cluster if used else cluster.only([device.name for device in cluster.devices if device.kind != kind])
            with suppress(WhaleError):  # where state must be shared out
                asked = search(graph, there, config, rows=rows, using=kind if used else None)
                assert stated.value <= asked.value * CLOSE
    for stated in found.facts:
        if (changed := changes(cluster, rows).get(stated.setting)) is not None:
            there, own_rows = changed
            assert PlanQuestion(graph, there, config, own_rows).value_of(stated.plan) == pytest.approx(stated.value, rel=1e-9)
            assert stated.value <= decide(None, graph, there, config, rows=own_rows)[1].step_seconds * CLOSE


def changes(cluster: Cluster, rows: int) -> dict[str, tuple[Cluster, int]]:
    """Settings with the cluster and the rows that they stand for."""
    more = {
        f"one more {cluster.kind_names[kind]} {where}": there for kind in cluster.kind_names for there, where in [one_more(cluster, kind)]
    }
    own: dict[str, tuple[Cluster, int]] = {setting: (there, rows) for setting, there in more.items()}
    return own | {
        f"a global batch of {2 * rows} rows": (cluster, 2 * rows),
        "links between hosts twice as fast": (faster_between(cluster, 2), rows),
    }


def test_devices_that_slow_a_run_are_to_be_left_out_and_the_others_used() -> None:
    cluster = made([[(1e10, GIB)], [(1e9, GIB)]], network=1e6)
    found = advised(cluster)
    fast, slow = about(found, "devices")
    assert found.best is not None and fast.value == found.best.value == slow.value
    alone = search(GRAPH, cluster.only(["h1/0"]), Config(), rows=16)
    assert fast.says.startswith("use the 1e+10: ") and fast.beside == alone.value
    assert slow.says.startswith("leave the 1e+09 out: ") and slow.beside is not None and slow.beside > found.best.value
    assert slow.beside == alone.value and "% slower (" in slow.says, "alone it does better than behind that link"
    assert slow.says.endswith("; 1 x (1e+09), 1 micro-batch: h1/0 computes 100% of the step)")


def test_devices_that_are_as_good_bring_nothing() -> None:
    found = advised(made([[(1.0001e9, GIB)], [(1e9, GIB)]], network=1e3), effort=30)
    for each in about(found, "devices"):
        assert "may be left out: the others alone are as good (" in each.says, each.says


def test_what_brings_nothing_shares_a_line() -> None:
    found = advised(made([[(1e9, GIB)], [(1e9, GIB)]], network=5e8), effort=8)
    assert [each.about for each in found.advice] == ["devices", "batch", "more", "redundancy", "none"]
    more, (nothing,) = about(found, "more")[0], about(found, "none")
    assert more.value is not None and more.beside is not None and more.value < more.beside
    assert about(found, "devices")[0].says.startswith("use ")
    assert nothing.subject == "links between hosts twice as fast" and nothing.says.startswith("no gain above 2% was found from links")
    (copies,) = about(found, "redundancy")
    assert copies.says.startswith("memory.redundancy: 1 survives the loss of any one host: copies after each step")
    assert copies.value is not None and found.best is not None and copies.value > found.best.value == copies.beside


def test_a_search_that_starts_from_a_good_plan_is_never_worse_on_more_devices() -> None:
    """The line-ups of five devices are fewer than those of four: the best on few need not be among them."""
    few = made([[(3e9, GIB)], [(1e10, 100_000)], [(1e10, GIB), (3e9, 60_000)]], network=1e9)
    more, _ = one_more(few, few.devices[0].kind)
    known = search(GRAPH, few, Config(), rows=16)
    assert search(GRAPH, more, Config(), rows=16, effort=1).value > 1.05 * known.value
    assert search(GRAPH, more, Config(), rows=16, effort=1, start=[known.strategy]).value <= known.value * CLOSE
    assert search(GRAPH, few.only(["h0/0"]), Config(), rows=4, effort=1, start=[known.strategy]).value  # there are no devices for it


def test_a_question_that_finds_a_better_plan_gives_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, answers = made([[(1e10, GIB)], [(1e9, GIB)] * 2], network=1e6), asking.answers

    def poor(question: PlanQuestion, setting: str = "", start: object = ()) -> tuple[Answer, ...]:
        return answers(question, setting)[slice(None) if setting else slice(-1, None)]

    monkeypatch.setattr(advice, "answers", poor)
    found = advised(cluster)
    assert found.best is not None and found.best.value == decide(None, GRAPH, cluster, Config(), rows=16)[1].step_seconds
    assert [each.says.split(" 1e+")[0] for each in about(found, "devices")] == ["use the", "leave the 2 x"]
    lines_agree(found, cluster)


def test_a_search_that_loses_the_plan_does_not_make_it_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, answers = made([[(1e9, GIB)], [(1e9, GIB)]], network=1e7), asking.answers

    def lost(question: PlanQuestion, setting: str = "", start: object = ()) -> tuple[Answer, ...]:
        if setting.startswith("one more"):
            raise PlanError("lost")
        alone = replace(question, cluster=cluster.only(["h0/0"])) if setting.startswith("links") else question
        return answers(alone, setting)

    monkeypatch.setattr(advice, "answers", lost)
    monkeypatch.setattr(advice, "FACTOR", 100)
    found = advised(cluster)
    assert found.best is not None and "one more 1e+09 on a host like h0" in about(found, "none")[0].says
    (link,) = about(found, "link")
    assert link.beside == found.best.value and link.value is not None and link.value < link.beside
    assert link.says.startswith("links between hosts twice as fast: ") and "x (" in link.says


FIRST = """
hosts:
  - name: a
    devices: [A100-80GB, {model: A100-80GB, slowdown: 2}, {model: A100-80GB, slowdown: 3}, {model: A100-80GB, memory: 20 GB}]
  - {name: b, devices: [2 x T4, {model: T4, slowdown: 3}, {model: T4, memory: 14 GiB}, {model: T4, traffic: 0.4, memory: 14 GiB}]}
network: ethernet-25g
"""


def test_devices_of_one_model_are_called_by_what_differs() -> None:
    assert list(parse_cluster(FIRST).kind_names.values()) == [
        "A100-80GB of 80 GiB",
        "2x slowed A100-80GB of 80 GiB",
        "3x slowed A100-80GB of 80 GiB",
        "A100-80GB of 20 GB",
        "T4 of 15 GiB",
        "slowed T4 of 15 GiB",
        "T4 of 14 GiB (b/3)",
        "T4 of 14 GiB (b/4)",
    ]
    one = parse_cluster("hosts: [{name: a, devices: [T4, {model: T4, slowdown: 2}]}]\n")
    assert list(one.kind_names.values()) == ["T4", "slowed T4"]
    assert str(search(GRAPH, one.only(["a/1"]), Config(), rows=16).strategy).startswith("1 x (slowed T4)")


def test_slowed_devices_are_to_be_cured_rather_than_bought() -> None:
    cluster = slowed(made([[(1e9, GIB)] * 2], network=1e9), [1.0, 4.0])
    found = advised(cluster)
    assert not any("one more slowed" in each.says for each in found.advice)
    (cured,) = about(found, "speed")
    assert cured.says.startswith("the slowed 1e+09 at full speed: ")
    assert cured.value == pytest.approx(search(GRAPH, made([[(1e9, GIB)] * 2], network=1e9), Config(), rows=16).value)


def test_half_precision_is_asked_about_where_devices_have_it_and_nothing_is_set() -> None:
    cluster = parse_cluster("hosts: [{name: a, devices: [A100-80GB, T4]}]\n")
    asked = list[object]()

    def captured(config: Config) -> ModelGraph:
        asked.append(config.precision.dtype)
        return layers([32] * 4)

    found = advise(GRAPH, cluster, Config(), rows=16, recapture=captured)
    assert asked == ["fp16"], "a T4 has no bfloat16"
    assert any(each.setting == "precision.dtype: fp16" for each in found.facts)
    advise(GRAPH, cluster.only(["a/0"]), Config(), rows=16, recapture=captured)
    assert asked == ["fp16", "bf16"]
    advise(GRAPH, cluster, Config({"precision.dtype": "float32"}), rows=16, recapture=captured)
    advise(GRAPH, made([[(1e9, GIB)]], network=1e9), Config(), rows=16, recapture=captured)
    assert asked == ["fp16", "bf16"]


def test_a_larger_batch_is_told_in_samples_per_second() -> None:
    found = advised(made([[(1e9, GIB)] * 2], network=1e9))
    (batch,) = about(found, "batch")
    larger = search(GRAPH, made([[(1e9, GIB)] * 2], network=1e9), Config(), rows=32)
    assert found.best is not None and batch.value == larger.of_sample and batch.beside == found.best.value / 16
    assert batch.says.startswith("a global batch of 32 rows: ") and "x (" in batch.says and " samples per second, " in batch.says


@pytest.mark.slow
def test_devices_that_no_plan_uses_for_want_of_effort_are_looked_at_by_themselves() -> None:
    few = advised(made([[(1e10, GIB)] * 2, [(1e9, GIB)] * 3], network=1e6), effort=1)
    assert few.best is not None and not any("h1" in name for name in few.best.plan.devices)
    _, slow = about(few, "devices")
    assert slow.beside is not None and slow.beside > few.best.value
    assert slow.says.startswith("leave the 3 x 1e+09 out: "), slow.says


def test_several_devices_compute_and_wait_in_shares_of_the_step() -> None:
    here = made([[(1e9, GIB)], [(1e9, GIB)]], network=1e8)
    step = estimate(make_plan(GRAPH, here, Config({"planning.search": "off"}), rows=16), GRAPH, here)
    said = re.fullmatch(r"h0/0, h1/0 compute (\d+)% of the step and wait (\d+)% for messages", shares(step))
    assert said is not None and sum(map(int, said.groups())) in (99, 100, 101)
    assert int(said[1]) == round(100 * step.straggler.busy / step.step_seconds)


def test_advice_from_measured_times(tmp_path: Path) -> None:
    graph, here, path = chain(2), line_of([1e9, 1e9]), tmp_path / "p.json"
    path.write_text(to_json(profile(graph, here)))
    config = Config({"cluster.profile": str(path), "planning.effort": 1})
    found = advise(graph, here, config, rows=16, recapture=lambda config: pytest.fail("a profile is of one type"))
    assert found.best is not None and about(found, "devices")


def test_where_nothing_fits_it_says_what_would() -> None:
    found = advised(made([[(1e9, 100_000)]], network=1e9), effort=2)
    assert found.best is None and "out of memory" in found.fault
    nothing, memory = found.advice
    assert nothing.says == "nothing fits either with memory.offload: auto; one more 1e+09 in host h0"
    assert memory.value is not None and memory.beside == 100_000 < memory.value

    (hosts,) = about(advised(made([[(1e9, 190_000)]], network=1e9), effort=2), "state")
    assert hosts.says.startswith("memory.offload: auto: then it fits (") and "memory.offload: optimizer (" in hosts.says
    asked = advise(GRAPH, made([[(1e9, 190_000)]], network=1e9), Config({"memory.offload": "none", "planning.effort": 2}), rows=16)
    assert asked.best is None and not about(asked, "state")


def test_the_plan_is_that_of_the_state_that_fits() -> None:
    plain = advised(made([[(1e9, GIB)] * 2], network=1e12), effort=1)
    assert plain.best is not None and plain.best.state == "memory.zero: 0, memory.offload: none"
    small, config = made([[(1e9, 190_000)]], network=1e12), Config({"memory.offload": "auto"})
    tight = advise(GRAPH, small, config, rows=16)
    plan, step = decide(None, GRAPH, small, config, rows=16)
    assert tight.best is not None and tight.best.value == step.step_seconds
    assert tight.best.state in [each.decision for each in plan.choices if each.subject == "state"]


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
