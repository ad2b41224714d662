"""What one rank leaves in memory where it cannot go on, and what is read of it."""

from __future__ import annotations

import json
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from tests.unit.api.test_guards import BATCH, parallelize, same, weights
from whale.api.keeping import Fall, tell_resumed
from whale.errors import RuntimeFault
from whale.runtime.execute.status import FALL

BAD = {**BATCH, "input": torch.full_like(BATCH["input"], torch.nan)}


def keeping(folder: Path) -> dict[str, object]:
    return {"runtime.keep_on_fault": str(folder)}


def test_the_last_whole_step_is_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.step(BATCH)
    engine.save(tmp_path / "saved" / "step_1", extra="of the script")
    engine.step(BATCH)
    before, drawn = weights(engine), torch.rand(1)
    engine.close()
    engine = parallelize(config=keeping(tmp_path / "kept"))
    assert engine.resume(tmp_path / "saved") == "of the script", "nothing was kept: the checkpoint"
    engine.step(BATCH)
    with pytest.raises(RuntimeFault, match="nan"):
        engine.step(BAD)
    assert "whale: step 2 of rank 0 is kept in memory (" in capsys.readouterr().err
    engine.close()
    (tmp_path / "kept" / FALL).write_text(json.dumps([time.time(), 2]))
    engine = parallelize(config=keeping(tmp_path / "kept"))
    assert engine.resume(tmp_path / "saved") is None
    assert engine.step_number == 2 and same(before, weights(engine)) and torch.equal(drawn, torch.rand(1))
    assert "whale: goes on after step 2, from memory of 1 rank; lost: 0." in capsys.readouterr().err
    assert [*(tmp_path / "kept").iterdir()] == []


def test_a_later_checkpoint_and_a_torn_state_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.resume(tmp_path / "saved")
    engine.step(BATCH)
    engine.state.is_whole = False
    engine.leave_state()
    assert not (tmp_path / "kept").exists(), "an update was under way"
    engine.state.is_whole = True
    engine.leave_state()
    engine.step(BATCH)
    engine.save(tmp_path / "saved" / "step_2")
    engine.close()
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.resume(tmp_path / "saved")
    assert engine.step_number == 2 and f"from {tmp_path / 'saved' / 'step_2'}" in capsys.readouterr().err


def test_what_is_damaged_is_left_for_the_checkpoint_and_what_is_for_others_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = parallelize(config=keeping(tmp_path / "kept"))
    for purpose in ("one", "two"):
        engine.resume(tmp_path / purpose)
        engine.save(tmp_path / purpose / "step")
        engine.step(BATCH)
        engine.leave_state()
        assert engine._keeping is not None
        engine._keeping.is_done = False
    engine.close()
    for file in (tmp_path / "kept").glob("*_1_0.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.resume(tmp_path / "one")
    assert engine.step_number == 0
    assert "from " + str(tmp_path / "one" / "step") + "; what was kept in memory cannot be read: " in capsys.readouterr().err
    assert {file.name.split("_")[1] for file in (tmp_path / "kept").iterdir()} == {"2"}
    engine.resume(tmp_path / "two")
    assert engine.step_number == 2 and [*(tmp_path / "kept").iterdir()] == []


def test_a_full_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config=keeping(tmp_path))
    engine.step(BATCH)
    engine.leave_state()
    assert capsys.readouterr().err == "", "nobody will resume"
    engine.resume(tmp_path / "saved")
    monkeypatch.setattr("whale.runtime.checkpoint.surviving.disk_usage", lambda _: namedtuple("Usage", "free")(10))
    engine.leave_state()
    assert "whale: step 1 of rank 0 is not kept: " in (said := capsys.readouterr().err) and "free: 10 B" in said
    assert [*tmp_path.iterdir()] == []


def test_what_was_lost_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    before, now = ["T4 of a", "T4 of a", "V100 of b"], ["T4 of a", "CPU of c"]
    tell_resumed(40, "checkpoints/step_40", Fall(time.time() - 5, 42), before, now, "step 42 cannot be had from memory: why")
    assert capsys.readouterr().err == (
        "whale: goes on after step 40, from checkpoints/step_40; lost: 5.0 s, 2 steps; gone: 1 x T4 of a, 1 x V100 of b; "
        "new: 1 x CPU of c; step 42 cannot be had from memory: why\n"
    )
