"""The folder of a checkpoint: written aside, marked complete last, then renamed, so that a partial one is never read.

step_100.incomplete/    while it is written, with a file "writing" that rank 0 has locked; rank_0.json: the part of rank 0 is complete
step_100.previous/      what stood at the path before, until the new one does
step_100/               complete: rank_0.safetensors ... index.json plan.json complete.json

A save that is killed leaves "writing" behind, unlocked: the next save in the same place cleans up. Locks are of open files (flock), not
of processes: a process may write several checkpoints at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from whale.errors import CheckpointError
from whale.ir.serialization import read_json

MARKER, INDEX, PLAN, WRITING = "complete.json", "index.json", "plan.json", "writing"
ASIDE, PREVIOUS = ".incomplete", ".previous"
FORMAT = 3
_MISREAD = (ValueError, KeyError, TypeError, AttributeError)


def aside(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(path.name + ASIDE)


def previous(path: Path) -> Path:
    """Where the checkpoint that stood at a path is kept until the new one does."""
    return path.with_name(path.name + PREVIOUS)


@contextmanager
def writing_aside(path: Path) -> Iterator[None]:
    """Makes an empty folder aside while a checkpoint is written; what is left there in the end is removed.

    Raises:
        CheckpointError: something that is no checkpoint stands at the path.
        OSError: it cannot be made.
    """
    if path.exists() and not _may_be_replaced(path):
        raise CheckpointError(
            f"{path} holds {next(_contents(path))!r}, which is not part of a checkpoint; a checkpoint needs a folder of its own",
            hint=f"save to {path / 'step_1'}, for example",
        )
    shutil.rmtree(aside(path), ignore_errors=True)
    _clean_up(path.parent)
    try:
        aside(path).mkdir(parents=True)
        with open(aside(path) / WRITING, "wb") as lock:
            with suppress(OSError):  # a file system without locks: no cleaning up
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    finally:
        shutil.rmtree(aside(path), ignore_errors=True)


def _clean_up(folder: Path) -> None:
    """Removes what killed saves have left in a folder: those of living ones are locked."""
    for empty in folder.glob(f"*{ASIDE}"):
        with suppress(OSError):
            empty.rmdir()
    for left in folder.glob(f"*/{WRITING}"):
        with suppress(OSError), open(left, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if left.parent.name.endswith(ASIDE):
                shutil.rmtree(left.parent)
            elif not faults(left.parent):  # killed once it was in its place
                _finish(left.parent)


def _contents(path: Path) -> Iterator[str]:
    return iter(sorted(os.listdir(path))) if path.is_dir() else iter((path.name,))


def _may_be_replaced(path: Path) -> bool:
    return path.is_dir() and (not any(path.iterdir()) or (path / MARKER).exists() or (path / ".metadata").exists())


def complete(path: Path, data_files: set[str], texts: Mapping[str, str], score: float | None) -> None:
    """Marks what was written aside as complete and moves it to the path, in place of what stood there.

    Args:
        path: of the checkpoint.
        data_files: that ranks have written.
        texts: of the other files, by name.
        score: of the checkpoint among others.

    Raises:
        OSError: it cannot be written.
    """
    folder = aside(path)
    for name, text in texts.items():
        write_text(folder / name, text)
    sizes = {name: (folder / name).stat().st_size for name in (*sorted(data_files), *texts)}
    checksums = {name: _checksum(folder / name) for name in texts}
    marker = {"format": FORMAT, "files": sizes, "crc32": checksums, "score": score}
    write_text(folder / MARKER, json.dumps({**marker, "own_crc32": zlib.crc32(json.dumps(marker).encode())}, indent=1))
    _sync_folder(folder)
    if path.exists():
        if not faults(path):
            shutil.rmtree(previous(path), ignore_errors=True)
            path.rename(previous(path))
        else:
            shutil.rmtree(path)
    folder.rename(path)
    _sync_folder(path.parent)
    _finish(path)


def keep_newest(path: Path, keep: int) -> None:
    """Removes the complete checkpoints in the folder of a new one, except the newest ``keep`` and the one with the least score.

    Raises:
        CheckpointError: one cannot be removed.
    """
    folders = [folder for folder in path.parent.iterdir() if not folder.is_symlink() and folder.suffix not in (ASIDE, PREVIOUS)]
    newest = sorted(
        (folder for folder in folders if not faults(folder)), key=lambda each: (each == path, _completed_at(each)), reverse=True
    )
    scores = {folder: score for folder in newest if (score := score_of(folder)) is not None}
    best = min(scores, key=scores.__getitem__, default=None)
    for folder in newest[keep:]:
        if folder != best:
            try:
                _remove(folder, aside(folder))
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be removed, as keep={keep} asks: {error.strerror or error}") from error


def _finish(path: Path) -> None:
    """Removes what stood at a path before, through a folder that the next save cleans up, and marks the end of the save."""
    if previous(path).exists():
        _remove(previous(path), aside(path))
    (path / WRITING).unlink(missing_ok=True)


def _remove(folder: Path, by_way_of: Path) -> None:
    (folder / WRITING).touch()
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


def faults(path: Path) -> list[str]:
    """What a checkpoint lacks; nothing for a complete one. Of its tensors only the files' sizes are checked."""
    if not path.is_dir():
        return ["there is no such folder"]
    try:
        number, files, checksums, _ = _marker(path)
    except FileNotFoundError:
        return [f"{MARKER}, which is written last, is missing"]
    except _MISREAD:
        return [f"{MARKER} is damaged"]
    if number != FORMAT:
        return [f"it has format {number}, and this version reads format {FORMAT}"]
    found = []
    for name, size in files.items():
        file = path / name
        if not file.exists():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        elif name in checksums and (checksum := _checksum(file)) != checksums[name]:
            found.append(f"{name} is damaged: its checksum is {checksum:08x}, not {checksums[name]:08x}")
    return found


def score_of(path: Path) -> float | None:
    return _marker(path)[3]


def _marker(path: Path) -> tuple[int, dict[str, int], dict[str, int], float | None]:
    """The format, the size of every file, the checksum of every text, and the score."""
    marker = read_json(path / MARKER)
    own, number = marker.pop("own_crc32", None), marker["format"]
    if number != FORMAT:
        return number, {}, {}, None
    if own != zlib.crc32(json.dumps(marker).encode()):
        raise ValueError
    return number, marker["files"], marker["crc32"], marker["score"]


def _completed_at(path: Path) -> int:
    return (path / MARKER).stat().st_mtime_ns


def standing(path: Path) -> Path:
    """Where the checkpoint of a path lies: aside, where a save was killed while it took its place."""
    return previous(path) if not path.exists() and not faults(previous(path)) else path


def check_complete(path: Path) -> None:
    """Raises a `CheckpointError` that says what is missing, and where a complete checkpoint lies nearby."""
    with suppress(OSError, *_MISREAD):  # `faults` says which
        if (number := _marker(path)[0]) > FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {number}; this version of whale reads formats up to {FORMAT}",
                hint="read it with the version that wrote it, or a later one",
            )
    found = faults(path)
    if not found:
        return
    nearby = previous(path) if not faults(previous(path)) else newest_complete(path.parent)
    hint = f"a complete checkpoint is at {nearby}" if nearby is not None else "there is no complete checkpoint next to it"
    raise CheckpointError(f"{path} is not a complete checkpoint: {'; '.join(found)}", hint=hint)


def newest_complete(folder: Path) -> Path | None:
    """The checkpoint in a folder that was completed last; None where there is none, or no such folder."""
    folders = [each for each in folder.glob("*") if each.is_dir()] if folder.is_dir() else []
    return max((each for each in folders if not faults(each)), key=_completed_at, default=None)
