"""Plans that are written down whole: read back they are the same plan, and what contradicts the model is said with its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most, slow
from tests.unit.planning.decoders import decoder
from tests.unit.planning.graphs import chain, cluster, scope, with_unread
from whale.config import SCHEDULES, Config, read_plan
from whale.errors import ConfigError, PlanError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.profile import model_fingerprint
from whale.planning import make_plan, write_plan

MIXED = cluster((1e12, 5e11) * 3)


def model() -> ModelGraph:
    return decoder(4)


def read_back(
    made: Plan, graph: ModelGraph, folder: Path, there: Cluster = MIXED, settings: Mapping[str, Any] = MappingProxyType({})
) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(write_plan(made, graph))
    found = make_plan(graph, there, Config({**settings, **read_plan(path)}))
    assert found.choices[0].bound == f"the written plan at {path}:3"
    return found


def same(made: Plan, found: Plan) -> bool:
    """Equal but for the account of why."""
    return replace(made, choices=()) == replace(found, choices=())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4, "recompute.policy": "full"},
        {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4, "pipeline.schedule": "interleaved", "pipeline.num_chunks": 2},
        slow({"plan": {"num_stages": 2, "split": 2, "recompute": "selective", "num_micro_batch": 2, "replicas": 1}}, id="split"),
        {"replicas": [{"num_stages": 2, "num_micro_batch": 2}, {"split": 3}]},
        {"replicas": [{"num_stages": 2, "num_micro_batch": 2, "receive_early": False}, {"split": 3}]},
    ],
    ids=["replicas", "recomputed", "chunks", None, "unlike", "late receives"],
)
def test_a_plan_read_back_is_the_same_plan(settings: dict[str, Any], tmp_path: Path) -> None:
    made = make_plan(model(), MIXED, Config(settings), rows=48)
    assert same(made, read_back(made, model(), tmp_path))


SCOPED = chain(6, [(scope(index // 2, None if index // 2 == 1 else 1, f"part{index // 2}"),) for index in range(6)], width=32)
WIDE = chain(6, [(scope(index // 3, 1 + index // 3, f"part{index // 3}"),) for index in range(6)], width=32)


@at_most(15)
@given(
    st.sampled_from([SCOPED, WIDE, chain(7, width=16), with_unread(WIDE, (scope(0, 1, "part0"),), side=(9, 32))]),
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_v"]),
    st.integers(1, 3),
    st.integers(18, 60),
)
def test_scopes_and_schedules_are_read_back(tmp_path_factory: Any, graph: ModelGraph, schedule: str, count: int, rows: int) -> None:
    settings = {"pipeline.schedule": schedule, "pipeline.num_micro_batch": count}
    try:
        made = make_plan(graph, MIXED, Config(settings), rows=rows)
    except WhaleError:  # this shape is none
        return
    assert same(made, read_back(made, graph, tmp_path_factory.mktemp("plans")))


SHAPES = st.fixed_dictionaries(
    {"schedule": st.sampled_from(SCHEDULES), "num_micro_batch": st.integers(1, 4)},
    optional={
        "split": st.integers(1, 3),
        "num_stages": st.integers(1, 3),
        "num_chunks": st.just(2),
        "recompute": st.sampled_from(["full", "blocks", "selective", "auto", {0: 0.5}, {0: "full", 1: "selective"}]),
        "replicas": st.integers(1, 2),
    },
)
CLUSTERS = [MIXED, cluster((1e12, 1e12), (5e11, 5e11)), cluster((1e12,) * 4), cluster((1e12, 2e11, 7e11))]


@pytest.mark.slow
@at_most(40)
@given(st.sampled_from(CLUSTERS), st.sampled_from([decoder(2), chain(7, width=16)]), SHAPES, st.integers(0, 3), st.integers(4, 60))
def test_whatever_is_planned_is_read_back(
    tmp_path_factory: Any, there: Cluster, graph: ModelGraph, shape: dict[str, Any], num_tensors: int, rows: int
) -> None:
    """Splits, unlike and uneven devices, chunks, recomputation of each kind, and what the optimizer keeps."""
    kept = {"memory.optimizer_states": num_tensors}
    try:
        made = make_plan(graph, there, Config(kept | {"plan": shape}), rows=rows)
    except WhaleError:  # this shape is none
        return
    assert same(made, read_back(made, graph, tmp_path_factory.mktemp("plans"), there, kept))


def written(folder: Path, stages: list[dict[str, Any]], **block: Any) -> Plan:
    (folder / "plan.yaml").write_text(yaml.safe_dump({"replicas": [block | {"stages": stages}]}, sort_keys=False))
    return make_plan(model(), MIXED, Config(read_plan(folder / "plan.yaml")), rows=12)


FIRST = {"devices": ["h0/0"], "ops": ["embedding .. add_4"]}
LAST = {"devices": ["h0/1"], "ops": ["layer_norm_4 .. sum_default"]}


def test_what_is_left_out_is_plain(tmp_path: Path) -> None:
    made = written(tmp_path, [FIRST, LAST | {"recompute": ["layer_norm_4 .. add_6"]}], num_micro_batch=3)
    replica = made.replicas[0]
    assert (replica.pipeline.num_micro_batch, replica.pipeline.schedule, made.planned_rows) == (3, "1f1b", 12)
    assert replica.edges[0].tensors == ("add_4",) and made.idle_devices == ("h0/2", "h0/3", "h0/4", "h0/5")
    assert not replica.stages[0].recomputed and len(replica.stages[1].recomputed) == 1
    assert made.step_seconds > 0 and all(stage.estimates for stage in replica.stages)


def test_stages_recompute_as_a_whole_or_in_parts(tmp_path: Path) -> None:
    made = written(tmp_path, [FIRST | {"recompute": "full"}, LAST | {"recompute": ["layer_norm_4 .. add_6"]}], num_micro_batch=3)
    replica = made.replicas[0]
    assert replica.pipeline.recomputed_stages == (0,) and [len(stage.recomputed) for stage in replica.stages] == [0, 1]
    assert replica.pipeline.order == "1f1b with recomputation of stage 0, 3 micro-batches"
    kept = written(tmp_path, [FIRST, LAST], num_micro_batch=3)
    assert made.step_seconds > kept.step_seconds
    assert same(made, read_back(made, model(), tmp_path))
    both = written(tmp_path, [FIRST | {"recompute": "full"}, LAST | {"recompute": "full"}], num_micro_batch=3)
    assert both.replicas == written(tmp_path, [FIRST, LAST], num_micro_batch=3, recompute="full").replicas


def test_stages_say_it_where_the_schedule_recomputes_by_itself(tmp_path: Path) -> None:
    parts = LAST | {"recompute": ["layer_norm_4 .. add_6"]}
    made = written(tmp_path, [FIRST | {"recompute": "full"}, parts], schedule="recompute_early", num_micro_batch=3)
    assert made.replicas[0].pipeline.recomputed_stages == (0,)
    assert same(made, read_back(made, model(), tmp_path))
    every = written(
        tmp_path, [FIRST | {"recompute": "full"}, LAST | {"recompute": "full"}], schedule="last_no_recompute", num_micro_batch=3
    )
    assert every.replicas[0].pipeline.recomputed_stages == (0, 1) and same(every, read_back(every, model(), tmp_path))
    left = written(tmp_path, [FIRST, LAST], schedule="last_no_recompute", num_micro_batch=3)
    assert left.replicas[0].pipeline.recomputed_stages == () and left.step_seconds < every.step_seconds
    with pytest.raises(PlanError, match=r"replica 0, stage 1 is recomputed both as a whole"):
        written(tmp_path, [FIRST, parts], schedule="recompute_early", num_micro_batch=3)


def test_settings_do_not_change_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"replicas": [{"num_micro_batch": 3, "stages": [FIRST, LAST]}]}))
    written_down = read_plan(tmp_path / "plan.yaml")
    beside = {"pipeline.num_micro_batch": 3, "pipeline.schedule": "gpipe"}
    assert make_plan(model(), MIXED, Config(written_down | beside), rows=12).replicas[0].pipeline.schedule == "gpipe"
    with pytest.raises(ConfigError, match=r"pipeline.num_micro_batch: 4 contradicts the written plan \(3\)\n  at .*plan.yaml:\d+"):
        make_plan(model(), MIXED, Config(written_down | {"pipeline.num_micro_batch": 4}), rows=12)


@pytest.mark.parametrize("asked", [12, 30])
def test_rows_are_those_of_the_batch_that_is_planned(asked: int, tmp_path: Path) -> None:
    """Left out they are equal; stated for another batch they are weights: edges and shares are of what each replica takes."""
    second = [FIRST | {"devices": ["h0/2"]}, LAST | {"devices": ["h0/3"]}]
    for rows, taken in ((None, (asked // 2, asked // 2)), ((2, 4), (asked // 3, 2 * asked // 3))):
        blocks = [{"stages": [FIRST, LAST], "num_micro_batch": 2}, {"stages": second, "num_micro_batch": 2}]
        if rows is not None:
            blocks = [block | {"rows": own} for block, own in zip(blocks, rows, strict=True)]
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"replicas": blocks}))
        made = make_plan(model(), MIXED, Config(read_plan(tmp_path / "plan.yaml")), rows=asked)
        assert tuple(replica.share for replica in made.replicas) == taken and made.planned_rows == asked
        row = 16 * 64 * 4
        assert [replica.edges[0].num_bytes for replica in made.replicas] == [-(-own // 2) * row for own in taken]
        assert same(made, read_back(made, model(), tmp_path))


@pytest.mark.parametrize(
    ("stages", "block", "message", "way"),
    [
        (
            [FIRST, LAST | {"devices": ["h0/9"]}],
            {},
            r"stage 1 runs on h0/9, which is not in cluster 'test'\n  at .*\n  hint: did you mean",
            "h0/9",
        ),
        ([FIRST | {"split": 2}, LAST], {}, r"split: 2 of stage 0 does not divide its 1 devices", "split"),
        ([FIRST | {"rows": [1, 2]}, LAST], {}, r"rows of stage 0 has 2 numbers for 1 split groups", "rows"),
        ([FIRST | {"cut": {"hidden": [4, 4]}}, LAST], {}, r"cut of hidden of stage 0 has 2 parts for split: 1", "hidden"),
        (
            [FIRST | {"ops": ["embeding"]}, LAST],
            {},
            r"embeding, which is not an op of the model\n  at .*\n  hint: did you mean 'embedding",
            "ops",
        ),
        ([FIRST | {"ops": ["add_4 .. embedding"]}, LAST], {}, "ends before its start", "ops"),
        ([FIRST | {"recompute": ["sum_default"]}, LAST], {}, r"stage 0 recomputes \w+, which is not one of its ops", "recompute"),
        (
            [FIRST | {"recompute": ["add .. add_2", "add_1"]}, LAST],
            {},
            r"of stage 0 overlap or are out of order: add .. add_2, add_1",
            "recompute",
        ),
        ([FIRST, LAST], {"recompute": "selective"}, "recompute: selective cannot be given together with stages", "recompute"),
        ([FIRST, LAST], {"num_chunks": 2}, r"chunks: 2 cannot be used with schedule 1f1b, which has 1 chunk per rank\n  at ", "num_chunks"),
        ([FIRST, LAST], {"split": 2}, r"split cannot be given together with stages.* \(replica 0\)", "split"),
        ([FIRST, {"devices": ["h0/1"]}], {}, "stage 1 lacks ops", "h0/1"),
        ([FIRST, LAST | {"colour": 1}], {}, "unknown key 'colour' in a stage", "colour"),
        ([FIRST, LAST | {"halves": 1}], {}, "stages.halves: 1 is not true or false", "halves"),
        ([FIRST | {"cut": {"hidden": {"whole": []}}}, LAST], {}, "whole_in, whole_parameters, scattered", "cut"),
    ],
)
def test_what_does_not_fit_is_said_with_its_line(
    stages: list[dict[str, Any]], block: dict[str, Any], message: str, way: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        written(tmp_path, stages, **block)
    line = int(str(caught.value.where).rpartition(":")[2])
    around = (tmp_path / "plan.yaml").read_text().splitlines()[max(0, line - 1) : line + 1]
    assert any(way in text for text in around), (line, around)


def test_a_plan_of_another_model_is_refused_though_its_ops_have_the_names(tmp_path: Path) -> None:
    wide, narrow, path = chain(7, width=32), chain(7, width=16), tmp_path / "plan.yaml"
    path.write_text(write_plan(make_plan(wide, MIXED, Config({"pipeline.num_stages": 2}), rows=12), wide))
    told = rf"model: {model_fingerprint(wide)}, this model: {model_fingerprint(narrow)}\)\n  at {path}:1\n  hint: write it again"
    with pytest.raises(ConfigError, match=told):
        make_plan(narrow, MIXED, Config(read_plan(path)), rows=12)
    by_hand = yaml.safe_load(path.read_text())
    del by_hand["model"]
    path.write_text(yaml.safe_dump(by_hand))
    assert len(make_plan(narrow, MIXED, Config(read_plan(path)), rows=12).replicas[0].stages) == 2


def test_a_model_is_named_beside_stages_alone() -> None:
    with pytest.raises(ConfigError, match=r"is given without stages \(replica 0\)"):
        Config({"plan": {"model": "abc", "num_stages": 2}})
    with pytest.raises(ConfigError, match=r"replicas.model: 12 is not text"):
        Config({"plan": {"model": 12, "replicas": [{"stages": [FIRST, LAST]}]}})


def test_what_is_missing_is_said_by_the_check_of_plans(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"layer_norm_4 in .* reads what the stage does not have: add_4|no stage of replica \d computes"):
        written(tmp_path, [FIRST | {"ops": ["embedding .. add_3"]}, LAST])
    with pytest.raises(PlanError, match=r"no stage of replica \d computes") as caught:
        written(tmp_path, [FIRST])
    assert str(caught.value.where).endswith(f"plan.yaml:{1 + 1}"), "where the plan is written, behind the line of the model"
    with pytest.raises(PlanError, match="in several virtual devices"):
        written(tmp_path, [FIRST | {"devices": ["h0/0", "h0/1"]}, LAST])


def test_all_replicas_are_written_whole_or_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    whole = {"devices": ["h0/0"], "ops": ["embedding .. sum_default"]}
    path.write_text(yaml.safe_dump({"replicas": [{"stages": [whole]}, {"devices": 1}]}))
    with pytest.raises(ConfigError, match="give them for all or for none") as caught:
        make_plan(model(), MIXED, Config(read_plan(path)))
    assert str(caught.value.where) == f"{path}:7"


def test_alike_parts_stand_once(tmp_path: Path) -> None:
    pairs = [{"devices": [f"h0/{first}", f"h0/{first + 1}"]} for first in (0, 2, 4)]
    made = make_plan(model(), MIXED, Config({"plan": {"split": 2, "recompute": "blocks", "replicas": pairs}}), rows=48)
    text = write_plan(made, model())
    assert len(made.replicas) == 3 and text.count("cut: &") <= 1 and text.count("cut: *") == 2
    assert same(made, read_back(made, model(), tmp_path))
