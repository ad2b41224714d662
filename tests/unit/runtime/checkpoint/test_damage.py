"""Whatever happens to a checkpoint, or to the process that writes it: damage is found, code is not run, and the previous one loads."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.runtime.checkpoint.test_boxes import stored_tensors
from tests.unit.runtime.checkpoint.test_checkpoint import ALONE, holds, read, specs, tensors, write
from whale.errors import CheckpointError
from whale.runtime.checkpoint.checkpoint import Extras, load
from whale.runtime.checkpoint.files import aside, writing_aside
from whale.runtime.state.optimizer_state import OptimizerState

NUM_FLIPS = 12
"""In each file."""


@pytest.mark.parametrize("name", ["rank_0.safetensors", "index.json", "plan.json", "complete.json"])
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c"
    write(path)
    file, keys = path / name, stored_tensors(path)
    sound = file.read_bytes()
    for number in range(NUM_FLIPS):
        flipped = bytearray(sound)
        flipped[number * (len(sound) - 1) // (NUM_FLIPS - 1)] ^= 1 << number % 8
        file.write_bytes(flipped)
        own = tensors(0.0)
        with pytest.raises(CheckpointError) as caught:
            read(path, own)
        assert name in caught.value.message
        assert name != "rank_0.safetensors" or any(key in caught.value.message for key in keys)
        assert all(torch.equal(value, tensors(0.0)[key]) for key, value in own.items())
    file.write_bytes(sound)
    assert holds(path, 1.0)


def in_child(action: Callable[[], None]) -> int:
    """The exit code of a process that does it and ends there and then."""
    if (child := os.fork()) == 0:
        try:
            action()
        except BaseException:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(moment: int, folder: Path, action: Callable[[], None]) -> None:
    """Does something until the files below a folder are touched once too often: then the process ends, and nothing cleans up."""
    left = count(moment, -1)

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.")) and any(str(folder) in str(each) for each in args) and next(left) == 0:
            os._exit(9)

    sys.addaudithook(look)  # for the rest of this process, which is a child
    action()


def test_a_save_may_be_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the system stays
    path, beside, older = tmp_path / "c", tmp_path / "beside", tmp_path / "older"
    for moment in count():
        write(older)
        write(path, 1.0)
        code = in_child(partial(killed_at, moment, tmp_path, partial(write, path, 2.0, copies=True, keep=1)))
        assert holds(path, 1.0) or holds(path, 2.0)
        kept = {"older"} if older.exists() else set()
        assert holds(older, 1.0) if kept else holds(path, 2.0)
        write(beside)
        left = {entry.name for entry in tmp_path.iterdir()} - kept
        assert {re.sub("[0-9a-f]{32}", "ID", name) for name in left} == {"beside", "c" if path.exists() else "c.ID.previous"}
        write(path, 3.0, keep=2)
        assert {entry.name for entry in tmp_path.iterdir()} == {"beside", "c"}
        assert holds(path, 3.0) and not list(tmp_path.glob("*/writing"))
        if code == 0:
            assert not kept
            break
        assert code == 9
    assert moment > 20


def test_what_another_save_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def save_beside() -> None:
        write(tmp_path / "beside")

    with writing_aside(path) as save_id:
        assert in_child(save_beside) == 0
        save_beside()  # as another engine of the same process does
        assert in_child(save_beside) == 0
        assert aside(path, save_id).exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"beside"}


PLAIN = {
    "numbers": (1, -(2**70), 0.1, float("inf"), -0.0, 3 + 4j, True, None, "text \u2603"),
    "nested": [(), [], {}, {"a": (1, [2.5, {"b": None}])}, {3: "three", (1, 2): "pair", None: 0, True: 1}],
    "kinds": (Counter({3: 1}), OrderedDict(b=1, a=2), {1, 2}, torch.Size([2, 3]), np.float32(0.1), np.int64(7)),
    "tensors": [torch.tensor(0.25), {"betas": (torch.tensor([0.9], dtype=torch.bfloat16), 0.99)}],
}
TENSORS = {
    "bf16": torch.randn(7).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
    "long complex": torch.randn(3, dtype=torch.complex128).conj(),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "bytes": torch.get_rng_state(),
    "nan": torch.tensor([0x7FC01234, -1], dtype=torch.int32).view(torch.float32),
    "columns": torch.randn(4, 6).t(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def equal(one: Any, other: Any) -> bool:
    """Alike in every type and bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(equal, one.items(), other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return repr(one) == repr(other)


def test_what_is_kept_survives_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**TENSORS, "tied": TENSORS["columns"], "part": TENSORS["columns"][1:3]}
    state = {name: {"moment": value.roll(1), "step": torch.tensor(2.0)} for name, value in TENSORS.items()}
    optimizer = OptimizerState({**state, "tied": PLAIN}, dict.fromkeys(own, PLAIN))
    write(tmp_path / "c", optimizer=optimizer, extras=Extras({**PLAIN, "step": 1}, {"random": PLAIN}), tensors=own)

    def unpickle(*_: Any, **__: Any) -> None:
        raise AssertionError("something is unpickled")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, unpickle)
    room = {name: torch.zeros_like(value) for name, value in own.items()}
    kept, extras = load(tmp_path / "c", tensors=room, specs=specs(own), world=ALONE)
    assert equal(room, {name: value.resolve_conj() for name, value in own.items()})
    assert {name: equal(dict(kept.state[name]), entries) for name, entries in optimizer.state.items()} == dict.fromkeys(
        optimizer.state, True
    )
    assert equal(dict(kept.options), optimizer.options)
    assert equal(dict(extras.shared), {**PLAIN, "step": 1}) and equal(extras.own["random"], PLAIN)


@pytest.mark.parametrize("thing", [print, {"deep": [object()]}, torch.zeros(2).to_sparse(), torch.float32])
def test_what_is_not_plain_data_is_told_by_its_name(tmp_path: Path, thing: Any) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer\.a\.weight\.odd.* is a .*, which a checkpoint cannot hold"):
        write(tmp_path / "c", optimizer=OptimizerState({"a.weight": {"odd": thing}}))
    assert not list(tmp_path.iterdir())


def test_what_nests_too_deep_is_told_when_it_is_saved(tmp_path: Path) -> None:
    deep: Any = ()
    for _ in range(31):
        deep = {0: (deep)}
    write(tmp_path / "c", extras=Extras({"step": 3, "deep": deep}))
    assert read(tmp_path / "c")[2].shared["deep"] == deep
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"extra\.deep\[0\].* is nested more than 32 deep"):
        write(tmp_path / "c", extras=Extras({"step": 4, "deep": deep}))
