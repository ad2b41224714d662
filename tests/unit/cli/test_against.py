"""Two plans side by side: what is told to differ is what was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.search.test_search import layers
from whale.cli import main
from whale.ir.serialization import to_json

CLUSTER = "name: c\nhosts:\n  - {name: h, devices: {model: MODEL, count: 2, price_per_hour: 2}}\n"
OFF = "--set planning.search=off --set estimate.communicator_bytes=0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(to_json(layers([64] * 4)))
    for name, model in (("fast", "V100-32GB"), ("slow", "T4")):
        Path(f"{name}.yaml").write_text(CLUSTER.replace("MODEL", model))
    Path("staged.yaml").write_text("pipeline: {num_stages: 2, num_micro_batch: 4, schedule: 1f1b}\n")
    Path("off.yaml").write_text("planning: {search: 'off'}\n")
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, dict[str, float]], dict[str, tuple[str, str]]]:
    assert main(["simulate", "model.json", *words, "--rows", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    return told["figures"], {row["what"]: (row["a"], row["b"]) for row in told["differences"]}


def test_clusters_are_told_by_time_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, found = compared(capsys, "--cluster", "fast.yaml", "--against", "slow.yaml", *OFF.split())
    assert found == {}
    assert figures["step_seconds"]["a"] < figures["step_seconds"]["b"] and figures["peak_bytes"]["a"] == figures["peak_bytes"]["b"]
    assert figures["cost_per_sample"]["a"] < figures["cost_per_sample"]["b"]


def test_recipes_are_told_by_schedule_stages_and_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, found = compared(capsys, "--recipe", "off.yaml", "--against", "staged.yaml", "--cluster", "fast.yaml")
    assert figures["replicas"] == {"a": 2, "b": 1} and figures["devices"] == {"a": 2, "b": 2}
    assert found["schedule"] == ("1f1b, 1 micro-batch", "-")  # of replica 1, which B has not
    assert (
        main(["simulate", "model.json", "--recipe", "off.yaml", "--against", "staged.yaml", "--cluster", "fast.yaml", "--rows", "16"]) == 0
    )
    printed = capsys.readouterr().out
    for word in ("step_seconds", "1f1b, 4", "stage 1 ops", "h/1", "what differs"):
        assert word in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_plans_for_two_clusters_are_held_to_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.yaml").write_text("name: one\nhosts:\n  - {name: alone, devices: T4}\n")
    for name, cluster in (("a", "fast.yaml"), ("b", "one.yaml")):
        assert (
            main(["plan", "model.json", "--cluster", cluster, "--rows", "16", "--set", "planning.effort=2", "--output", f"{name}.json"])
            == 0
        )
    capsys.readouterr()
    figures, found = compared(capsys, "--plan", "a.json", "--cluster", "fast.yaml", "--against", "b.json", "--against", "one.yaml")
    assert figures["devices"]["b"] == 1 and found["stage 0 devices"][1] in ("alone/0", "-")
    assert main(["simulate", "model.json", "--plan", "a.json", "--against", "b.json", "--cluster", "fast.yaml"]) == 1
    assert "names devices that are not in cluster 'c': alone/0" in capsys.readouterr().err


def test_a_written_plan_differs_from_itself_in_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.json", "--cluster", "fast.yaml", "--recipe", "staged.yaml", "--rows", "16"]
    for file in ("plan.yaml", "plan.json"):
        assert main(["plan", *words, "--output", file]) == 0
    capsys.readouterr()
    assert main(["simulate", "model.json", "--plan", "plan.yaml", "--against", "plan.json", "--cluster", "fast.yaml", "--rows", "16"]) == 0
    assert capsys.readouterr().out.endswith("the plans are the same\n")
    Path("other.yaml").write_text(Path("plan.yaml").read_text().replace("num_micro_batch: 4", "num_micro_batch: 8"))
    _, found = compared(capsys, "--plan", "plan.yaml", "--against", "other.yaml", "--cluster", "fast.yaml")
    assert found == {
        "schedule": ("1f1b, 4 micro-batches", "1f1b, 8 micro-batches"),
        "stage 0 rows": ("4", "2"),
        "stage 1 rows": ("4", "2"),
    }


STAGES = """replicas:
- rows: 16
  schedule: 1f1b
  num_micro_batch: 4
  stages:
  - {devices: [h/0], ops: [layer0 .. layer1], recompute: [layer0]}
  - {devices: [h/1], ops: [layer2 .. loss]}
"""


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("recompute: [layer0]", "recompute: [layer1]", {"stage 0 recomputed": ("layer0 (1)", "layer1 (1)")}),
        ("- rows: 16", "- rows: 1", {}),
        ("recompute: [layer0]}", "recompute: [layer0, layer1]}", {"stage 0 recomputed": ("layer0 (1)", "layer0, layer1 (2)")}),
        ("{devices: [h/1]", "{rows: [3], devices: [h/1]", {}),
    ],
)
def test_plans_that_differ_in_one_thing(
    old: str, new: str, what: dict[str, tuple[str, str]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").write_text(STAGES)
    Path("b.yaml").write_text(STAGES.replace(old, new))
    _, found = compared(capsys, "--plan", "a.yaml", "--against", "b.yaml", "--cluster", "fast.yaml")
    assert found == what
    assert main(["simulate", "model.json", "--plan", "a.yaml", "--against", "b.yaml", "--cluster", "fast.yaml", "--rows", "16"]) == 0
    assert ("the plans are the same" in capsys.readouterr().out) == (not what)


def test_a_moved_op_moves_what_is_handed_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(STAGES)
    Path("b.yaml").write_text(STAGES.replace("layer0 .. layer1]", "layer0]").replace("layer2 .. loss", "layer1 .. loss"))
    _, found = compared(capsys, "--plan", "a.yaml", "--against", "b.yaml", "--cluster", "fast.yaml")
    assert found["stage 0 -> stage 1"] == ("layer1", "layer0") and found["stage 0 ops"] == ("layer0 .. layer1 (2)", "layer0 (1)")


def test_halves_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = "{devices: [h/0, h/1], ops: [layer0 .. loss], split: 2, cut: {'layer1.weight:0': [32, 32]}, halves: false}"
    Path("a.yaml").write_text(f"replicas: [{{rows: 1, schedule: 1f1b, num_micro_batch: 1, stages: [{stage}]}}]\n")
    Path("b.yaml").write_text(Path("a.yaml").read_text().replace("false", "true"))
    _, found = compared(capsys, "--plan", "a.yaml", "--against", "b.yaml", "--cluster", "fast.yaml")
    assert found == {"stage 0 rows computed": ("-", "in two halves, alternately")}


def test_a_file_that_is_not_there_is_a_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "model.json", "--cluster", "fast.yaml", "--against", "none.yaml"]) == 1
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against", "slow.yaml", "--against", "fast.yaml"], "--against names two files of one kind (cluster): slow.yaml and fast.yaml"),
        (["--against", "slow.yaml", "--even"], "--even has no effect with --against"),
        (["--against", "slip.yaml"], "unknown section 'pipline'\n  at slip.yaml:1\n  hint: did you mean 'pipeline'"),
    ],
)
def test_what_cannot_be_compared_is_an_error(folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("slip.yaml").write_text("pipline: {num_stages: 2}\n")
    assert main(["simulate", "model.json", "--cluster", "fast.yaml", *words]) == 1
    assert said in capsys.readouterr().err


def test_files_are_told_apart_by_their_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("written.yaml").write_text("num_stages: 2\nrecompute: blocks\n")
    Path("chunks.yaml").write_text("pipeline: {num_stages: 1, num_chunks: 2, num_micro_batch: 2, schedule: aiao}\nrecompute: auto\n")
    _, found = compared(capsys, "--plan", "written.yaml", "--against", "chunks.yaml", "--cluster", "fast.yaml")
    assert found["chunks"] == ("2 per device, group size 1", "2 per device")
