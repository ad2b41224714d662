"""A save that cannot be written in full says why, leaves nothing behind, and keeps what stood at the path."""

from __future__ import annotations

import errno
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.examples import slow
from whale.errors import CheckpointError
from whale.runtime.checkpoint import contents, files

BATCH = {"input": torch.zeros(4, 2)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.mean()


def linear() -> whale.Engine:
    return whale.parallelize(nn.Linear(2, 1), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH)


def full(number: int, *_: Any, **__: Any) -> None:
    raise OSError(number, "No space left on device")


@pytest.mark.parametrize("then", ["wait", "save", "load", "close"])
@pytest.mark.parametrize(
    ("where", "number"),
    [("data", errno.ENOSPC), ("marker", errno.EDQUOT), slow("data", errno.EDQUOT), slow("marker", errno.ENOSPC)],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str, then: str) -> None:
    engine = linear()
    engine.save(tmp_path / "c")
    for call in (engine.save, engine.load, engine.resume):
        with pytest.raises(CheckpointError):
            call(f"{tmp_path}/a\0b")
    engine.step(BATCH)
    with monkeypatch.context() as patched:
        patched.setattr(*((contents, "_bytes_of") if where == "data" else (files, "write_text")), partial(full, number))
        if then != "wait":
            engine.save(tmp_path / "c", wait=False)
            engine.step(BATCH)
        with pytest.raises(CheckpointError, match="the disk is full"):
            {"wait": engine.save, "save": engine.save, "load": engine.load, "close": lambda _: engine.close()}[then](tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    if then == "close":
        engine = linear()
    engine.load(tmp_path / "c")  # what failed is told once
    assert engine.step_number == 0


AT_THE_END = """
import errno, sys, torch, whale
from whale.runtime.checkpoint import contents
from tests.unit.runtime.checkpoint.test_full_disk import BATCH, full, linear
from functools import partial
engine = linear()
engine.save(sys.argv[1] + "/a", wait=False, extra={"best": (1, 2)})
if sys.argv[2] == "full":
    engine.step(BATCH)
    engine.save(sys.argv[1] + "/a")
    contents._bytes_of = partial(full, errno.ENOSPC)
    engine.save(sys.argv[1] + "/b", wait=False)
"""


@pytest.mark.parametrize(("how", "code"), [("well", 0), ("full", 1)])
def test_the_end_of_the_script_waits_for_it(tmp_path: Path, how: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END, str(tmp_path), how], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert ("whale: CheckpointError: " in done.stderr and "the disk is full" in done.stderr) == (how == "full")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    engine = linear()
    assert engine.load(tmp_path / "a") == ({"best": (1, 2)} if how == "well" else None)
    assert engine.step_number == code
