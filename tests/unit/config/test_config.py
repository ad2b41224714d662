"""The configuration as a value: types, rules, defaults, what it says of wrong keys."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from whale.config import SCHEDULES, Config, parse_yaml
from whale.errors import ConfigError


def test_sets_one_key_and_leaves_the_rest() -> None:
    config = Config({"pipeline.num_micro_batch": 4})
    assert config.pipeline.num_micro_batch == 4
    assert config.pipeline.schedule == "1f1b"
    assert config.memory.fraction == 0.9
    assert config.communication.bucket_bytes == 25 * 2**20


def test_sections_nest_as_in_a_recipe() -> None:
    nested = {"pipeline": {"num_micro_batch": 4, "num_stages": 2}, "cluster": "c.yaml", "recompute": {0: 0.5}, "gradient.clip_norm": 1.0}
    flat = {
        "pipeline.num_micro_batch": 4,
        "pipeline.num_stages": 2,
        "cluster.file": "c.yaml",
        "recompute.policy": {0: 0.5},
        "gradient.clip_norm": 1.0,
    }
    assert Config(nested) == Config(flat)
    assert Config({"recompute": "auto", "memory": None}) == Config({"recompute.policy": "auto"})
    with pytest.raises(ConfigError, match=r"did you mean 'pipeline\.num_stages'"):
        Config({"pipeline": {"num_stage": 2}})
    with pytest.raises(ConfigError, match="'pipeline' is a section, not a key"):
        Config({"pipeline": 2})


def test_equal_by_values_whatever_was_explicit() -> None:
    assert Config({"pipeline.num_micro_batch": 1}) == Config()
    assert Config({"pipeline.num_micro_batch": 2}) != Config()
    assert hash(Config({"runtime.seed": 0})) == hash(Config())


def test_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config().pipeline.num_micro_batch = 2
    with pytest.raises(AttributeError):
        Config().pipeline = None


def test_with_values_replaces_and_keeps() -> None:
    config = Config({"pipeline.num_micro_batch": 4, "runtime.seed": 7}).with_values({"pipeline.num_micro_batch": 2})
    assert (config.pipeline.num_micro_batch, config.runtime.seed) == (2, 7)
    assert config.explicit == {"pipeline.num_micro_batch", "runtime.seed"}


def test_survives_pickling() -> None:
    config = Config({"gradient.clip_norm": 1})
    assert pickle.loads(pickle.dumps(config)) == config


def test_prints_as_a_recipe() -> None:
    config = Config({"cluster.file": "null", "gradient.clip_norm": 0.5})
    data = parse_yaml(str(config), "printed").data
    assert isinstance(data, dict)
    flat = {f"{section}.{key}": value for section, keys in data.items() for key, value in keys.items()}
    assert flat == dict(config.items())
    assert Config(flat) == config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pipeline.num_micro_batch", 0, "0 is not at least 1"),
        ("pipeline.num_micro_batch", True, "True is not a whole number at least 1"),
        ("pipeline.num_micro_batch", 2.0, "2.0 is not a whole number at least 1"),
        ("pipeline.num_micro_batch", "4", "'4' is not a whole number at least 1"),
        ("pipeline.num_micro_batch", None, "None is not a whole number at least 1"),
        ("pipeline.num_stages", -1, "-1 is not at least 1"),
        ("cluster.colocate_split_and_replicate", 1, "1 is not true or false"),
        ("cluster.file", "", "'' is not text or null"),
        ("memory.fraction", 0, "0.0 is not above 0 and at most 1"),
        ("memory.fraction", 1.5, "1.5 is not above 0 and at most 1"),
        ("memory.fraction", float("nan"), "nan is not a number above 0 and at most 1"),
        ("memory.optimizer_states", -1, "is not at least 0"),
        ("gradient.clip_norm", 0, "is not above 0"),
        ("communication.bucket_bytes", "25 MiBs", "'25 MiBs' is not a whole number at least 1"),
        ("communication.bucket_bytes", 0, "is not at least 1"),
        ("communication.timeout_seconds", float("inf"), "is not a number above 0"),
        ("runtime.seed", -1, "is not at least 0"),
        ("gradient.clip_norm", 10**400, "is not a number above 0"),
        ("communication.bucket_bytes", "1e999 B", "is not a whole number at least 1"),
        ("runtime.log_file", "a\0b", "is not text"),
        ("planning.batch_rows", f"1..{'9' * 5000}", "is not like 64..256, whole numbers from 1 to 16,777,216"),
        ("pipeline.schedule", "1F1B", "hint: did you mean '1f1b'?"),
        ("precision.dtype", "bfloat16", "hint: did you mean 'bf16'?"),
        ("precision.dtype", torch.float16, "hint: did you mean 'fp16'?"),
        ("precision.dtype", {"*norm*": "fp32", "*": "bf16"}, "hint: did you mean 'float32'?"),
        ("pipeline.schedule", "PreferForward", "hint: PreferForward of EPL is pipeline.schedule: gpipe"),
        ("pipeline.strategy", "1f1b", "'1f1b' is not one of PreferForward, PreferBackward"),
        ("pipeline.num_micro_batches", 4, "hint: did you mean 'pipeline.num_micro_batch'?"),
        ("num_micro_batches", 4, "hint: did you mean 'pipeline.num_micro_batch'?"),
        ("pipeline", 3, "'pipeline' is a section, not a key"),
        ("quux.zzz", 1, "hint: sections: pipeline, cluster, memory"),
        ("pipeline.zzzzz", 1, "hint: keys of pipeline: num_micro_batch, num_stages"),
        ("zero.level", "v1", "configuration key zero.level of EPL does not carry over"),
        ("communication.max_splits", 5, "replaced by `communication.bucket_bytes`"),
    ],
)
def test_says_what_is_wrong(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config({key: value})
    assert message in str(caught.value)


def test_a_key_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="configuration key 3 is not text"):
        Config({3: 4})


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError, match="3 faults") as caught:
        Config({"pipeline.num_micro_batch": 0, "amp.level": "O1", "memory.fractions": 1})
    for part in ("num_micro_batch", "precision.dtype", "memory.fraction"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("strategy", "schedule"), [("PreferForward", "gpipe"), ("PreferBackward", "1f1b")])
def test_strategy_of_epl_carries_over(strategy: str, schedule: str) -> None:
    assert Config({"pipeline.strategy": strategy}) == Config({"pipeline.schedule": schedule})
    assert Config({"pipeline.strategy": strategy, "pipeline.schedule": schedule}).pipeline.schedule == schedule


def test_strategy_and_schedule_must_agree() -> None:
    for mapping in (
        {"pipeline.strategy": "PreferForward", "pipeline.schedule": "1f1b"},
        {"pipeline.schedule": "1f1b", "pipeline.strategy": "PreferForward"},
    ):
        with pytest.raises(ConfigError, match="contradict each other"):
            Config(mapping)


def test_quantities_may_be_text() -> None:
    assert Config({"communication.bucket_bytes": "1 MiB"}).communication.bucket_bytes == 2**20


def test_every_schedule_name_is_taken() -> None:
    for name in SCHEDULES:
        assert Config({"pipeline.schedule": name}).pipeline.schedule == name


@at_most(30)
@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.integers()))
def test_any_value_is_taken_or_refused_with_a_config_error(value: object) -> None:
    for key, _ in Config().items():
        try:
            config = Config({key: value})
        except ConfigError:
            continue
        assert Config(dict(config.items())) == config
