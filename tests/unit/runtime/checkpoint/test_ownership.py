"""A save owns what has its identity in its name: other saves, and the user's folders, links and files, are left alone."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.unit.runtime.checkpoint.test_checkpoint import ALONE, EXTRAS, begin, holds, names, write
from tests.unit.runtime.checkpoint.test_damage import in_child, killed_at
from whale.errors import CheckpointError
from whale.runtime.checkpoint import files
from whale.runtime.checkpoint.checkpoint import Extras
from whale.runtime.checkpoint.files import aside, by_age


def at(step: int) -> Extras:
    return replace(EXTRAS, shared={**EXTRAS.shared, "step": step})


def test_a_second_save_to_one_path_is_refused_and_says_who_writes(tmp_path: Path) -> None:
    with files.writing_aside(tmp_path / "c"):
        with pytest.raises(CheckpointError, match=rf"c is being written by another save \(process {os.getpid()} on .*, since 20"):
            write(tmp_path / "c")
        assert in_child(partial(write, tmp_path / "c")) == 2
        assert len(names(tmp_path)) == 1, "its own is there"
    write(tmp_path / "c")
    assert holds(tmp_path / "c", 1.0)


def test_without_locks_two_saves_to_one_path_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(*_: object) -> None:
        raise OSError("Operation not supported")

    monkeypatch.setattr("fcntl.flock", unlocked)
    path, two = tmp_path / "c", replace(ALONE, size=2)
    with files.writing_aside(path) as one, files.writing_aside(path) as other:
        assert one != other and len(names(tmp_path)) == 2 and two.size == 2
        for save_id in (one, other):
            files.write_text(aside(path, save_id) / "rank_0.json", save_id)
        files.complete(path, other, set(), {"index.json": other}, score=None, step=1)
        assert (aside(path, one) / "rank_0.json").read_text() == one
        files.complete(path, one, set(), {"index.json": one}, score=None, step=1)
        assert (path / "index.json").read_text() == (path / "rank_0.json").read_text() == one
    assert names(tmp_path) == {"c"}


def test_folders_and_files_of_the_user_stay(tmp_path: Path) -> None:
    mine = tmp_path / "a.incomplete"
    for folder in (mine, tmp_path / "empty.incomplete", tmp_path / "c.previous", tmp_path / f"c.{'0' * 31}.incomplete"):
        folder.mkdir()
    (mine / "writing").touch()
    (mine / "novel.txt").write_text("chapter 1")
    before = names(tmp_path)
    write(tmp_path / "a")
    write(tmp_path / "c")
    assert names(tmp_path) == before | {"a", "c"} and names(mine) == {"writing", "novel.txt"}
    (tmp_path / "c" / "notes.txt").write_text("good")
    (tmp_path / "c" / "plots").mkdir()
    write(tmp_path / "c", 2.0)
    assert holds(tmp_path / "c", 2.0) and (tmp_path / "c" / "notes.txt").read_text() == "good" and (tmp_path / "c" / "plots").is_dir()
    write(tmp_path / "d", extras=at(9), keep=1)
    assert names(tmp_path / "c") == {"notes.txt", "plots"} and names(tmp_path) == before | {"c", "d"}
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"holds '\.metadata', which is not part of a checkpoint"):
        write(tmp_path / "torch")


def test_a_save_through_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    write(tmp_path / "step_1")
    link = tmp_path / "latest"
    link.symlink_to("step_1")
    for fill in (2.0, 3.0):
        write(link, fill, keep=1)
        assert link.is_symlink() and holds(tmp_path / "step_1", fill) and holds(link, fill)
        assert names(tmp_path) == {"latest", "step_1"}


def test_what_keep_removes_may_be_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    write(tmp_path / "new", extras=at(9))
    write(sound := tmp_path / "sound")
    for moment in count():
        shutil.copytree(sound, tmp_path / "old", dirs_exist_ok=True)
        code = in_child(partial(killed_at, moment, tmp_path / "old", partial(files.keep_newest, tmp_path / "new", 1)))
        shutil.copytree(tmp_path / "new", sound, dirs_exist_ok=True) if not sound.exists() else None
        write(tmp_path / "another" / "c")
        write(tmp_path / "beside", extras=at(1))
        assert {name for name in names(tmp_path) if "incomplete" in name} == set()
        if code == 0:
            break
    assert moment > 3


def test_the_newest_is_that_of_the_highest_step_whatever_the_files_times_are(tmp_path: Path) -> None:
    for number, step in enumerate((7, 30, 100)):
        write(tmp_path / f"step_{step}", extras=at(step))
        os.utime(tmp_path / f"step_{step}" / "complete.json", (1e9 - number, 1e9 - number))
    assert [path.name for path in by_age(tmp_path)] == ["step_100", "step_30", "step_7"]
    write(tmp_path / "step_101", extras=at(101), keep=2)
    assert names(tmp_path) == {"step_101", "step_100"}


def test_what_cannot_be_read_stops_neither_the_choice_nor_the_removal(tmp_path: Path) -> None:
    for name in ("marker", "loop"):
        (tmp_path / name).mkdir()
    (tmp_path / "marker" / "complete.json").mkdir()
    (tmp_path / "loop" / "complete.json").symlink_to("complete.json")
    write(tmp_path / "old", extras=at(1))
    write(tmp_path / "new", extras=at(2), keep=1)
    assert names(tmp_path) == {"marker", "loop", "new"} and by_age(tmp_path) == [tmp_path / "new"]
    with pytest.raises(CheckpointError, match=r"marker is not a complete checkpoint: it cannot be read: Is a directory"):
        holds(tmp_path / "marker", 1.0)


def test_parts_are_of_the_save_that_completes_them(tmp_path: Path) -> None:
    saving = begin(tmp_path / "c")
    saving.finish()
    assert saving.save_id in (tmp_path / "c" / "index.json").read_text()
