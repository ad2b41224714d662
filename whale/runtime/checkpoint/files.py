"""The folder of a checkpoint: written aside, marked complete last, then renamed, so that a partial one is never read.

step_100.{save_id}.incomplete/   while it is written, with a file "writing" that rank 0 has locked; rank_0.json: the part of rank 0
step_100.{save_id}.previous/     what stood at the path before, until the new one does
step_100/                        complete: rank_0.safetensors ... index.json plan.json complete.json

The identity of a save is in its folders' names: two saves never write to one folder, and what has no such name is not ours to remove.
A save that is killed leaves "writing" behind, unlocked: the next save in the same place cleans up. Locks are of open files (flock), not
of processes: a process may write several checkpoints at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from whale.errors import CheckpointError
from whale.ir.serialization import read_json

MARKER, INDEX, PLAN, WRITING = "complete.json", "index.json", "plan.json", "writing"
ASIDE, PREVIOUS = "incomplete", "previous"
FORMAT = 3
STEP_KEY = "extra.step"
"""The key of plain data that says how many steps are done."""

_OURS = re.compile(rf"(?P<name>.+)\.[0-9a-f]{{32}}\.(?P<ending>{ASIDE}|{PREVIOUS})", re.DOTALL)
_PART = re.compile(r"rank_\d+\.(safetensors|json|part|failed)")
_TRIES = 10
_MISREAD = (ValueError, KeyError, TypeError, AttributeError)


def real(path: Path) -> Path:
    """The folder that a path means, where it is a link: that is what is replaced, and not the link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def aside(path: Path, save_id: str) -> Path:
    """Where a checkpoint is written before it is complete."""
    path = real(path)
    return path.with_name(f"{path.name}.{save_id}.{ASIDE}")


def previous(path: Path, save_id: str) -> Path:
    """Where the checkpoint that stood at a path is kept until the new one does."""
    return path.with_name(f"{path.name}.{save_id}.{PREVIOUS}")


def _beside(path: Path, ending: str) -> list[Path]:
    """The folders that saves to a path have made."""
    found = _own_folders(path.parent, ending)
    return sorted(each for each, name in found.items() if name == path.name)


def _own_folders(folder: Path, ending: str) -> dict[Path, str]:
    """The folders that saves have made beside their paths, and the names of these paths."""
    with suppress(OSError):
        entries = {each: _OURS.fullmatch(each.name) for each in folder.iterdir()}
        return {
            each: match["name"]
            for each, match in entries.items()
            if match is not None and match["ending"] == ending and each.is_dir() and not each.is_symlink()
        }
    return {}


@contextmanager
def writing_aside(path: Path) -> Iterator[str]:
    """Makes an empty folder aside while a checkpoint is written, and gives the identity of the save; what is left there is removed.

    Raises:
        CheckpointError: something that is no checkpoint stands at the path, or another save is writing to it.
        OSError: it cannot be made.
    """
    path = real(path)
    if path.exists() and not _may_be_replaced(path):
        raise CheckpointError(
            f"{path} holds {next(_contents(path))!r}, which is not part of a checkpoint; a checkpoint needs a folder of its own",
            hint=f"save to {path / 'step_1'}, for example",
        )
    _clean_up(path.parent)
    save_id, lock = _make_locked(path)
    try:
        for other in (*_beside(path, ASIDE), path):
            if other != aside(path, save_id) and (user := _user(other)) is not None:
                raise CheckpointError(
                    f"{path} is being written by another save ({user})",
                    hint="let each run save to a folder of its own; if that run is not wanted, end it first",
                )
        yield save_id
    finally:
        shutil.rmtree(aside(path, save_id), ignore_errors=True)
        os.close(lock)


def _make_locked(path: Path) -> tuple[str, int]:
    """A new folder aside, and the descriptor that holds its lock; another save that cleans up may come between the two."""
    for _ in range(_TRIES):
        folder = aside(path, save_id := uuid4().hex)
        folder.mkdir(parents=True)
        try:
            lock = os.open(folder / WRITING, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            continue
        os.write(lock, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}).encode())
        if _takes_lock(lock) is not False and (folder / WRITING).exists():
            return save_id, lock
        os.close(lock)
    raise CheckpointError(f"{path} cannot be written: what is made beside it is removed at once, {_TRIES} times")


def _takes_lock(descriptor: int) -> bool | None:
    """Whether this open file has the lock now, until it is closed; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _user(folder: Path) -> str | None:
    """Who writes to a folder, where that is known."""
    with suppress(OSError), open(folder / WRITING, "r+b") as file:
        if _takes_lock(file.fileno()) is False:
            try:
                who = json.loads(file.read())
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(who["since"]))
                return f"process {who['pid']} on {who['host']}, since {since}"
            except _MISREAD:
                return "by a process that does not say who it is"
    return None


def _clean_up(folder: Path) -> None:
    """Removes what killed saves have left in a folder: those of living ones are locked."""
    for left in _own_folders(folder, ASIDE):
        with suppress(OSError):
            if not (left / WRITING).exists():  # it is removed already, or made just now: then it is made again
                shutil.rmtree(left)
                continue
            with open(left / WRITING, "r+b") as lock:
                if _takes_lock(lock.fileno()):
                    shutil.rmtree(left)
    for left in folder.glob(f"*/{WRITING}"):
        if _OURS.fullmatch(left.parent.name) is None:
            with suppress(OSError), open(left, "r+b") as lock:
                if _takes_lock(lock.fileno()) and not faults(left.parent):  # killed once it was in its place
                    _finish(left.parent)


def _contents(path: Path) -> Iterator[str]:
    return iter(sorted(os.listdir(path))) if path.is_dir() else iter((path.name,))


def _may_be_replaced(path: Path) -> bool:
    return path.is_dir() and (not any(path.iterdir()) or (path / MARKER).exists())


def complete(path: Path, save_id: str, data_files: set[str], texts: Mapping[str, str], *, score: float | None, step: int | None) -> None:
    """Marks what was written aside as complete and moves it to the path, in place of what stood there.

    Args:
        path: of the checkpoint.
        save_id: what `writing_aside` gave.
        data_files: that ranks have written.
        texts: of the other files, by name.
        score: of the checkpoint among others.
        step: how many steps are done in it; None for one of weights alone.

    Raises:
        OSError: it cannot be written.
    """
    path = real(path)
    folder = aside(path, save_id)
    for name, text in texts.items():
        write_text(folder / name, text)
    sizes = {name: (folder / name).stat().st_size for name in (*sorted(data_files), *texts)}
    checksums = {name: _checksum(folder / name) for name in texts}
    marker = {"format": FORMAT, "files": sizes, "crc32": checksums, "score": score, "step": step}
    write_text(folder / MARKER, json.dumps({**marker, "own_crc32": zlib.crc32(json.dumps(marker).encode())}, indent=1))
    _sync_folder(folder)
    if path.exists():
        path.rename(previous(path, save_id))
    folder.rename(path)
    _sync_folder(path.parent)
    _finish(path)


def keep_newest(path: Path, keep: int) -> None:
    """Removes the complete checkpoints in the folder of a new one, except the newest ``keep`` and the one with the least score.

    Files that the user has put into one stay.

    Raises:
        CheckpointError: one cannot be removed.
    """
    path = real(path)
    markers = {folder: marker for folder, marker in _complete(path.parent).items() if not folder.is_symlink()}
    newest = sorted(markers, key=lambda each: each != path)  # else in their order
    scores = {folder: marker.score for folder, marker in markers.items() if marker.score is not None}
    best = min(scores, key=scores.__getitem__, default=None)
    for folder in newest[keep:]:
        if folder != best and _user(folder) is None:
            try:
                _remove(folder)
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be removed, as keep={keep} asks: {error.strerror or error}") from error


def _finish(path: Path) -> None:
    """Removes what stood at a path before, through a folder that the next save cleans up, and marks the end of the save."""
    for left in _beside(path, PREVIOUS):
        for name in _foreign(left):
            if not os.path.lexists(path / name):
                (left / name).rename(path / name)
        _remove(left, path.name)
    (path / WRITING).unlink(missing_ok=True)


def _foreign(folder: Path) -> list[str]:
    """What the user has put into a checkpoint."""
    own = {MARKER, INDEX, PLAN, WRITING}
    return [name for name in sorted(os.listdir(folder)) if name not in own and not _PART.fullmatch(name)]


def _remove(folder: Path, name: str | None = None) -> None:
    """Removes a checkpoint through a folder that the next save cleans up, and leaves the user's files where they are."""
    by_way_of = aside(folder.with_name(name or folder.name), uuid4().hex)
    if _foreign(folder):
        foreign = {*_foreign(folder)}
        by_way_of.mkdir()
        for each in sorted({*os.listdir(folder)} - foreign, key=lambda each: each != MARKER):  # first what makes it complete
            (folder / each).rename(by_way_of / each)
    else:
        folder.rename(by_way_of)
    shutil.rmtree(by_way_of, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Marker:
    """What ``complete.json`` says."""

    number: int  # of the format
    files: Mapping[str, int]  # the size of every file
    checksums: Mapping[str, int]  # of every text
    score: float | None
    step: int | None


def faults(path: Path) -> list[str]:
    """What a checkpoint lacks; nothing for a complete one. Of its tensors only the files' sizes are checked."""
    try:
        return _faults(path)
    except OSError as error:
        return [f"it cannot be read: {error.strerror or error}"]


def _faults(path: Path) -> list[str]:
    if not path.is_dir():
        return ["there is no such folder"]
    try:
        marker = _marker(path)
    except FileNotFoundError:
        return [f"{MARKER}, which is written last, is missing"]
    except _MISREAD:
        return [f"{MARKER} is damaged"]
    if marker.number != FORMAT:
        return [f"it has format {marker.number}, and this version reads format {FORMAT}"]
    found = []
    for name, size in marker.files.items():
        file = path / name
        if not file.exists():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        elif name in marker.checksums and (checksum := _checksum(file)) != marker.checksums[name]:
            found.append(f"{name} is damaged: its checksum is {checksum:08x}, not {marker.checksums[name]:08x}")
    return found


def score_of(path: Path) -> float | None:
    return _marker(path).score


def sizes_of(path: Path) -> Mapping[str, int]:
    """The sizes of a complete checkpoint's files, by name."""
    return _marker(path).files


def _marker(path: Path) -> _Marker:
    """Raises OSError, or one of `_MISREAD`: it cannot be read, or is damaged."""
    marker = read_json(path / MARKER)
    own, number = marker.pop("own_crc32", None), marker["format"]
    if type(number) is not int:
        raise ValueError
    if number != FORMAT:
        return _Marker(number, {}, {}, None, None)
    if own != zlib.crc32(json.dumps(marker).encode()):
        raise ValueError
    found = _Marker(number, marker["files"], marker["crc32"], marker["score"], marker.get("step"))
    for each in (found.files, found.checksums):
        if not (isinstance(each, Mapping) and all(type(value) is int and Path(name).name == name for name, value in each.items())):
            raise ValueError
    if not (INDEX in found.checksums and _is_number(found.score, float, int) and _is_number(found.step, int)):
        raise ValueError
    if "step" not in marker:  # it was written before markers had it
        step: Any = read_json(path / INDEX)["plain"].get(STEP_KEY)
        found = _Marker(number, found.files, found.checksums, found.score, step if type(step) is int else None)
    return found


def _is_number(value: object, *kinds: type) -> bool:
    return value is None or type(value) in kinds


def standing(path: Path) -> Path:
    """Where the checkpoint of a path lies: aside, where a save was killed while it took its place."""
    if path.exists():
        return path
    return next((each for each in _beside(real(path), PREVIOUS) if not faults(each)), path)


def check_complete(path: Path) -> None:
    """Raises a `CheckpointError` that says what is missing, and where a complete checkpoint lies nearby."""
    with suppress(OSError, *_MISREAD):  # `faults` says which
        if (number := _marker(path).number) > FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {number}; this version of whale reads formats up to {FORMAT}",
                hint="read it with the version that wrote it, or a later one",
            )
    found = faults(path)
    if not found:
        return
    before = [each for each in _beside(path, PREVIOUS) if not faults(each)]
    nearby = next(iter(before or by_age(path.parent)), None)
    hint = f"a complete checkpoint is at {nearby}" if nearby is not None else "there is no complete checkpoint next to it"
    raise CheckpointError(f"{path} is not a complete checkpoint: {'; '.join(found)}", hint=hint)


def by_age(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder: that of the highest step comes first, of equal ones that which was completed last."""
    return list(_complete(folder))


def torn(folder: Path) -> dict[Path, int | None]:
    """The checkpoints in a folder that were complete and are not any more, and their steps."""
    found = {}
    for each in _entries(folder):
        with suppress(OSError, *_MISREAD):
            marker = _marker(each)
            if marker.number == FORMAT and faults(each):
                found[each] = marker.step
    return found


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [each for each in sorted(folder.iterdir()) if not ((match := _OURS.fullmatch(each.name)) and match["ending"] == ASIDE)]
    return []


def _complete(folder: Path) -> dict[Path, _Marker]:
    """As `by_age`; what cannot be read is none."""
    found = {}
    for each in _entries(folder):
        with suppress(OSError, *_MISREAD):
            if not faults(each):
                found[each] = _marker(each), (each / MARKER).stat().st_mtime_ns
    newest = sorted(found, key=lambda each: (-1 if (step := found[each][0].step) is None else step, found[each][1]), reverse=True)
    return {each: found[each][0] for each in newest}
