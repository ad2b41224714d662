"""Blocks of replicas become replicas of the plan, each on its devices and with its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.graphs import chain, cluster, scope
from whale.config import Config, read_plan
from whale.errors import BatchError, ConfigError
from whale.ir.plan import Plan
from whale.ir.serialization import from_json, to_json
from whale.planning import make_plan
from whale.planning.replicas.blocks import whole_units

FOUR = cluster((1e9, 1e9, 1e9, 1e9))
NAMES = [device.name for device in FOUR.devices]


def plan(*blocks: dict[str, Any], rows: int = 32, **config: Any) -> Plan:
    values = {key.replace("__", "."): value for key, value in config.items()}
    return make_plan(chain(8, width=64), FOUR, Config({"replicas": list(blocks), **values}), rows=rows)


def test_each_block_is_a_replica_on_its_devices() -> None:
    found = plan({"devices": NAMES[2:], "num_stages": 2, "num_micro_batch": 4}, {"schedule": "gpipe"}, pipeline__num_micro_batch=2)
    assert [replica.pipeline.num_stages for replica in found.replicas] == [2, 1]
    assert [pipeline.order for pipeline in found.pipelines] == ["1f1b, 4 micro-batches", "gpipe, 2 micro-batches"]
    assert set(found.devices[:2]) == set(NAMES[2:]) and found.devices[2] == NAMES[0] and found.idle_devices == (NAMES[1],)
    assert from_json(Plan, to_json(found)) == found


def test_unlike_replicas_print_and_explain_what_they_are() -> None:
    found = plan({"num_stages": 2, "num_micro_batch": 4}, {"schedule": "gpipe", "num_micro_batch": 2})
    lines = str(found).splitlines()
    assert lines[0] == "plan: 2 replicas of 2, 1 stages on 3 devices of test"
    assert lines[1] == "  world size 3: replica 0 = DP 1 x PP 2 x TP 1; replica 1 = DP 1 x PP 1 x TP 1"
    assert lines[2].startswith("  1f1b, 4 micro-batches / gpipe, 2 micro-batches, ")
    assert any(line.endswith(", 1 stage, gpipe, 2 micro-batches") for line in lines)
    subjects = {choice.subject: choice.decision for choice in found.choices}
    assert subjects["schedule of replica 1"] == "gpipe, 2 micro-batches"
    assert subjects["devices of the stages"].startswith("2 replicas of 2, 1 devices")
    assert "stages of replica 0" in subjects


def test_rows_are_balanced_or_as_the_weights_say() -> None:
    balanced = plan({"num_stages": 2, "num_micro_batch": 8}, {"num_micro_batch": 8}, rows=64)
    assert balanced.replicas[0].share > 1.5 * balanced.replicas[1].share
    weighed = plan({"num_stages": 2, "rows": 1}, {"rows": 3}, rows=64)
    assert [replica.share for replica in weighed.replicas] == [16, 48]


def test_equal_blocks_are_what_the_planner_makes_by_itself() -> None:
    block = {"num_stages": 2, "num_micro_batch": 4}
    blocks = plan(block, block)
    alone = make_plan(chain(8, width=64), FOUR, Config({f"pipeline.{key}": value for key, value in block.items()}), rows=32)
    assert blocks.replicas == alone.replicas and blocks.step_seconds == alone.step_seconds


UNLIKE = cluster((3e9, 3e9), (1e9, 1e9))


@pytest.mark.parametrize(
    ("prefers", "replicas"), [(True, [{"h0/0", "h0/1"}, {"h1/0", "h1/1"}]), (False, [{"h0/0", "h1/0"}, {"h0/1", "h1/1"}])]
)
def test_replicas_lie_inside_hosts_or_are_alike_as_the_setting_says(prefers: bool, replicas: list[set[str]]) -> None:
    config = Config({"replicas": [{"num_stages": 2, "count": 2}], "cluster.device_place_prefer_intra_node": prefers})
    found = make_plan(chain(8, width=64), UNLIKE, config, rows=32)
    assert [{name for stage in replica.stages for name in stage.virtual_device.devices} for replica in found.replicas] == replicas


def test_micro_batches_are_counted_by_the_rows_that_a_replica_is_given() -> None:
    config = Config({"replicas": [{"num_stages": 2, "count": 2, "micro_batch_rows": 4}]})
    found = make_plan(chain(8, width=64), UNLIKE, config, rows=128)
    fast, slow = found.replicas
    assert fast.share > 2 * slow.share and fast.share + slow.share == 128
    for replica in found.replicas:
        sizes = {stop - start for start, stop in found.micro_batch_rows(replica.index, 128)}
        assert sizes == {4} and replica.pipeline.num_micro_batch == replica.share // 4


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.data())
def test_rows_in_whole_micro_batches_are_all_rows_and_near_those_that_were_balanced(rows: list[int], data: st.DataObject) -> None:
    unit = data.draw(st.integers(1, 6))
    counts = whole_units(rows, [unit] * len(rows))
    assert (counts is None) == (sum(rows) % unit > 0 or sum(rows) < unit * len(rows))
    if counts is not None:
        assert sum(counts) * unit == sum(rows) and min(counts) >= 1
        if all(own >= unit for own in rows):
            assert all(abs(count * unit - own) <= unit for count, own in zip(counts, rows, strict=True))


def test_micro_batches_of_unlike_rows_make_the_batch() -> None:
    assert whole_units([10, 3], [4, 6]) is None
    assert whole_units([10, 10], [4, 3]) == [2, 4]
    assert whole_units([10, 11], [4, 3]) == [3, 3]
    assert whole_units([1, 20], [4, 1]) == [1, 17]


@pytest.mark.parametrize(("block", "sizes"), [({"devices": 2}, (1, 1)), ({"devices": 1}, (1,)), ({"devices": 4, "split": 2}, (2, 2))])
def test_stages_share_the_devices_that_a_block_states(block: dict[str, Any], sizes: tuple[int, ...]) -> None:
    found = plan({"num_stages": 4, "num_micro_batch": 4, **block})
    assert tuple(len(stage.virtual_device.devices) for stage in found.replicas[0].stages) == sizes
    (schedule,) = (choice for choice in found.choices if choice.subject.startswith("schedule"))
    assert f"4 stages on {len(sizes)} devices: consecutive ones are merged" in schedule.bound


@at_most(20)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4).filter(lambda own: sum(n for n, _ in own) <= 4))
def test_every_row_is_given_out(shapes: list[tuple[int, int]]) -> None:
    found = plan(*({"num_stages": stages, "num_micro_batch": count} for stages, count in shapes))
    assert sum(replica.share for replica in found.replicas) == 32
    assert [(p.num_stages, p.num_micro_batch) for p in found.pipelines] == shapes
    assert all(replica.share >= replica.pipeline.num_micro_batch for replica in found.replicas)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([{"devices": ["h0/9"]}], r"h0/9, which is not in cluster 'test'\n  hint: did you mean 'h0/"),
        ([{"devices": 3, "num_stages": 2}], r"devices: 3 of replica 0 contradicts its stages, which need 1 \+ 1"),
        ([{"devices": 3, "split": 2}], "devices: 3 of replica 0 contradicts its stages, which need 2"),
        ([{"num_stages": 3}, {"split": 2}], "replica 1 takes 2, left: 1"),
        (
            [{"num_stages": 2}, {"num_stages": 3}],
            r"replica 1 has too few devices: num_stages is 3, devices left: 2\n  hint: devices: 2 lets",
        ),
        ([{"devices": ["h0/0", "h0/0"], "num_stages": 2}], "device h0/0 is listed twice in replica 0"),
        ([{"num_stages": 3, "schedule": "interleaved", "num_chunks": 9}], "the 27 stages of schedule interleaved"),
    ],
)
def test_blocks_that_do_not_fit(blocks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*blocks)


SCOPED = chain(8, [(scope(index // 4, 1, f"part{index // 4}"),) for index in range(8)], width=64)


def scoped(*blocks: dict[str, Any]) -> Plan:
    return make_plan(SCOPED, FOUR, Config({"replicas": list(blocks)}), rows=32)


@pytest.mark.parametrize("said", ["num_chunks: 2", "recompute: {5: blocks}"])
def test_what_does_not_go_with_the_stages_is_said_with_its_line(said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"num_stages: 2\n{said}\n")
    with pytest.raises(ConfigError) as caught:
        make_plan(chain(4), cluster((1e12, 1e12)), Config(read_plan(path)), rows=12)
    assert str(caught.value.where) == f"{path}:1"


def test_scopes_say_the_stages_and_blocks_the_rest() -> None:
    found = scoped({"num_micro_batch": 4}, {"devices": NAMES[:2], "num_stages": 2, "schedule": "gpipe", "num_micro_batch": 2})
    assert [pipeline.order for pipeline in found.pipelines] == ["1f1b, 4 micro-batches", "gpipe, 2 micro-batches"]
    for replica in found.replicas:
        assert [stage.task_graphs for stage in replica.stages] == [("part0",), ("part1",)]
    assert set(found.devices[2:]) == set(NAMES[:2])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"num_stages": 3}, r"pipeline.num_stages: 3 contradicts the scopes, which make a pipeline of 2 virtual devices \(part0, part1\)"),
        ({"split": 2}, "split: 2 of replica 0 contradicts the scopes, which split into 1"),
        ({"devices": 3}, r"devices: 3 of replica 0 contradicts its stages, which need 1 \+ 1"),
    ],
)
def test_blocks_only_repeat_scopes(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scoped(block)


def test_too_few_rows_say_what_each_replica_needs() -> None:
    with pytest.raises(BatchError, match=r"1 replica x 4 micro-batches \+ 2 replicas x 3 micro-batches need 10"):
        plan({"num_micro_batch": 4}, {"num_micro_batch": 3}, {"num_micro_batch": 3}, rows=9)


def test_what_memory_decides_in_one_block_leaves_others_as_they_are_written() -> None:
    found = plan({"recompute": "auto"}, {"recompute": "blocks"})
    assert [bool(replica.stages[0].recomputed) for replica in found.replicas] == [False, True]
