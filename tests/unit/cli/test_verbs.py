"""The verbs that plan: what they print, what they write, and how they end."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch

import whale
from whale.cli import main
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import from_json
from whale.planning.plan import EstimatedPlan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Strategy

MODEL = """
import torch
import whale

def build(width=8, stages=2):
    def part(number):
        with whale.replicate(device_count=1, name=f"part{number}"):
            return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
    model = torch.nn.Sequential(*(part(number) for number in range(stages)))
    batch = (torch.randn(8, width),)
    return model, batch, lambda output, batch: output.square().mean()

def codes():
    model, (x,), loss = build()
    batch = {"input": x, "codebook": torch.randn(16, 8)}
    return model, batch, lambda output, batch: (output.square().sum(1) * batch["codebook"].sum()).mean(), {"codebook": None}

def free(width=8):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    return model, (torch.randn(8, width),), lambda output, batch: output.square().mean()

def only_model():
    return torch.nn.Linear(2, 2)

def with_optimizer():
    return (*build(), torch.optim.AdamW)

def batch_last():
    model, batch, loss = build()
    return model, loss, batch
"""

OFF = ("--set", "planning.search=off")

CLUSTER = """
name: pair
hosts:
  - name: host0
    devices:
      - {model: V100-32GB, count: 2}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("verb_model.py").write_text(MODEL)
    return "verb_model.py:build"


@cache
def capture_of(function: str) -> str:
    assert main(["capture", f"verb_model.py:{function}", "--output", "model.json"]) == 0
    return Path("model.json").read_text()


@pytest.fixture
def captured(model: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The model as it was captured once, for what is told of it alike."""
    Path("model.json").write_text(capture_of("build"))
    capsys.readouterr()
    return "model.json"


def test_capture_prints_the_scopes_and_writes_the_graph(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", model, "--arg", "stages=3", "--output", "model.json"]) == 0
    printed = capsys.readouterr().out
    assert "replicate(1, name='part2')" in printed and "verb_model.py:" in printed
    graph = from_json(ModelGraph, Path("model.json").read_text())
    assert graph.num_rows == 8
    assert main(["capture", model, "--arg", "stages=3", "--json"]) == 0
    assert from_json(ModelGraph, capsys.readouterr().out) == graph
    assert main(["capture", model, "--arg", "stages=3", "--ops"]) == 0
    assert "aten.gelu.default" in capsys.readouterr().out


def test_a_function_may_say_which_tensors_have_rows(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "verb_model.py:codes", "--json"]) == 0
    assert from_json(ModelGraph, capsys.readouterr().out).num_rows == 8


@pytest.mark.slow
def test_doctor_is_told_which_tensors_have_rows(model: str) -> None:
    assert main(["doctor", "verb_model.py:codes"]) == 0


def test_a_plan_is_the_same_from_the_function_and_from_the_captured_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "4", "--set", "pipeline.num_micro_batch=2", *OFF, "--rows", "16"]
    main(["capture", model, "--output", "model.json"])
    capsys.readouterr()
    assert main(["plan", model, *words, "--output", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert "2 replicas x 2 stages on 4 devices" in printed and "part0" in printed and "predicted" in printed
    assert main(["plan", "model.json", *words, "--json"]) == 0
    plan = from_json(Plan, capsys.readouterr().out)
    assert plan == from_json(Plan, Path("plan.json").read_text())
    assert (plan.pipelines[0].num_micro_batch, plan.planned_rows) == (2, 16)


def test_the_picture_of_a_step_is_written(captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, file, holds in (("plan", "step.html", "<!DOCTYPE html>"), ("simulate", "step.json", '"traceEvents"')):
        assert main([verb, captured, "--ranks", "2", "--report", file]) == 0
        assert holds in Path(file).read_text() and "stage" in capsys.readouterr().out
    assert main(["plan", "verb_model.py:no_such_function", "--report", "step.txt"]) == 1
    assert "--report step.txt does not end in .html or .json" in capsys.readouterr().err


def test_simulate_tells_time_and_memory(captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [captured, "--ranks", "2", "--rows", "16"]
    assert main(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    for word in ("step time", "samples per second", "bubble rate", "exposed communication", "straggler", "bound"):
        assert word in printed
    assert main(["simulate", *words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) == 2
    assert main(["simulate", *words, "--even"]) == 0
    assert "with equal shares: the balanced plan is 1.00 x as fast" in capsys.readouterr().out
    assert main(["simulate", *words, "--faults", "0.5", "--restart", "60"]) == 0
    assert "a fault every 24 hours on 2 devices, restart in 60 s" in (printed := capsys.readouterr().out) and "(best)" in printed
    assert main(["simulate", *words, "--faults", "0.5", "--json"]) == 0
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert faults["mean_seconds"] == 86_400 and len(faults["goodput"]) == 3 and faults["best_interval_seconds"] > 0
    copies = ["--set", "memory.redundancy=1"]
    assert main(["simulate", *words, *copies, "--faults", "0.5"]) == 0
    assert (
        "survives the loss of any one device" in (printed := " ".join(capsys.readouterr().out.split()))
        and "copies (one device lost at once)" in printed
    )
    assert main(["simulate", *words, *copies, "--faults", "0.5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["redundancy"]["survives"] == "device" and data["faults"]["with_copies"]["useful"] > 0
    with pytest.raises(SystemExit):
        main(["simulate", *words, "--faults", "0"])
    assert "'0' is not a number above 0" in capsys.readouterr().err


def test_a_plan_is_for_the_devices_that_are_named(captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cluster.yaml").write_text(CLUSTER.replace("count: 2", "count: 4"))
    words = [captured, "--cluster", "cluster.yaml"]
    assert main(["plan", *words, "--devices", "host0/1,V100:1", "--json"]) == 0
    plan = from_json(Plan, capsys.readouterr().out)
    assert (set(plan.devices), plan.idle_devices) == ({"host0/0", "host0/1"}, ())
    assert main(["plan", *words, "--devices", "T4"]) == 1
    assert "no device 'T4'" in capsys.readouterr().err


def test_what_a_sample_costs_is_told_where_devices_have_prices(captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cluster.yaml").write_text(CLUSTER.replace("count: 2", "count: 2, price_per_hour: 3"))
    words = [captured, "--cluster", "cluster.yaml"]
    assert main(["plan", *words]) == 0
    assert "per million samples" in capsys.readouterr().out
    assert main(["simulate", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cost_per_sample"] == pytest.approx(6 / 3600 / told["samples_per_second"])
    assert main(["plan", *words, "--set", "planning.objective=cost", *OFF]) == 1
    assert "planning.objective cost needs a search, but planning.search off leaves nothing to search" in capsys.readouterr().err


def test_simulate_runs_ranks_dry(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [model, "--ranks", "4", "--dry-run", "--set", "pipeline.num_micro_batch=2", *OFF]
    assert main(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    assert "dry run: 2 of 4 ranks, the others are equal" in printed
    assert main(["simulate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dry_run"] == {"num_ranks_run": 2} and len(found["devices"]) == 4
    for each in found["devices"]:
        assert each["dry_run_peak_bytes"] > 0 and set(each["dry_run_peak_at"]) == {"action", "op"}
    assert main(["simulate", *words, "--blocks", "4"]) == 1
    assert "which is a graph without a program" in capsys.readouterr().err


@pytest.mark.slow
def test_a_published_model_is_run_dry(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "gpt:layers=1,hidden=16,heads=2,sequence=8,vocabulary=32"
    assert main(["simulate", sizes, "--ranks", "1", "--dry-run"]) == 0
    assert "dry run: 1 of 1 rank\n" in capsys.readouterr().out


def test_a_written_plan_is_planned_and_simulated(captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("written.yaml").write_text("num_micro_batch: 4\nreplicas: 1\n")
    words = [captured, "--ranks", "4", "--rows", "16", "--plan", "written.yaml", *OFF]
    for verb in ("plan", "simulate"):
        assert main([verb, *words]) == 0
        assert "1 replica x 2 stages on 2 devices" in (printed := capsys.readouterr().out)
        assert "4 micro-batches" in printed
    assert main(["plan", *words, "--output", "whole.yaml"]) == 0
    planned = capsys.readouterr().out
    assert main(["plan", captured, "--ranks", "4", "--plan", "whole.yaml"]) == 0
    assert capsys.readouterr().out == planned
    Path("written.yaml").write_text("replicas: 3\n")
    assert main(["simulate", *words]) == 1
    assert "at written.yaml:1" in capsys.readouterr().err


def test_stages_that_were_not_made_are_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.json").write_text(capture_of("free"))
    Path("written.yaml").write_text("num_stages: 2\n")
    capsys.readouterr()
    for words in (["--set", "pipeline.num_stages=60"], ["--plan", "written.yaml", "--set", "pipeline.num_stages=2"]):
        assert main(["plan", "model.json", "--ranks", "4", *words]) == 0
        told = capsys.readouterr()
        assert ("warning: pipeline.num_stages is 60, but the plan has " in told.err) == ("--plan" not in words)
        assert max(map(len, told.out.splitlines()[1:])) <= 80


def test_explain_prints_every_choice(captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", captured, "--ranks", "2", "--json", "--explain"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["choices"] and explained["warnings"] == []
    assert main(["plan", captured, "--ranks", "2", "--explain"]) == 0
    printed = capsys.readouterr().out
    for heading in ("decision", "cost", "bound by", "runner-up"):
        assert heading in printed
    assert main(["plan", captured, "--ranks", "2", "--largest", "--explain", "--json"]) == 1
    assert "--explain has no effect with --largest --json" in capsys.readouterr().err


SEARCHED = ["model.json", "--cluster", "cluster.yaml", "--rows", "8", "--set", "planning.effort=100"]


@pytest.fixture
def searched(model: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The words of a plan that is searched for."""
    Path("cluster.yaml").write_text(CLUSTER)
    Path("model.json").write_text(capture_of("free"))
    capsys.readouterr()
    return SEARCHED


def test_a_runner_up_is_shown_whole(searched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *searched, "--explain"]) == 0
    best = capsys.readouterr().out
    assert main(["plan", *searched, "--runner-up", "1", "--explain"]) == 0
    printed = capsys.readouterr().out
    shown = " ".join(printed.split())
    assert shown.partition("search: runner-up 1 decision ")[2].partition(" bound by ")[0] in " ".join(best.split())
    assert "predicted:" in printed and "search: runner-up 1" in printed
    assert main(["plan", *searched, "--runner-up", "50", "--explain"]) == 1
    assert "there is no runner-up 50" in capsys.readouterr().err
    assert main(["plan", "verb_model.py:build", "--ranks", "2", "--runner-up", "1", *OFF, "--explain"]) == 1
    assert "a runner-up needs a search, but planning.search off leaves nothing to search" in capsys.readouterr().err


def test_advice_is_told_in_words_and_numbers(searched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*searched[:-1], "planning.effort=2"]
    assert main(["advise", *words, "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert {each["about"] for each in found["advice"]} >= {"devices", "redundancy"}
    assert "whale advise: memory.redundancy: 1" in told.err
    assert all(each["says"] for each in found["advice"])
    assert found["facts"][0]["value"] == found["plan"]["value"] and found["facts"][0]["devices"]
    values = {each["value"] for each in found["facts"]}
    for each in found["advice"]:
        assert each["about"] == "batch" or values >= {each["value"], each["beside"]} - {None}


def test_ctrl_c_keeps_the_best_plan_so_far(
    searched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    realized, left = Realizer.realize, [1]

    def interrupted(self: Realizer, strategy: Strategy) -> EstimatedPlan:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return realized(self, strategy)

    monkeypatch.setattr(Realizer, "realize", interrupted)
    assert main(["plan", *searched]) == 0
    assert "the search was interrupted: the best of 1 plan so far" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *searched]) == 130
    assert capsys.readouterr().err.endswith("whale: interrupted\n")


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Importing(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "whale.cli.command", Importing("whale.cli.command"))
    assert main(["plan", "model.json"]) == 130
    assert capsys.readouterr().err == "whale: interrupted\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "verb_model.py:only_model"], "returned Linear, not (model, batch, loss) or (model, batch, loss, batch_dims)"),
        (["plan", "verb_model.py:batch_last"], "returned a tuple of 1 as the loss of (model, batch, loss), not a function or None"),
        (
            ["plan", "verb_model.py:with_optimizer"],
            "returned type as batch_dims after the loss, not a mapping of tensors to 0 or None",
        ),
        (["plan", "verb_model.py:build", "--arg", "no_such=1"], "verb_model.py:build takes no 'no_such'\n  hint: known: width, stages"),
        (["plan", "verb_model.py:build", "--cluster", "none.yaml"], "none.yaml"),
        (["plan", "verb_model.py:build", "--arg", "widht=1"], "did you mean 'width'?"),
        (["plan", "gpt:layer=2"], "gpt takes no 'layer'\n  hint: did you mean 'layers'?"),
        (["plan", "gpt:layers=2"], "gpt needs hidden, heads, sequence, vocabulary\n  hint: --arg hidden=VALUE; it takes layers, hidden,"),
        (["plan", "verb_model.py:buid"], "did you mean 'build'?"),
        (
            ["plan", "nowhere.py:build", "--cluster", "pair.yaml", "--ranks", "2"],
            "--ranks cannot be given together with the cluster file pair.yaml",
        ),
        (["plan", "nowhere.py:build", "--recipe", "elsewhere.yaml"], "at elsewhere.yaml\n  hint: cluster.file names it"),
        (["plan", "nowhere.py:build", "--output", "plan.txt"], "--output plan.txt does not end in .yaml or .json"),
        (["plan", "verb_model.py:build", "--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["plan", "verb_model.py:build", "--set", "pipeline.num_micro_batches=2"], "num_micro_batch"),
        (["plan", "verb_model.py:build", "--recipe", "none.yaml"], "none.yaml"),
        (["capture", "verb_model.py:build", "--output", "no/such/folder.json"], "cannot be written"),
        # what is quickly read is looked at before the model, which is not there at all
        (["plan", "nowhere.py:build", "--set", "pipeline.num_micro_batches=2"], "num_micro_batch"),
        (["advise", "nowhere.py:build", "--cluster", "none.yaml"], "none.yaml"),
        (["simulate", "nowhere.py:build", "--rows", "-4"], "--rows must be from 1 to 16,777,216, not -4"),
        (
            ["plan", "nowhere.py:build", "--output", "no/such/folder.yaml"],
            "no/such/folder.yaml cannot be written: there is no folder no/such",
        ),
        (["plan", "nowhere.py:build", "--report", "no/such/folder.html"], "no/such/folder.html cannot be written"),
        (["capture", "nowhere.py:build", "--output", "no/such/folder.json"], "no/such/folder.json cannot be written"),
        (["capture", "nowhere.py:build", "--output", "."], ". cannot be written: it is a folder"),
        (["capture", "nowhere.py:build", "--output", "a\0b.json"], "'a\\x00b.json' cannot be written: a path has no NUL character"),
        (["plan", "gpt:layers=2", "--rows", "99999999999999999999"], "--rows must be from 1 to 16,777,216, not 99999999999999999999"),
        (["probe", "--ranks", "2", "--output", "no/such/folder.yaml"], "no/such/folder.yaml cannot be written"),
        (["profile", "nowhere.py:build", "--ranks", "2", "--output", "no/such/folder.json"], "no/such/folder.json cannot be written"),
    ],
)
def test_faults_are_told_plainly_and_end_with_1(model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("elsewhere.yaml").write_text("cluster: no_cluster.yaml\n")
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("whale: ") and said in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["paln"], "whale: error: unknown command 'paln' (did you mean 'plan'?)"),
        (["plan"], "usage: whale plan"),
        (["plan", "a.py:f", "--no-such-flag"], "whale plan: error: unknown option --no-such-flag"),
        (["plan", "a.py:f", "--cluser", "c.yaml"], "whale plan: error: unknown option --cluser (did you mean '--cluster'?)"),
        (["plan", "a.py:f", "b.py:g"], "whale plan: error: unknown argument b.py:g"),
        (["run", "--rnks", "2", "train.py"], "whale run: error: unknown option --rnks (did you mean '--ranks'?)"),
        (["run"], "whale run: error: the following arguments are required: SCRIPT\n"),
        (["schedule", "1f1b", "--forward", "abc"], "argument --forward: time abc is not a number"),
    ],
)
def test_a_wrong_command_line_ends_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_whale_alone_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "check that a model can be captured and stays exact" in capsys.readouterr().out


def test_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"whale {whale.__version__}, torch {version('torch')}, Python {platform.python_version()}\n"


def test_parameters_are_listed_under_the_scope_that_reads_them(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", model]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (nowhere,) = (row for row in rows if row[:1] == ["(none)"])
    assert nowhere[2:4] == ["0", "B"]  # after the number of ops
    assert sum(row[-5:-3] == ["288", "B"] for row in rows) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["capture"],
        ["doctor", "--axes"],
        ["plan", "--ranks", "4", "--tree"],
        ["simulate", "--ranks", "4"],
        ["plan", "--ranks", "4", "--explain"],
    ],
)
def test_tables_fit_80_columns(words: list[str], captured: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = "verb_model.py:build" if words == ["capture"] else captured
    assert main([words[0], source, *words[1:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [index + 1 for index, line in enumerate(lines) if line and not line.strip("─")]
    assert headings or words[-1] == "--explain"
    for start in headings:
        table = [lines[start - 2], *lines[start : start + 4]]
        assert max(map(len, table[:2])) <= 80, table


@pytest.mark.slow
def test_planning_a_captured_model_needs_no_torch(captured: str) -> None:
    Path("cluster.yaml").write_text(CLUSTER)
    code = "import sys; from whale.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, "plan", captured, "--cluster", "cluster.yaml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "2 stages" in result.stdout
