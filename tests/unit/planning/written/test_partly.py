"""Written plans: what they fix is fixed, what they leave open is planned, and what contradicts the model is said with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.planning.decoders import decoder
from tests.unit.planning.graphs import chain, cluster, scope
from whale.config import Config, load_config, read_plan
from whale.errors import ConfigError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import make_plan

EIGHT = cluster((1e12,) * 8)


def model() -> ModelGraph:
    return decoder(6)


def plan(tmp_path: Path, rows: int = 32, graph: ModelGraph | None = None, **written: Any) -> Plan:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(written))
    return make_plan(graph or model(), EIGHT, Config(read_plan(path)), rows=rows)


def blocks_of(made: Plan, stage: int) -> set[str]:
    found = {model().by_name[name].module for name in made.replicas[0].stages[stage].ops}
    return {".".join(module.split(".")[:2]) for module in found if module.startswith("blocks.")}


def test_a_published_run_is_written_in_a_few_lines(tmp_path: Path) -> None:
    made = plan(
        tmp_path, split=2, num_stages=2, micro_batch_rows=4, blocks="even", recompute="blocks", axes=["up.weight:0", "tokens.vocabulary"]
    )
    assert [replica.pipeline.num_stages for replica in made.replicas] == [2, 2]
    assert [replica.pipeline.num_micro_batch for replica in made.replicas] == [4, 4]
    assert blocks_of(made, 0) == {"blocks.0", "blocks.1", "blocks.2"} and blocks_of(made, 1) == {"blocks.3", "blocks.4", "blocks.5"}
    for stage in made.replicas[0].stages:
        assert stage.split == 2 and stage.recomputed
        cut = {shard.axis for shard in stage.shards if len(shard.whole_in) < 10}
        assert cut == {f"blocks.{n}.up.weight:0" for n in range(3 * stage.index, 3 * stage.index + 3)} | {"tokens.vocabulary"}


def test_stages_have_the_blocks_that_are_written(tmp_path: Path) -> None:
    made = plan(tmp_path, num_stages=3, blocks=[3, 1, 2], replicas=2)
    assert [len(blocks_of(made, stage)) for stage in range(3)] == [3, 1, 2]
    assert len(made.replicas) == 2 and len(made.idle_devices) == 2


def test_stages_run_where_they_are_written(tmp_path: Path) -> None:
    placed = [["h0/5", "h0/1"], ["h0/3", "h0/2"]]
    made = plan(tmp_path, num_stages=2, split=2, replicas=[{"devices": placed}])
    assert [list(stage.virtual_device.devices) for stage in made.replicas[0].stages] == placed
    assert made.devices == ("h0/5", "h0/1", "h0/3", "h0/2")
    with pytest.raises(ConfigError, match=r"devices of replica 0 \(3 \+ 1\) contradict its stages, which need 2 \+ 2") as caught:
        plan(tmp_path, num_stages=2, split=2, replicas=[{"devices": [["h0/5", "h0/1", "h0/3"], ["h0/2"]]}])
    assert str(caught.value.where).startswith(f"{tmp_path / 'plan.yaml'}:")


def test_chunks_take_blocks_in_turn(tmp_path: Path) -> None:
    made = plan(tmp_path, num_stages=2, num_chunks=3, schedule="interleaved", num_micro_batch=4, blocks="even", replicas=1)
    assert made.replicas[0].pipeline.stage_rank == (0, 1, 0, 1, 0, 1)
    assert [len(blocks_of(made, stage)) for stage in range(6)] == [1] * 6


def test_replicas_that_are_not_alike_share_what_the_plan_says_of_all(tmp_path: Path) -> None:
    made = plan(tmp_path, num_micro_batch=2, replicas=[{"num_stages": 2, "count": 2}, {"split": 4, "num_micro_batch": 1}])
    assert [(r.pipeline.num_stages, r.pipeline.num_micro_batch, r.stages[0].split) for r in made.replicas] == [
        (2, 2, 1), (2, 2, 1), (1, 1, 4),
    ]  # fmt: skip


def test_all_replicas_that_the_devices_give_are_those_of_the_planner_itself(tmp_path: Path) -> None:
    made = plan(tmp_path, num_stages=2, num_micro_batch=4)
    alone = make_plan(model(), EIGHT, Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}), rows=32)
    assert made.replicas == alone.replicas and made.step_seconds == alone.step_seconds


@pytest.mark.parametrize(
    ("written", "message", "line"),
    [
        ({"replicas": 9}, "9 replicas as replica 0 take 1 each, 9, left: 8", 1),
        ({"num_stages": 2, "blocks": [3, 2]}, "stages: 2, in blocks: 2; blocks of the model: 6, of the stages: 5", 1),
        ({"num_stages": 2, "blocks": [6]}, "stages: 2, in blocks: 1", 1),
        ({"axes": ["up.weight:0"]}, "but no stage is split", 1),
        (
            {"split": 2, "axes": ["vocabularies"]},
            r"the plan cuts axis 'vocabularies', which the model does not have\n  at .*\n  hint: did you mean 'vocabulary'",
            1,
        ),
        ({"replicas": 3, "micro_batch_rows": 3}, r"3 does not divide the rows of its replica .about 11, 32 in all", 1),
        ({"micro_batch_rows": 2, "num_micro_batch": 2}, "num_micro_batch and micro_batch_rows are both given", 1),
        ({"more_axes": ["hidden"]}, "more_axes is given without axes", 1),
        ({"replicas": [{"devices": ["h0/0"], "count": 2}]}, "named devices make one", 3),
        ({"replicas": [{"color": 1}]}, "unknown key 'color' in a block of replicas", 2),
        ({"recompute": "everything"}, "'everything' is not one of none, auto, full, blocks", 1),
    ],
)
def test_what_does_not_fit_is_said_with_its_line(written: dict[str, Any], message: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(tmp_path, **written)
    assert str(caught.value.where) == f"{tmp_path / 'plan.yaml'}:{line}"


def test_blocks_need_a_model_with_blocks_and_without_scopes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no blocks repeat in the model"):
        plan(tmp_path, graph=chain(1), blocks="even")
    scoped = chain(4, [(scope(index // 2, 1, f"part{index // 2}"),) for index in range(4)])
    with pytest.raises(ConfigError, match=r"given twice: by blocks \(even\) and by scopes \(the first at model.py:1\)"):
        plan(tmp_path, graph=scoped, blocks="even")


def test_a_recipe_may_hold_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("pipeline:\n  num_micro_batch: 4\nplan:\n  num_stages: 2\n  replicas: 3\n")
    made = make_plan(model(), EIGHT, load_config(path, environment={}), rows=32)
    assert [(r.pipeline.num_stages, r.pipeline.num_micro_batch) for r in made.replicas] == [(2, 4)] * 3
    path.write_text("plan:\n  num_stages: 2\nreplicas:\n  - {split: 2}\n")
    with pytest.raises(ConfigError, match=r"given twice: next to the sections and inside plan\n  at .*:3"):
        load_config(path, environment={})
