"""Figures of steps: lines of JSON, lines on standard error, words beside a bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.api.test_guards import BATCH, parallelize
from whale.errors import ConfigError


def test_each_step_is_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs" / "steps.jsonl"
    engine = parallelize(config={"runtime.log_file": str(file), "runtime.progress": True, "gradient.clip_norm": 1e9})
    losses, norms = [], []
    for _ in range(2):
        losses.append(float(engine.step(BATCH)))
        norms.append(float(engine.gradient_norm))
    sums = float(engine.forward_backward(BATCH)) + float(engine.forward_backward(BATCH))
    engine.update(scale=0.5)
    engine.evaluate(BATCH)
    engine.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == pytest.approx([*losses, sums / 2])
    assert [line["gradient_norm"] for line in lines[:2]] == pytest.approx(norms)
    num_rows = len(BATCH["input"])
    for line, rows in zip(lines, (num_rows, num_rows, 2 * num_rows), strict=True):
        assert line["samples_per_second"] == pytest.approx(rows / line["seconds"])
        assert line["learning_rates"] == [engine.state.optimizer.param_groups[0]["lr"]] and line["peak_bytes"] > 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("whale: step")]
    assert shown[0].startswith("whale: step 1 · loss") and shown[-1].startswith("whale: step 3 ·")


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    engine = parallelize(config={"runtime.log_file": str(file), "gradient.skip_nonfinite": True})
    with pytest.warns(UserWarning, match="is skipped"):
        engine.step({name: torch.full_like(value, torch.nan) if value.is_floating_point() else value for name, value in BATCH.items()})
    assert json.loads(file.read_text())["loss"] is None


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)cannot write the log of steps .*steps\.jsonl.*runtime\.log_file"):
        parallelize(config={"runtime.log_file": str(tmp_path / "file" / "steps.jsonl")})


def test_figures_beside_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config={"runtime.progress": True})
    samples = [{name: value[index] for name, value in BATCH.items()} for index in range(8)]
    for batch in engine.loader(samples, global_batch_size=4):
        engine.step(batch)
    shown = capsys.readouterr().err
    assert "epoch 1" in shown and "samples/s" in shown


def test_another_plan_may_have_another_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    engine = parallelize(config={"runtime.log_file": str(files[0])})
    engine.step(BATCH)
    engine.replan(config={"runtime.log_file": str(files[1])})
    engine.step(BATCH)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the log of steps"):
        engine.replan(config={"runtime.log_file": str(tmp_path / "file" / "steps.jsonl")})
    engine.step(BATCH)
    engine.replan(config={"runtime.log_file": None})
    engine.step(BATCH)
    engine.close()
    assert [[json.loads(line)["step"] for line in file.read_text().splitlines()] for file in files] == [[1], [2, 3]]
