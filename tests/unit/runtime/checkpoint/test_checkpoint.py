"""Checkpoints in a world of one: complete or not at all, of this model or refused, and the previous one kept."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from whale.comm import World
from whale.errors import CheckpointError
from whale.ir.graph import TensorSpec
from whale.runtime.checkpoint import contents
from whale.runtime.checkpoint import files as checkpoint_files
from whale.runtime.checkpoint.checkpoint import Extras, load
from whale.runtime.checkpoint.contents import Index
from whale.runtime.checkpoint.files import writing_aside
from whale.runtime.checkpoint.saving import Saving, save
from whale.runtime.state.optimizer_state import OptimizerState

torch.set_num_threads(1)
ALONE = World(0, 1, 0, 1, torch.device("cpu"), timedelta(seconds=60))


def tensors(fill: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.nn.Parameter(torch.full((3, 2), fill)),
        "a.b.weight": torch.full((4,), fill, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "steps": torch.tensor(int(fill)),
        "view": torch.arange(20.0).mul(fill)[::2],
    }


def specs(of: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), (0,) * t.dim()) for name, t in of.items()}


OPTIMIZER = OptimizerState(
    {"a.weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 2), "phase": 7}},
    {"a.weight": {"lr": 0.5, "betas": (0.9, 0.99)}, "a.b.weight": {"lr": 0.1, "betas": (0.9, 0.99)}},
)
EXTRAS = Extras({"step": 3, "scheduler": {"milestones": Counter([4])}, "position": None}, {"random": torch.random.get_rng_state()})


def begin(path: Path, fill: float = 1.0, **changes: Any) -> Saving:
    own = changes.pop("tensors", tensors(fill))
    arguments = {"optimizer": OPTIMIZER, "extras": EXTRAS, "writers": dict.fromkeys(own, 0), "world": ALONE, "plan": '{"plan": 1}'}
    return save(path, tensors=own, **{**arguments, **changes})


def write(path: Path, fill: float = 1.0, **changes: Any) -> None:
    begin(path, fill, **changes).finish()


def read(path: Path, own: dict[str, Tensor] | None = None) -> tuple[dict[str, Tensor], OptimizerState, Extras]:
    own = tensors(0.0) if own is None else own
    optimizer, extras = load(path, tensors=own, specs=specs(own), world=ALONE)
    return own, optimizer, extras


def holds(path: Path, fill: float) -> bool:
    return all(torch.equal(value, tensors(fill)[name]) for name, value in read(path)[0].items())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step_1"
    write(path)
    own, optimizer, extras = read(path)
    assert all(torch.equal(own[name], value) for name, value in tensors().items())
    assert own["a.weight"].requires_grad
    assert torch.equal(optimizer.state["a.weight"]["exp_avg"], torch.ones(3, 2)) and optimizer.state["a.weight"]["phase"] == 7
    assert optimizer.state["a.weight"]["step"] == 3 and optimizer.state.keys() == {"a.weight"}
    assert optimizer.options == OPTIMIZER.options
    assert extras.shared == EXTRAS.shared and torch.equal(extras.own["random"], EXTRAS.own["random"])
    assert (path / "plan.json").read_text() == '{"plan": 1}'
    assert [folder.name for folder in path.parent.iterdir()] == ["step_1"]


def test_what_changes_while_it_is_written_is_saved_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, has_changed, bytes_of = tensors(1.0), Event(), contents._bytes_of

    def bytes_later(value: Tensor) -> memoryview:
        assert has_changed.wait(60)
        return bytes_of(value)

    monkeypatch.setattr(contents, "_bytes_of", bytes_later)
    saving = begin(tmp_path / "c", tensors=own, copies=True)
    with torch.no_grad():
        for value in own.values():
            value.fill_(9)
    assert not (tmp_path / "c").exists()
    has_changed.set()
    saving.finish()
    assert holds(tmp_path / "c", 1.0)


def test_parts_of_others_are_waited_for_until_the_limit(tmp_path: Path) -> None:
    path, world = tmp_path / "c", replace(ALONE, size=3, timeout=timedelta(seconds=0.2))
    with writing_aside(path) as save_id:
        saving = Saving(path, save_id, world, ExitStack())
        saving.start(lambda: saving.write([], Index(save_id, (), {})), lambda: saving.complete(None, None, None))
        with pytest.raises(CheckpointError, match=r"ranks 1, 2 did not write .* within communication\.timeout_seconds \(0\.2\)"):
            saving._done[-1].result()


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "list.txt").write_text("mine")
    write(tmp_path / "torn")
    (tmp_path / "torn" / "rank_0.safetensors").unlink()
    others = {"notes", "list.txt", "torn", "latest"}
    for number, score in enumerate((3.0, 0.5, float("nan"), None, 2.0, 0.5)):
        write(tmp_path / f"step_{number}", score=score)
        (tmp_path / "latest").unlink(missing_ok=True)
        (tmp_path / "latest").symlink_to(f"step_{number}")
    assert len(names(tmp_path)) == 6 + len(others)
    write(tmp_path / "step_6", keep=3)
    assert names(tmp_path) == {"step_6", "step_5", "step_4"} | others
    write(tmp_path / "step_7", keep=1, score=0.75)
    assert names(tmp_path) == {"step_7", "step_5"} | others
    future = time.time() + 1000
    os.utime(tmp_path / "step_5" / "complete.json", (future, future))
    write(tmp_path / "step_8", keep=1, score=float("-inf"))
    assert names(tmp_path) == {"step_8", "step_5"} | others
    with pytest.raises(CheckpointError, match="keep=0 is not a number of checkpoints"):
        write(tmp_path / "step_9", keep=0)
    assert names(tmp_path) == {"step_8", "step_5"} | others


def test_a_newer_one_replaces_the_older_at_the_same_path(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(path, 1.0)
    write(path, 2.0)
    assert holds(path, 2.0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("moment", ["data", "marker"])
def test_a_save_that_fails_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "c"
    write(path, 1.0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    if moment == "data":
        monkeypatch.setattr(contents, "_bytes_of", full)
    else:
        monkeypatch.setattr(checkpoint_files, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(path, 2.0)
    monkeypatch.undo()
    assert names(tmp_path) == {"c"}
    assert holds(path, 1.0)
    write(path, 3.0)
    assert holds(path, 3.0) and names(tmp_path) == {"c"}


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda path: (path / "complete.json").unlink(), "complete.json, which is written last, is missing"),
        (lambda path: (path / "complete.json").write_text("{"), "complete.json is damaged"),
        (lambda path: (path / "index.json").unlink(), r"index\.json is missing"),
        (lambda path: (path / "rank_0.safetensors").unlink(), r"rank_0\.safetensors is missing"),
        (lambda path: (path / "rank_0.safetensors").write_bytes(b"x"), r"rank_0\.safetensors has 1 bytes instead of \d+"),
        (lambda path: (path / "complete.json").write_text(json.dumps({"format": 1, "files": {}})), "it has format 1"),
        (lambda path: shutil.rmtree(path), "no such folder"),
    ],
)
def test_a_half_written_one_is_never_loaded(tmp_path: Path, harm: Any, complaint: str) -> None:
    write(tmp_path / "old")
    write(tmp_path / "new")
    harm(tmp_path / "new")
    own = tensors(0.0)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read(tmp_path / "new", own)
    assert caught.value.hint == f"a complete checkpoint is at {tmp_path / 'old'}"
    assert all(torch.equal(value, tensors(0.0)[name]) for name, value in own.items())


def test_one_of_a_newer_form_says_so(tmp_path: Path) -> None:
    write(tmp_path / "c")
    (tmp_path / "c" / "complete.json").write_text(json.dumps({"format": 9, "files": {}}))
    with pytest.raises(CheckpointError, match=r"c has checkpoint format 9; .* up to 3\n  hint: read it with the version that wrote it"):
        read(tmp_path / "c")


def test_damage_of_the_right_size_is_an_error_too(tmp_path: Path) -> None:
    write(tmp_path / "c")
    data = tmp_path / "c" / "rank_0.safetensors"
    data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors is damaged \(.*weight.*: .*header"):
        read(tmp_path / "c")


def test_the_newest_of_several_is_the_hint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name)
    now = time.time()

    os.utime(tmp_path / "one" / "complete.json", (now + 10, now + 10))
    with pytest.raises(CheckpointError, match=r"a complete checkpoint is at .*one"):
        read(tmp_path / "three")
    with pytest.raises(CheckpointError, match="there is no complete checkpoint next to it"):
        read(tmp_path / "elsewhere" / "three")


def test_the_first_differences_to_another_model_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "c")
    other = tensors(0.0)
    del other["empty"]
    other["new.weight"] = torch.zeros(2)
    other["a.weight"] = torch.zeros(2, 3)
    other["a.b.weight"] = torch.zeros(4)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "c", other)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "4 differences" in lines[0]
    assert lines[1:5] == [
        "new.weight is not in the checkpoint",
        "empty is not in the model",
        "a.weight is float32[3, 2] in the checkpoint, float32[2, 3] in the model",
        "a.b.weight is bfloat16[4] in the checkpoint, float32[4] in the model",
    ]
    with pytest.raises(
        CheckpointError,
        match=r"c is a checkpoint of another model \(16 differences\):\n  new\.weight (?s:.*)\n  more\.8 is not .*\n  and 6 more\n",
    ):
        read(tmp_path / "c", other | {f"more.{number}": torch.zeros(1) for number in range(12)})


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "step_1")
    with pytest.raises(CheckpointError, match=r"runs holds 'step_1', which is not part of a checkpoint"):
        write(tmp_path / "runs")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="which is not part of a checkpoint"):
        write(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert (tmp_path / "file").read_text() == "mine" and holds(tmp_path / "runs" / "step_1", 1.0)


def test_a_rank_reads_its_own_part_only(tmp_path: Path) -> None:
    write(tmp_path / "c")
    part = {"a.b.weight": tensors(0.0)["a.b.weight"]}
    optimizer, _ = load(tmp_path / "c", tensors=part, specs=specs(tensors()), world=ALONE)
    assert part["a.b.weight"].eq(1).all() and optimizer.state == {} and optimizer.options.keys() == {"a.b.weight"}
