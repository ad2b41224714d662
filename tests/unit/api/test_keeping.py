"""What one rank leaves in memory where it cannot go on, and what is read of it."""

from __future__ import annotations

import json
import re
import time
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import whale
from tests.unit.api.test_guards import BATCH, parallelize, same, weights
from whale.api.engine import Engine
from whale.api.keeping import FaultKeeper, await_device, check_room
from whale.api.resuming import Fall, say_resumed
from whale.comm.waiting import fault
from whale.errors import CheckpointError, ConfigError, RuntimeFault
from whale.runtime.checkpoint.boxes import Box
from whale.runtime.checkpoint.copies import Duty, StateCopies
from whale.runtime.checkpoint.surviving import keep_part
from whale.runtime.execute.status import FALL
from whale.runtime.state.host_copies import LateNumber

BAD = {**BATCH, "input": torch.full_like(BATCH["input"], torch.nan)}


def keeping(folder: Path) -> dict[str, object]:
    return {"runtime.keep_on_fault": str(folder)}


def lose_peers(engine: whale.Engine) -> None:
    """In the midst of a step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeFault, match="a rank has left"):
        patch.setattr(engine.runtime, "train", lambda *_, **__: raises(gone()))
        engine.step(BATCH)


def gone() -> RuntimeFault:
    return fault("1RECV_F0", (1,), timedelta(seconds=1), RuntimeError("closed by peer"))


def raises(error: Exception) -> None:
    raise error


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
    with pytest.raises(RuntimeFault, match="no rank 7"):
        engine.state_dict(rank=7)
    assert not (tmp_path / "kept").exists() and "kept" not in capsys.readouterr().err, "no peers were lost"
    lose_peers(engine)
    assert "whale: step 2 of rank 0 is kept in memory (" in capsys.readouterr().err
    engine.close()
    (tmp_path / "kept" / FALL).write_text(json.dumps([time.time(), 2]))
    engine = parallelize(config=keeping(tmp_path / "kept"))
    assert engine.resume(tmp_path / "saved") is None
    assert engine.step_number == 2 and same(before, weights(engine)) and torch.equal(drawn, torch.rand(1))
    assert re.search(r"whale: resumes after step 2, from memory of 1 rank; lost: [\d.]+ s", capsys.readouterr().err)
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
        engine._keeping.is_done = False
    engine.close()
    for file in (tmp_path / "kept").glob("*_1_0.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.resume(tmp_path / "one")
    assert engine.step_number == 0
    assert "from " + str(tmp_path / "one" / "step") + "; the state kept in memory cannot be read: " in capsys.readouterr().err
    assert {file.name.split("_")[1] for file in (tmp_path / "kept").iterdir()} == {"2"}
    engine.resume(tmp_path / "two")
    assert engine.step_number == 2 and [*(tmp_path / "kept").iterdir()] == []


def test_all_engines_of_a_script_leave_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, closed = (parallelize(config=keeping(tmp_path / "kept")) for _ in range(3))
    for engine, name in ((first, "one"), (second, "two"), (closed, "three")):
        engine.resume(tmp_path / name)
        engine.step(BATCH)
    second.step(BATCH)
    expected = weights(second)
    closed.close()
    lose_peers(first)
    first.close()
    said = capsys.readouterr().err
    assert "step 1 of rank 0 is kept" in said and "step 2 of rank 0 is kept" in said and len([*(tmp_path / "kept").glob("*.json")]) == 2
    again = parallelize(config=keeping(tmp_path / "kept"))
    again.resume(tmp_path / "two")
    assert again.step_number == 2 and same(weights(again), expected)


def test_an_error_that_is_caught_leaves_memory_on(tmp_path: Path) -> None:
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.resume(tmp_path / "saved")
    for action in (engine.load, lambda _: engine.load_state_dict({})):
        with pytest.raises(CheckpointError):
            action(tmp_path / "missing")
    for step in (1, 2):
        engine.step(BATCH)
        lose_peers(engine)
        assert len([*(tmp_path / "kept").glob(f"*_{step}_0.json")]) == 1


def test_a_checkpoint_of_the_same_step_comes_first_for_it_has_the_scripts_data(tmp_path: Path) -> None:
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.resume(tmp_path / "saved")
    engine.step(BATCH)
    engine.save(tmp_path / "saved" / "step_1", extra="of the script")
    lose_peers(engine)
    engine.close()
    assert [*(tmp_path / "kept").iterdir()] != []
    assert parallelize(config=keeping(tmp_path / "kept")).resume(tmp_path / "saved") == "of the script"


@pytest.mark.parametrize("where", ["resuming.newest_step", "engine.load_state"])
def test_a_resume_that_is_cut_off_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    engine = parallelize(config=keeping(tmp_path / "kept"))
    engine.save(tmp_path / "saved" / "step_0")
    monkeypatch.setattr(f"whale.api.{where}", lambda *_, **__: raises(gone()))
    with pytest.raises(RuntimeFault, match="a rank has left"):
        engine.resume(tmp_path / "saved")
    assert not (tmp_path / "kept").exists()


def test_a_full_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config=keeping(tmp_path))
    engine.step(BATCH)
    engine.leave_state()
    assert "kept" not in capsys.readouterr().err, "nobody will resume"
    engine.resume(tmp_path / "saved")
    monkeypatch.setattr("whale.runtime.checkpoint.surviving.disk_usage", lambda _: namedtuple("Usage", "free")(10))
    engine.leave_state()
    assert "whale: step 1 of rank 0 is not kept: " in (said := capsys.readouterr().err) and "free: 10 B" in said
    assert [*tmp_path.iterdir()] == []


def test_a_memory_that_will_not_hold_the_copies_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    check_room(tmp_path / "kept", 1)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"what ranks leave when others are lost \(.*\) does not fit in .* \(.* free\): some will"):
        check_room(tmp_path / "kept", 1 << 80)


def test_what_is_kept_stays_where_the_same_step_comes_again(tmp_path: Path) -> None:
    pieces = [("model.weight", (1,), Box((0,), (1,)), torch.ones(1))]
    keep_part(tmp_path, "training_5", "purpose", pieces, {}, rank=0)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="File exists"):
        keep_part(tmp_path, "training_5", "purpose", pieces, {}, rank=0)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and len(before) == 2


class Event:
    """Of a GPU that waits for a lost peer."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


def test_what_may_be_wrong_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config=keeping(tmp_path))
    engine.resume(tmp_path / "saved")
    engine.step(BATCH)
    keeper, losses = engine._keeping, engine.runtime.losses
    losses._copied.append((0, cast(Any, None), LateNumber(torch.tensor(torch.nan))))  # as a GPU's, which is looked at two steps later
    lose_peers(engine)
    assert "step 1 of rank 0 is not kept: the loss of one of the last steps is not finite" in capsys.readouterr().err
    losses.forget()
    keeper.is_done = False
    monkeypatch.setattr(FaultKeeper, "_keep_state", lambda *_: raises(RuntimeError("CUDA error: lost\nmore")))
    lose_peers(engine)
    assert "step 1 of rank 0 is not kept: RuntimeError: CUDA error: lost\n" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("whale.api.keeping.DEVICE_SECONDS", 0.0)
    await_device(torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"cuda:0 has not finished its work within 0 s"):
        await_device(torch.device("cuda:0"))


def test_what_was_lost_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    before, now = ["T4 of a", "T4 of a", "V100 of b"], ["T4 of a", "CPU of c"]
    say_resumed(40, "checkpoints/step_40", Fall(time.time() - 5, 42), before, now, "step 42 cannot be restored from memory: why")
    assert capsys.readouterr().err == (
        "whale: resumes after step 40, from checkpoints/step_40; lost: 5.0 s, 2 steps; gone: 1 x T4 of a, 1 x V100 of b; "
        "new: 1 x CPU of c; step 42 cannot be restored from memory: why\n"
    )


def test_copies_need_somebody_to_leave_them_and_somebody_to_keep_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory.redundancy: 1 has no effect: ranks that are lost leave nothing in memory"):
        parallelize(config={"memory.redundancy": 1})
    with pytest.warns(UserWarning, match="memory.redundancy: 1 survives no loss: there is no other rank"):
        engine = parallelize(config={"memory.redundancy": 1, **keeping(tmp_path / "kept")})
    with pytest.raises(ConfigError, match=r"engine.replan: memory.redundancy: 0 has no effect, as training began with 1"):
        engine.replan(config={"memory.redundancy": 0})
    with pytest.warns(UserWarning, match="engine.resume was not called before the first step") as told:
        engine.step(BATCH)
        engine.step(BATCH)
    assert len(told) == 1 and told[0].filename == __file__
    engine.resume(tmp_path / "saved")
    lose_peers(engine)
    assert [file.name.split("_")[1:] for file in (tmp_path / "kept").glob("*.json")] == [["2", "0.json"]]


def weight(engine: Engine) -> Tensor:
    return next(iter(engine.state.kept.values()))


def optimizer(engine: Engine) -> torch.optim.Optimizer:
    assert engine.optimizer is not None
    return engine.optimizer


WRITES: dict[str, Callable[[Engine], object]] = {
    "a weight": lambda engine: weight(engine).detach().neg_(),
    "data of a weight": lambda engine: weight(engine).data.neg_(),
    "what the optimizer keeps": lambda engine: optimizer(engine).state[weight(engine)]["exp_avg"].zero_(),
    "all that the optimizer keeps": lambda engine: optimizer(engine).state.clear(),
    "the learning rate": lambda engine: optimizer(engine).param_groups[0].update(lr=7.0),
    "the decay of averages": lambda engine: engine.average(0.25),
    "the schedule": lambda engine: engine.scheduler.load_state_dict({**engine.scheduler.state_dict(), "last_epoch": 7}),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_the_script_writes_is_not_what_there_are_copies_of(tmp_path: Path, what: str) -> None:
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    engine = parallelize(optimizer=partial(torch.optim.Adam, lr=0.1), scheduler=scheduler, config=keeping(tmp_path))
    engine.average(0.5)
    engine.step(BATCH)
    engine.step(BATCH)
    copies, random = StateCopies(engine.runtime.roster.world, ["a"]), engine._keeping.random
    copies.duty = Duty(dict.fromkeys(engine.tensors, (0,)), frozenset(), None, ())
    copies.make(2, *engine._keeping.held({"row": 8}, random))
    assert copies.are_of(*engine._keeping.held(None, random))
    engine.evaluate(BATCH, averaged=True)
    assert copies.are_of(*engine._keeping.held(None, random)), "weights are what they were"
    WRITES[what](engine)
    assert not copies.are_of(*engine._keeping.held(None, random))


def test_a_fall_that_nobody_had_room_to_note_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / FALL).touch()
    parallelize(config=keeping(tmp_path / "kept")).resume(tmp_path / "saved")
    told = r"resumes after step 0, from the start; lost: \d+\.\d s, an unknown number of steps"
    assert re.search(told, said := capsys.readouterr().err), said
    assert not (tmp_path / "kept" / FALL).exists()
