"""Blocks of replicas: read strictly, all faults at once, and written again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from whale.config import Config, ReplicaBlock, load_config, read_plan
from whale.errors import ConfigError

BLOCKS = [{"devices": ["a", "b"], "num_stages": 2, "schedule": "gpipe", "rows": 5}, {"devices": 2, "split": 2, "rows": 3}]
READ = (ReplicaBlock(("a", "b"), None, 5, (("num_stages", 2), ("schedule", "gpipe"))), ReplicaBlock(2, 2, 3))


def test_blocks_are_values() -> None:
    config = Config({"replicas": BLOCKS, "pipeline.num_micro_batch": 4})
    assert config.replicas == READ
    assert Config().replicas == ()
    assert Config(dict(config.items())) == config
    assert config.with_values({"pipeline.num_stages": 1}).replicas == READ
    assert yaml.safe_load(str(config))["replicas"] == BLOCKS
    assert "replicas" not in yaml.safe_load(str(Config()))


def test_blocks_are_unset_by_null(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("replicas: null\n")
    for source in ({"replicas": None}, Config({"replicas": None}), path):
        assert load_config(source, environment={}, base=Config({"replicas": BLOCKS, "runtime.seed": 3})) == Config({"runtime.seed": 3})
    assert Config({"replicas": BLOCKS}).with_values({"replicas": None}) == Config()


def test_blocks_come_from_recipes_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"replicas": BLOCKS}))
    assert load_config(path, environment={}).replicas == READ
    by_variable = load_config(None, environment={"WHALE_PLAN": "{num_stages: 3}"})
    assert by_variable.replicas == load_config({"plan": {"num_stages": 3}}, environment={}).replicas != ()
    with pytest.raises(ConfigError, match="a list of at least one block"):
        load_config({"plan": {"replicas": [], "num_stages": 2}}, environment={})
    assert load_config(path, environment={"WHALE_REPLICAS": "[{num_stages: 3}]"}).replicas == (ReplicaBlock(pipeline=(("num_stages", 3),)),)


def test_a_plans_file_may_begin_with_the_word(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("plan:\n  num_stages: 3\n  rows: 0\n")
    with pytest.raises(ConfigError, match=rf"rows: 0 is not at least 1\n  at {path}:3"):
        read_plan(path)
    path.write_text("plan:\n  num_stages: 3\n")
    assert read_plan(path) == {"replicas": load_config({"plan": {"num_stages": 3}}, environment={}).replicas}
    path.write_text("plan:\n  num_stages: 3\nmemory:\n  fraction: 0.5\n")
    with pytest.raises(ConfigError, match=rf"has memory beside plan: it is a recipe\n  at {path}:3\n  hint: --recipe {path}"):
        read_plan(path)


def test_all_faults_of_all_blocks(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "replicas:\n  - devices: [a, 3]\n    scheduel: gpipe\n  - split: 0\n    schedule: gpip\n  - 3\nmemory:\n  fraction: 2\n"
    )
    with pytest.raises(ConfigError, match="6 faults") as caught:
        load_config(path, environment={})
    text = str(caught.value)
    assert "is not names of devices, lists of them (of each stage in order), or a whole number at least 1" in text
    assert "replicas.devices: ['a', 3] is not names" in text and f"or a whole number at least 1\n  at {path}:2" in text
    assert f"unknown key 'scheduel' in a block of replicas\n  at {path}:3\n  hint: did you mean 'schedule'?" in text
    assert f"replicas.split: 0 is not at least 1\n  at {path}:4" in text
    assert f"at {path}:5\n  hint: did you mean 'gpipe'?" in text
    assert f"3 is not 'key: value' lines\n  at {path}:6" in text


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (3, "replicas: 3 is not a list of blocks, one per replica"),
        ([], "is not a list of blocks"),
        ([{"rows": 2}, {}], "given for replicas 0 and not for 1"),
        ([{"devices": ["a"]}, {"devices": ["b", "a"]}], "device a is in replicas 0 and 1"),
        ([{"color": 1}], "keys of a block: devices, split, rows, count"),
    ],
)
def test_faults(blocks: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config({"replicas": blocks})
