"""Where values come from and what wins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.config import Config, load_config
from whale.config.config import variable_of
from whale.config.sections import EPL_KEYS, KEYS
from whale.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("# a recipe\npipeline:\n  num_micro_batch: 3\n  schedule: gpipe\ncluster: ../clusters/c.yaml\n")
    return path


def test_nothing_gives_the_defaults() -> None:
    assert load_config(None, environment={}) == Config()


def test_a_recipe_file(recipe: Path) -> None:
    config = load_config(recipe, environment={})
    assert config.pipeline.num_micro_batch == 3
    assert config.cluster.file == str(recipe.parent.parent / "clusters" / "c.yaml")
    assert load_config(str(recipe), environment={}) == config


def test_cluster_section_and_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("cluster:\n  file: c.yaml\n  profile: p.json\n  colocate_split_and_replicate: true\nmemory:\n")
    config = load_config(path, environment={})
    assert config.cluster.file == str(tmp_path / "c.yaml")
    assert config.cluster.profile == str(tmp_path / "p.json")
    assert config.cluster.colocate_split_and_replicate


def test_precedence(recipe: Path) -> None:
    base = Config({"pipeline.num_micro_batch": 1, "pipeline.num_stages": 2, "runtime.seed": 5, "memory.fraction": 0.5})
    source = {"pipeline.num_micro_batch": 2, "pipeline.schedule": "1f1b", "memory.fraction": 0.6}
    config = load_config(source, environment={"WHALE_RECIPE": str(recipe), "WHALE_PIPELINE_NUM_MICRO_BATCH": "4"}, base=base)
    assert config.pipeline.num_micro_batch == 4  # environment
    assert config.pipeline.schedule == "gpipe"  # recipe
    assert config.memory.fraction == 0.6  # config=
    assert config.pipeline.num_stages == 2  # whale.init
    assert config.runtime.seed == 5
    assert config.gradient.clip_norm is None  # default


def test_a_config_lays_only_what_it_set_over_another() -> None:
    base = Config({"pipeline.num_micro_batch": 8})
    assert load_config(Config({"runtime.seed": 1}), environment={}, base=base).pipeline.num_micro_batch == 8
    assert load_config(Config({"pipeline.num_micro_batch": 1}), environment={}, base=base).pipeline.num_micro_batch == 1


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("WHALE_PIPELINE_NUM_MICRO_BATCH", " 4 ", "pipeline.num_micro_batch", 4),
        ("WHALE_PIPELINE_NUM_STAGES", "none", "pipeline.num_stages", None),
        ("WHALE_PIPELINE_STRATEGY", "PreferForward", "pipeline.schedule", "gpipe"),
        ("WHALE_CLUSTER_COLOCATE_SPLIT_AND_REPLICATE", "True", "cluster.colocate_split_and_replicate", True),
        ("WHALE_CLUSTER_DEVICE_PLACE_PREFER_INTRA_NODE", "0", "cluster.device_place_prefer_intra_node", False),
        ("WHALE_CLUSTER_FILE", "c.yaml", "cluster.file", "c.yaml"),
        ("WHALE_COMMUNICATION_BUCKET_BYTES", "1 MiB", "communication.bucket_bytes", 2**20),
        ("WHALE_GRADIENT_CLIP_NORM", "1e-1", "gradient.clip_norm", 0.1),
    ],
)
def test_environment(variable: str, text: str, key: str, value: object) -> None:
    config = load_config(None, environment={variable: text})
    assert dict(config.items())[key] == value
    assert key in config.explicit


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("WHALE_PIPELINE_NUM_MICRO_BATCH", "four", "'four' is not a whole number at least 1"),
        ("WHALE_PIPELINE_NUM_MICRO_BATCH", "", "'' is not a whole number at least 1"),
        ("WHALE_PIPELINE_NUM_MICRO_BATCHES", "4", "did you mean 'pipeline.num_micro_batch'?"),
        ("WHALE_PIPELIN_NUM_MICRO_BATCH", "4", "did you mean 'pipeline.num_micro_batch'?"),
        ("WHALE_CLUSTER_COLOCATE_SPLIT_AND_REPLICATE", "maybe", "'maybe' is not true or false"),
        ("WHALE_ZERO_LEVEL", "v1", "zero.level of EPL does not carry over"),
        ("WHALE_GRADIENT_CHECKPOINT_TYPE", "auto", "gradient_checkpoint.type of EPL does not carry over"),
    ],
)
def test_environment_says_what_is_wrong(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, environment={variable: text})
    assert message in str(caught.value)
    assert f"at environment variable {variable}" in str(caught.value)


def test_other_variables_are_left_alone() -> None:
    others = {
        "WHALE_RUN_DIR": "/somewhere",
        "WHALE_RUN_ID": "3",
        "WHALE": "x",
        "WHALES_PIPELINE_X": "1",
        "PATH": "/bin",
        "WHALE_RECIPE": "",
    }
    assert load_config(None, environment=others) == Config()


def test_faults_of_all_sources_together(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("pipelines:\n  num_stages: 2\nmemory:\n  fractoin: 2\ngradient: 3\n")
    environment = {"WHALE_RECIPE": str(path), "WHALE_RUNTIME_SEED": "-1"}
    with pytest.raises(ConfigError, match="5 faults") as caught:
        load_config({"amp.level": "O1"}, environment=environment)
    text = str(caught.value)
    assert f"unknown section 'pipelines'\n  at {path}:1\n  hint: did you mean 'pipeline'?" in text
    assert f"unknown configuration key 'memory.fractoin'\n  at {path}:4\n  hint: did you mean 'memory.fraction'?" in text
    assert f"section gradient: 3 is not 'key: value' lines\n  at {path}:5" in text
    assert "WHALE_RUNTIME_SEED" in text
    assert "amp.level" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- pipeline\n", "the recipe is not a mapping of sections"),
        ("pipeline.num_stages: 2\n", "write 'pipeline:' and, indented below it, 'num_stages: ...'"),
        ("pipeline.num_stage: 2\n", "did you mean 'pipeline.num_stages'?"),
        ("pipeline:\n  num_stages: 2\n  num_stages: 3\n", "key 'num_stages' is given twice (first in line 2)"),
        ("zero:\n  level: v1\n", "zero.level of EPL does not carry over"),
        (
            '{"zero_optimization": {"stage": 2}}',
            "zero_optimization.stage of DeepSpeed does not carry over: `memory.zero`, the same numbers",
        ),
        ('{"fp16": {"loss_scale": 0}, "train_batch_size": 8}', "2 faults"),
        ("mixed_precision: bf16\n", "mixed_precision of Accelerate does not carry over: `precision.dtype`"),
        (
            "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n",
            "`HYBRID_SHARD` and `HYBRID_SHARD_ZERO2` are 3 and 2 with `memory.zero_within: host`",
        ),
        ("bf16: true\n", "bf16 of Megatron does not carry over: `precision.dtype: bf16`"),
        (
            "deepspeed_config:\n  deepspeed_hostfile: h\n",
            "deepspeed_config.deepspeed_hostfile of Accelerate does not carry over: a cluster file,",
        ),
        ("pipeline:\n  num_micro_batch: '4'\n", "'4' is not a whole number at least 1"),
        ("pipeline: [\n", "not YAML"),
    ],
)
def test_recipes_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment={})
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_empty_recipe_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(path, environment={}) == Config()


def test_a_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(None, environment={"WHALE_RECIPE": str(tmp_path / "none.yaml")})


def test_a_source_of_another_kind() -> None:
    with pytest.raises(ConfigError, match=r"config= is int, not a whale\.Config"):
        load_config(4, environment={})


@pytest.mark.parametrize("entry", EPL_KEYS, ids=lambda entry: str(entry.name))
def test_every_key_of_epl_carries_over_or_says_why_not(entry: object) -> None:
    from whale.config.sections import EplKey

    assert isinstance(entry, EplKey)
    known = {*dict(Config().items()), "pipeline.strategy", "auto.auto_parallel"}
    assert entry.carries == (entry.name in known)
    if not entry.carries:
        with pytest.raises(ConfigError, match="does not carry over"):
            load_config(None, environment={variable_of(entry.name): "1"})


def test_the_papers_own_spelling(tmp_path: Path) -> None:
    expected = Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4})
    assert Config({"num_task_graph": 2, "num_micro_batch": 4, "auto_parallel": True}) == expected
    path = tmp_path / "r.yaml"
    path.write_text("num_task_graph: 2\nnum_micro_batch: 4\nauto:\n  auto_parallel: true\n")
    assert load_config(path, environment={"WHALE_AUTO_AUTO_PARALLEL": "true"}) == expected
    with pytest.raises(ConfigError, match=r"auto\.auto_parallel: 'maybe' is not true or false"):
        Config({"auto.auto_parallel": "maybe"})
    with pytest.raises(ConfigError, match=r"pipeline\.num_stages: 0 is not at least 1"):
        Config({"num_task_graph": 0})


@given(st.dictionaries(st.sampled_from([name for name, _ in Config().items()]), st.integers(1, 9)))
def test_environment_and_mapping_agree(values: dict[str, int]) -> None:
    """A value set by environment is refused exactly where the same value in a mapping is, but for text and flags."""
    values = {name: value for name, value in values.items() if isinstance(dict(Config().items())[name], int | None)}
    values = {name: value for name, value in values.items() if KEYS[name].type not in ("bool", "str")}
    environment = {variable_of(name): str(value) for name, value in values.items()}
    assert load_config(None, environment=environment) == Config(values)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("recompute: auto", "auto"),
        ("recompute: {policy: selective}", "selective"),
        ("recompute:\n  1: 0.5\n  0: 1\n", ((0, 1.0), (1, 0.5))),
        ("recompute:\n  policy: {0: 0.25}\n", ((0, 0.25),)),
        ('recompute: {"*.mlp": recompute, "*": keep}', (("*.mlp", "recompute"), ("*", "keep"))),
        ('recompute: {policy: {h: recompute, "*": keep}}', (("h", "recompute"), ("*", "keep"))),
    ],
)
def test_recompute_as_a_word_or_by_stage(tmp_path: Path, text: str, policy: object) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    config = load_config(path, environment={})
    assert config.recompute.policy == policy
    path.write_text(str(config))
    assert load_config(path, environment={}) == config
    assert config.with_values({"pipeline.num_stages": 2}).recompute.policy == policy


def test_recompute_from_the_environment() -> None:
    assert load_config(None, environment={"WHALE_RECOMPUTE_POLICY": "auto"}).recompute.policy == "auto"
    assert load_config(None, environment={"WHALE_RECOMPUTE_POLICY": "{0: 0.5}"}).recompute.policy == ((0, 0.5),)
    with pytest.raises(
        ConfigError,
        match=r"stage 0: 2 is not a share from 0 to 1, or .*\n  at environment variable WHALE_RECOMPUTE_POLICY",
    ):
        load_config(None, environment={"WHALE_RECOMPUTE_POLICY": "{0: 2}"})


def test_recompute_by_stage_in_words(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("recompute: {0: full, 1: 0.5, 2: selective, 3: blocks, 4: none}\n")
    assert load_config(path, environment={}).recompute.policy == ((0, "full"), (1, 0.5), (2, "selective"), (3, "blocks"), (4, "none"))
    path.write_text("recompute: {0: fulll}\n")
    with pytest.raises(ConfigError, match="stage 0: 'fulll' is not a share from 0 to 1, or none, full, blocks, selective"):
        load_config(path, environment={})


def test_recompute_with_a_share_out_of_range_or_a_slip(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("recompute:\n  0: 1.5\n")
    with pytest.raises(ConfigError, match=rf"stage 0: 1\.5 is not a share from 0 to 1, or .*\n  at {path}:1"):
        load_config(path, environment={})
    path.write_text("recompute:\n  policz: full\n")
    with pytest.raises(ConfigError, match=r"did you mean 'recompute\.policy'\?"):
        load_config(path, environment={})
