"""What the verbs read: pairs, a user's function, a captured model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from whale.cli import main
from whale.cli.inputs import is_function, load_function, parse_pairs, read_graph
from whale.errors import CaptureError, ConfigError
from whale.ir.graph import LossTerm, ModelGraph, Op, Parameter, Ref, TensorSpec
from whale.ir.serialization import to_json
from whale.workloads import GPT

SPEC = TensorSpec((4, 2), "float32", (1, 0))
GRAPH = ModelGraph((Op("x", "input", "x", outputs=(SPEC,)), Op("y", "call", "aten.relu.default", (Ref("x"),), outputs=(SPEC,))), (), 4)


def test_pairs_are_json_where_they_can_be() -> None:
    pairs = ["layers=4", "rate=3e-4", "deep=true", "name=gpt", "sizes=[1, 2]", "text=a=b", "empty="]
    assert parse_pairs(pairs, "--arg") == {
        "layers": 4,
        "rate": 3e-4,
        "deep": True,
        "name": "gpt",
        "sizes": [1, 2],
        "text": "a=b",
        "empty": "",
    }


@pytest.mark.parametrize("pairs", [["layers"], ["=4"], ["a=1", "a=2"], ["a=" + "[" * 10_000]])
def test_faulty_pairs(pairs: list[str]) -> None:
    with pytest.raises(ConfigError, match="--arg"):
        parse_pairs(pairs, "--arg")


def test_a_function_is_found_beside_the_files_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "its_neighbour_file.py").write_text("VALUE = 3\n")
    (tmp_path / "its_model_file.py").write_text("from its_neighbour_file import VALUE\ndef build(n=1):\n    return VALUE * n\n")
    assert load_function(f"{tmp_path}/its_model_file.py:build")(n=2) == 6


@pytest.mark.parametrize("source", ["model", "model.py", "model.txt:build", "nowhere.py:build"])
def test_no_such_source(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError, match=r"is not FILE\.py:FUNCTION|no file"):
        load_function(source)


def test_no_such_function(tmp_path: Path) -> None:
    (tmp_path / "empty_model_file.py").write_text("build = 3\n")
    for name in ("build", "other"):
        with pytest.raises(CaptureError, match=f"no function '{name}'"):
            load_function(f"{tmp_path}/empty_model_file.py:{name}")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("def build(:\n    pass\n", 1, "SyntaxError: invalid syntax"),
        ("\nimport no_such_library\n", 2, "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def build():\n    return {}['model']\n", 2, "KeyError: 'model'"),
        ("import json\ndef build():\n    return json.loads('x')\n", 3, "JSONDecodeError: Expecting value"),
    ],
)
def test_a_users_file_that_fails_is_told_in_a_word_with_its_line(
    text: str, line: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "failing_model_file.py").write_text(text)
    with pytest.raises(CaptureError) as fault:
        read_graph(f"{tmp_path}/failing_model_file.py:build", [])
    assert f"failing_model_file.py fails: {said}" in fault.value.message
    assert str(fault.value.where) == f"{tmp_path}/failing_model_file.py:{line}"


def test_whole_tracebacks_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["plan", "nowhere.py:build"]) == 1
    monkeypatch.setenv("WHALE_DEBUG", "1")
    with pytest.raises(CaptureError, match="no file"):
        main(["plan", "nowhere.py:build"])


def test_a_captured_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(to_json(GRAPH))
    assert read_graph(str(path), []) == GRAPH
    with pytest.raises(ConfigError, match="already captured"):
        read_graph(str(path), ["layers=4"])


@pytest.mark.parametrize(
    ("way", "value", "said"),
    [
        (("num_rows",), 10**30, "num_rows: 10+ is not from 1 to 16,777,216"),
        (("parameters", 0, "kind"), "weight", r"parameters\[0\]\.kind: 'weight' is not one of parameter, buffer"),
        (("parameters", 0, "spec", "dtype"), "float33", "'float33' is no dtype"),
        (("parameters", 0, "spec", "shape"), [4], "has 1 sizes and 2 row factors"),
        (("parameters", 0, "spec", "shape"), [-1, 4], r"has the shape \[-1, 4\]"),
        (("parameters", 0, "name"), "another", "which the model has not"),
        (("parameters", 1, "name"), "one", "parameter one is there 2 times"),
        (("parameters", 0, "read_as"), "x", "is read as 'x', which is no dtype"),
        (("ops", 0, "outputs"), [], "has 0 outputs, not 1"),
        (("ops", 0, "name"), "moved", "which is no op before it"),
        (("ops", 1, "name"), "one", "is there twice"),
        (("loss", 0, "sum"), "nowhere", "the result is %nowhere, which is no op"),
    ],
)
def test_a_changed_file_is_refused_with_what_is_wrong(way: tuple[str | int, ...], value: object, said: str, tmp_path: Path) -> None:
    weights = [Parameter(name, TensorSpec((4, 4), "float32", (0, 0))) for name in ("one", "two")]
    ops = [Op(each.name, "parameter", each.name, outputs=(each.spec,)) for each in weights]
    ops.append(Op("sum", "call", "aten.add.Tensor", (Ref("one"), Ref("two")), outputs=(TensorSpec((), "float32", ()),)))
    graph = ModelGraph(tuple(ops), tuple(weights), 4, (LossTerm(1.0, "sum", None),))
    path, data = tmp_path / "model.json", json.loads(to_json(graph))
    path.write_text(json.dumps(data))
    assert read_graph(str(path), []) == graph
    inner = data
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(CaptureError, match=rf"is not a captured model: .*{said}"):
        read_graph(str(path), [])


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"nothing": 1})])
def test_a_file_that_is_no_captured_model(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(CaptureError, match="is not a captured model"):
        read_graph(str(path), [])
    with pytest.raises(CaptureError, match="cannot be read"):
        read_graph(str(tmp_path / "none.json"), [])


SIZES = "layers=3,hidden=16,heads=2,sequence=8,vocabulary=32"


def test_a_published_model_is_made_deeper() -> None:
    assert read_graph(f"gpt:{SIZES}", ["dtype=bfloat16"], 5).parameter_by_name["blocks.4.up.weight"].spec.dtype == "bfloat16"


@pytest.mark.slow
def test_a_published_model_is_named_with_its_sizes() -> None:
    graph = read_graph(f"gpt:{SIZES}", ["dtype=bfloat16"])
    assert graph == GPT(layers=3, hidden=16, heads=2, sequence=8, vocabulary=32, dtype="bfloat16").graph()


def test_a_published_model_with_wrong_sizes_is_refused() -> None:
    with pytest.raises(CaptureError, match="heads"):
        read_graph("gpt:layers=3", [])
    with pytest.raises(ConfigError, match="gives layers twice"):
        read_graph(f"gpt:{SIZES}", ["layers=4"])


@pytest.mark.parametrize(("source", "own"), [("a.py:f", True), ("model.json", False), ("gpt:layers=2", False), ("gpt.py:f", True)])
def test_a_function_is_told_from_a_captured_and_a_published_model(source: str, own: bool) -> None:
    assert is_function(source) == own


@pytest.mark.slow
def test_a_published_model_is_examined_and_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "gpt:layers=2,hidden=16,heads=2,sequence=4,vocabulary=8"]) in (0, 3)
    assert "capture        yes" in capsys.readouterr().out
    assert main(["profile", "gpt:layers=2", "--output", "p.json"]) == 1
    assert "gpt:layers=2 has no code to measure; whale profile needs FILE.py:FUNCTION" in capsys.readouterr().err
