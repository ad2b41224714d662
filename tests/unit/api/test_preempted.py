"""SIGTERM between the parts of a step, and after a save of the script's own."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import whale
from tests.unit.api.test_guards import BATCH, parallelize


def test_gradients_that_wait_are_applied_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize(config={"runtime.save_on_sigterm": str(tmp_path)})
    engine.forward_backward(BATCH)
    signal.raise_signal(signal.SIGTERM)
    engine.forward_backward(BATCH)
    engine.evaluate(BATCH)
    engine.update()
    with pytest.raises(whale.Preempted) as told:
        engine.forward_backward(BATCH)
    assert told.value.code == 143 and told.value.path == str(tmp_path / "step_1")
    assert f"whale: 1 of 1 rank received SIGTERM: saved {tmp_path / 'step_1'}; the run ends with" in capsys.readouterr().err
    before = signal.getsignal(signal.SIGTERM)
    engine.close()
    assert signal.getsignal(signal.SIGTERM) != before, "it ends the process again"
    assert parallelize().load(told.value.path) is None


def test_what_the_script_has_saved_at_the_same_step_stays(tmp_path: Path) -> None:
    engine = parallelize(config={"runtime.save_on_sigterm": str(tmp_path)})
    for step in (1, 2):
        engine.step(BATCH)
        engine.save(tmp_path / f"step_{step}", extra={"step": step})
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(whale.Preempted) as told:
        engine.predict(BATCH)
    engine.close()
    assert parallelize().load(told.value.path) == {"step": 2}


def test_a_script_goes_on_from_the_newest_complete_checkpoint_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = parallelize()
    assert engine.resume(tmp_path / "none") is None and engine.step_number == 0
    for step in (1, 2, 3):
        engine.step(BATCH)
        engine.save(tmp_path / f"step_{step}", extra={"step": step})
    engine.close()
    (tmp_path / "step_3" / "complete.json").unlink()
    another = parallelize()
    assert another.resume(tmp_path) == {"step": 2} and another.step_number == 2
    assert f"whale: resumes after step 2, from {tmp_path / 'step_2'}" in capsys.readouterr().err


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_is_damaged_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    engine = parallelize()
    for step in (1, 2, 3, 4):
        engine.step(BATCH)
        engine.save(tmp_path / f"step_{step}", extra=step)
    engine.close()
    flip(tmp_path / "step_3" / "rank_0.safetensors")
    (tmp_path / "step_4" / "rank_0.safetensors").write_bytes(b"torn")
    another = parallelize()
    with pytest.warns(UserWarning) as said:
        assert another.resume(tmp_path) == 2 and another.step_number == 2
    texts = " ".join(str(each.message) for each in said)
    assert "step_3 is passed over: " in texts and "is damaged" in texts and "step_4, of step 4, is passed over" in texts
    for step in (1, 2):
        flip(tmp_path / f"step_{step}" / "rank_0.safetensors")
    with pytest.raises(whale.CheckpointError, match=r"step_3/rank_0.safetensors is damaged"), pytest.warns(UserWarning):
        another.resume(tmp_path)


def test_what_does_not_fit_is_an_error_although_an_older_one_would(tmp_path: Path) -> None:
    engine = parallelize()
    engine.save(tmp_path / "step_0")
    engine.close()
    other = whale.parallelize(
        torch.nn.Linear(3, 3), loss=lambda output, _: output.sum(), optimizer=partial(torch.optim.SGD, lr=0.1), batch=torch.zeros(2, 3)
    )
    other.step(torch.zeros(2, 3))
    other.save(tmp_path / "step_1")
    other.close()
    with pytest.raises(whale.CheckpointError, match="step_1 is a checkpoint of another model"):
        parallelize().resume(tmp_path)


class Signalled(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that say whether a worker has begun as it was told; torchrun's signals go to the group of a rank."""

    began: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert self.began == [0] and os.getpgid(0) == os.getpid() != os.getppid()
        return {name: value[index] for name, value in BATCH.items()}

    def __len__(self) -> int:
        return len(BATCH["input"])


def test_workers_are_in_no_group_that_a_launcher_ends(tmp_path: Path) -> None:
    engine = parallelize(config={"runtime.save_on_sigterm": str(tmp_path)})
    data = Signalled()
    assert list(engine.loader(data, global_batch_size=4, num_workers=1, worker_init_fn=data.began.append))
    engine.close()
