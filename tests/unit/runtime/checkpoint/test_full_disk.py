"""A save that cannot be written in full says why, leaves nothing behind, and keeps what stood at the path."""

from __future__ import annotations

import errno
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


@pytest.mark.parametrize(
    ("where", "number"),
    [("data", errno.ENOSPC), ("marker", errno.EDQUOT), slow("data", errno.EDQUOT), slow("marker", errno.ENOSPC)],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str) -> None:
    engine = whale.parallelize(nn.Linear(2, 1), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH)
    engine.save(tmp_path / "c")
    engine.step(BATCH)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(contents, "_bytes_of", full) if where == "data" else patched.setattr(files, "_write", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            engine.save(tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    engine.load(tmp_path / "c")
    assert engine.step_number == 0
