"""``whale doctor --axes``: what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from whale.cli import main

MODEL = """
import torch
import whale

def build():
    with whale.replicate(name="trunk"):
        trunk = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10))
    with whale.replicate(name="head"):
        head = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Softmax(-1))
    return torch.nn.Sequential(trunk, head), (torch.randn(4, 6),), lambda output, batch: output.square().mean()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("axes_model.py").write_text(MODEL)
    return "axes_model.py:build"


def test_axes_are_printed_per_task_graph(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", model, "--axes"]) == 0
    printed = capsys.readouterr().out
    assert "TaskGraph trunk" in printed and "TaskGraph head" in printed
    assert "samples are not independent" in printed and "batch_norm" in printed


def test_axes_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", model, "--axes", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {(row["task_graph"], row["axis"]): row for row in data["axes"]}
    assert rows["head", "1.0.weight:0"]["size"] == 7
    assert "softmax" in rows["head", "1.0.weight:0"]["why"]
    assert [mixing["kind"] for mixing in data["mixing"]] == ["mixes"]
