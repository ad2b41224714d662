"""`whale doctor`: what it says of a model, with which lines, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from whale.cli import main

pytestmark = pytest.mark.slow

MODELS = """
import torch
import whale
from torch import nn

def batch():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}

def loss(output, batch):
    return (output - batch["y"]).square().mean()

class Layer(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), middle, nn.Linear(8, 4)
    def forward(self, x):
        return self.last(self.middle(self.first(x)))

class Rolled(nn.Module):
    def forward(self, x):
        return x.roll(1, 0)

class Fixed(nn.Module):
    def forward(self, x):
        return x * float(len(x))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4)
    def forward(self, words):
        return self.table(words)

class Looped(nn.Module):
    def forward(self, x):
        return torch.stack([row.tanh() for row in x])

class Conditional(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return x

def plain():
    with whale.split(4):
        return Layer(nn.GELU()), batch(), loss

def rolled():
    return Layer(Rolled()), batch(), loss

def fixed():
    return Layer(Fixed()), batch(), loss

def words():
    return Words(), {"words": torch.randint(20, (8, 12))}, lambda output, batch: output.square().mean()

def looped():
    return Layer(Looped()), batch(), loss

def conditional():
    return Layer(Conditional()), batch(), loss
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("sick.py").write_text(MODELS)
    return tmp_path


def line_of(text: str) -> str:
    (number,) = (number for number, line in enumerate(MODELS.splitlines(), start=1) if line.strip() == text)
    return f"sick.py:{number}"


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    return {finding["question"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_model_that_is_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py:plain"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:6] == [
        "capture        yes          one graph of 14 ops",
        "rows           yes          any number of them, with one capture",
        "sizes          fixed        4, 6 may not change",
        "replicas       exact        2 copies of the model, half of the rows each",
        "micro-batches  exact        2 micro-batches, half of the rows each",
        "stages         exact        a pipeline of 2 stages",
    ]
    assert printed[6].startswith("split          exact        a split over 2 devices would cut ")


def test_rows_that_are_mixed_are_named_with_their_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py:rolled", "--json"]) == 3
    found = findings(capsys)
    assert found["micro-batches"]["answer"] == "not exact"
    assert found["micro-batches"]["places"] == [
        {"where": line_of("return x.roll(1, 0)"), "text": "return x.roll(1, 0)", "reason": "aten.roll.default reads all of it at once"}
    ]
    assert (found["stages"]["answer"], found["split"]["answer"]) == ("exact", "exact")


def test_lines_are_printed_once_and_in_80_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py:rolled"]) == 3
    printed = capsys.readouterr().out
    assert printed.count("return x.roll(1, 0)") == 1
    assert max(map(len, printed.splitlines())) <= 80


def test_a_refused_capture_is_all_that_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py:conditional"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("capture        refused      the model's control flow or a size depends on")
    assert f"  {line_of('if x.sum() > 0:')}: if x.sum() > 0:\n  hint: use torch.where or masks" in printed
    assert "replicas" not in printed


def test_another_number_of_rows_is_tried_where_one_capture_does_not_serve_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "sick.py:fixed", "--json"])
    assert findings(capsys)["rows"]["detail"] == "any number of them, with a capture for each: the code reads it as a number"
    assert main(["doctor", "sick.py:looped", "--json"]) == 3
    found = findings(capsys)["rows"]
    assert found["answer"] == "refused" and "runs other ops for" in str(found["detail"])


def test_other_sizes_are_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py:words", "--json"]) == 0
    found = findings(capsys)["sizes"]
    assert (found["answer"], found["detail"]) == ("yes", "12 may change, with a capture for each (half was tried)")


def test_a_captured_model_is_told_of_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["capture", "sick.py:looped", "--output", "model.json"])
    capsys.readouterr()
    assert main(["doctor", "model.json", "--json"]) == 3
    assert findings(capsys)["rows"]["answer"] == "cannot tell"


def test_no_such_function_is_a_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sick.py:none"]) == 1
    assert "has no function 'none'" in capsys.readouterr().err
