"""What is told around the work: short tracebacks, a bar, a warning at the user's own line."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist

from tests.unit.api.test_guards import BATCH, parallelize
from whale.comm import connect
from whale.errors import BatchError, ConfigError


def files_of(error: BaseException) -> list[str]:
    return [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_error_shows_the_users_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = parallelize()
    with pytest.raises(BatchError) as caught:
        engine.step({"input": BATCH["input"]})
    assert files_of(caught.value) == ["test_calls.py", "calls.py"] and caught.value.__cause__ is None
    with pytest.raises(ConfigError) as unknown:
        parallelize(config={"pipeline.stages": 2})
    assert files_of(unknown.value)[-1] == "calls.py"
    with pytest.raises(KeyboardInterrupt) as interrupted, monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", interrupt)
        engine.step(BATCH)
    assert files_of(interrupted.value)[-1] == "calls.py"
    monkeypatch.setenv("WHALE_DEBUG", "1")
    with pytest.raises(BatchError) as whole:
        engine.step({"input": BATCH["input"]})
    assert "batch.py" in files_of(whole.value)


def test_a_loader_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize()
    samples = [{name: value[index] for name, value in BATCH.items()} for index in range(8)]
    rows = [len(batch["input"]) for batch in engine.loader(samples, global_batch_size=4, progress=True)]
    assert rows == [4, 4]
    shown = capsys.readouterr()
    assert "epoch 1" in shown.err and "100%" in shown.err and shown.out == ""
    list(engine.loader(samples, global_batch_size=4))
    assert capsys.readouterr().err == ""


def test_a_group_that_carries_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    with pytest.raises(ConfigError) as caught:
        connect(1.0)
    assert "cannot carry tensors in host memory (torch.distributed was initialised with 'cuda:nccl')" in str(caught.value)
    assert 'init_process_group("cpu:gloo,cuda:nccl", ...)' in str(caught.value)
