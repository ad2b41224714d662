"""JSON for the values: what is written reads back equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.sharding.shardings import shardings
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.graph import LossTerm, ModelGraph, Op, Parameter, Ref, TensorSpec
from whale.ir.plan import (
    BatchAxis,
    Choice,
    Edge,
    Estimate,
    Form,
    ParameterState,
    Pipeline,
    Plan,
    Replica,
    Segment,
    Shard,
    Stage,
    TaskGraph,
    VirtualDevice,
)
from whale.ir.scope import Scope, SourceLine
from whale.ir.serialization import from_json, parse_json, read_text, to_json
from whale.ir.timeline import Timeline
from whale.sharding import Sharding

names = st.text("abc.%", min_size=1, max_size=4)
counts = st.integers(0, 2**40)
seconds = st.floats(0, 1e3)
dtypes = st.sampled_from(["float32", "int64", "bool"])


def tuples(of: st.SearchStrategy[Any], **limits: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=limits.get("max_size", 3)).map(tuple)


def optional(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | of


lines = st.builds(SourceLine, names, st.integers(1, 999))
arguments = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names | st.builds(Ref, names),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
specs = st.builds(
    lambda sizes, dtype: TensorSpec(tuple(size for size, _ in sizes), dtype, tuple(factor for _, factor in sizes)),
    tuples(st.tuples(counts, st.integers(-1, 4))),
    dtypes,
)
scopes = st.builds(
    Scope, st.sampled_from(["replicate", "split"]), optional(st.integers(1, 9)), optional(names), optional(names), optional(lines), counts
)
ops = st.builds(
    Op, names, st.sampled_from(["input", "parameter", "buffer", "constant", "call"]), names,
    tuples(arguments), tuples(st.tuples(names, arguments)), tuples(specs), tuples(scopes), names,
    optional(lines), counts, counts, st.frozensets(names, max_size=2), st.booleans(),
)  # fmt: skip
parameters = st.builds(Parameter, names, specs, st.sampled_from(["parameter", "buffer"]), st.booleans(), tuples(names))
terms = st.builds(LossTerm, seconds, names, optional(names), st.booleans(), optional(lines), seconds, optional(seconds), names)
graphs = st.builds(
    ModelGraph, tuples(ops), tuples(parameters), counts, tuples(terms), tuples(names), st.sampled_from(["train", "eval", "predict"]),
    st.booleans(), tuples(names),
)  # fmt: skip
links = st.builds(Link, seconds, seconds)
devices = st.builds(Device, names, names, names, tuples(st.tuples(dtypes, seconds)), counts, seconds, seconds)
clusters = st.builds(
    Cluster,
    names,
    tuples(st.builds(Host, names, tuples(devices), links)),
    optional(links),
    tuples(st.tuples(st.tuples(names, names), links)),
)
stages = st.builds(
    Stage, counts, tuples(names), tuples(names), st.builds(VirtualDevice, tuples(names)), tuples(counts), tuples(names),
    tuples(st.builds(Estimate, seconds, seconds, counts, counts, counts)),
    program=tuples(st.builds(Segment, names, names, st.booleans(), st.booleans())),
)  # fmt: skip
forms = st.builds(Form, names, st.sampled_from(["stage", "owners"]), st.sampled_from(["device", "host"]))
pipelines = st.builds(Pipeline, names, counts, tuples(counts), counts, optional(counts), tuples(counts))
replicas = st.builds(Replica, counts, counts, pipelines, tuples(stages), tuples(st.builds(Edge, counts, counts, tuples(names), counts)))
plans = st.builds(
    Plan, names, names, tuples(names), tuples(names), tuples(st.builds(TaskGraph, counts, names, names, tuples(names))),
    tuples(replicas), tuples(st.tuples(names, st.builds(BatchAxis, counts, counts, counts))), counts, seconds,
    tuples(st.builds(Choice, names, names, names, names, names, names)),
    tuples(st.builds(ParameterState, tuples(names), forms, optional(forms), optional(forms), counts)),
)  # fmt: skip


@at_most(40)
@given(st.one_of(graphs, clusters, plans, shardings(), ops, scopes))
def test_reads_back_equal(value: object) -> None:
    again = from_json(type(value), to_json(value))
    assert again == value
    assert hash(again) == hash(value)  # tuples stay tuples


@at_most(40)
@given(graphs)
def test_equal_graphs_have_equal_fingerprints(graph: ModelGraph) -> None:
    assert from_json(ModelGraph, to_json(graph)).fingerprint == graph.fingerprint


def test_a_number_written_without_a_point_is_still_a_float() -> None:
    link = from_json(Link, '{"bandwidth": 1, "latency": 0}')
    assert link == Link(1.0, 0.0)
    assert isinstance(link.bandwidth, float)


def test_an_empty_timeline() -> None:
    assert from_json(Timeline, to_json(Timeline(()))) == Timeline(())
    assert Timeline(()).makespan == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"file": "a"}', "SourceLine"),
        ('{"file": "a", "line": 1, "column": 2}', "SourceLine has no field 'column'"),
        ("{}", "SourceLine lacks file, line"),
        ("{", "Expecting property name"),
        (f'{{"file": "a", "line": {"9" * 5000}}}', "a number of 5,000 digits"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(SourceLine, text)


def test_is_plain_json() -> None:
    value = Sharding.along((0, 1), "batch", (1, 2))
    regions = [{"intervals": [["batch", 0, 1]]}, {"intervals": [["batch", 1, 3]]}]
    assert json.loads(to_json(value)) == {"mesh": [0, 1], "regions": regions, "terms": []}


def test_a_fault_says_where_it_lies() -> None:
    stage = Stage(0, ("t",), (), VirtualDevice(("d",)), (1,), (), shards=(Shard("heads", (2, 2)),))
    plan = Plan("m", "c", ("d",), (), (), (Replica(0, 1, Pipeline("1f1b", 1, (0,)), (stage,), ()),), (), 8)
    for old, new, said in (
        ('"sizes": [2, 2]', '"sizes": [2, "2"]', r"^replicas\[0\]\.stages\[0\]\.shards\[0\]\.sizes\[1\]: '2' is not of type int$"),
        (
            '"virtual_device": {"devices": ["d"]}',
            '"virtual_device": 3',
            r"stages\[0\]\.virtual_device: 3 is not of type VirtualDevice$",
        ),
        ('"planned_rows": 8', '"planned_rows": 8.5', r"^planned_rows: 8\.5 is not of type int$"),
        ('"pipeline": {', '"pipeline": {"colour": 1, ', r"^replicas\[0\]\.pipeline: Pipeline has no field 'colour'$"),
    ):
        text = to_json(plan)
        assert old in text
        with pytest.raises(ValueError, match=said):
            from_json(Plan, text.replace(old, new))


@pytest.mark.parametrize(("field", "value"), [("sizes", "32:32"), ("sizes", [32.0, 32.0]), ("axis", 3), ("whole_in", "up")])
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    text = json.dumps({"axis": "heads", "sizes": [2, 2], field: value})
    with pytest.raises(ValueError, match=r"is not (of type|a list)"):
        from_json(Shard, text)


@pytest.mark.parametrize("text", ["[" * 10_000 + "]" * 10_000, '{"axis": ' * 10_000 + "1" + "}" * 10_000])
def test_text_that_nests_too_deep_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested 10000 deep, more than 100"):
        from_json(Shard, text)


@at_most(50)
@given(st.recursive(st.integers() | st.text('[]{}"\\'), lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner)))
def test_brackets_in_text_do_not_nest(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(["[{" * 200, value], ensure_ascii=False)) == ["[{" * 200, value]


def test_a_file_that_is_too_large_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("12345")
    assert read_text(tmp_path / "file", 5) == "12345"
    with pytest.raises(ValueError, match="5 bytes, more than 4"):
        read_text(tmp_path / "file", 4)
    with pytest.raises(ValueError, match="5 bytes, more than 4"):
        read_text("/dev/zero", 4)
