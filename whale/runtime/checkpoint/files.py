"""The folder of a checkpoint: written aside, marked complete last, then renamed, so that a half one is never read.

step_100.incomplete/    while it is written
step_100.previous/      what stood at the path before, until the new one does
step_100/               complete: __0_0.distcp ... .metadata plan.json complete.json
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from whale.errors import CheckpointError

MARKER = "complete.json"
PLAN = "plan.json"
FORMAT = 2


def aside(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(path.name + ".incomplete")


def previous(path: Path) -> Path:
    """Where the checkpoint that stood at a path is kept until the new one does."""
    return path.with_name(path.name + ".previous")


def prepare(path: Path) -> None:
    """Makes an empty folder aside.

    Raises:
        CheckpointError: something that is no checkpoint stands at the path.
        OSError: it cannot be made.
    """
    if path.exists() and not _may_be_replaced(path):
        raise CheckpointError(
            f"a checkpoint is a folder of its own, and replaces nothing else ({path} holds {next(_contents(path))!r})",
            hint=f"save to {path / 'step_1'}, for one",
        )
    discard(path)
    aside(path).mkdir(parents=True)


def discard(path: Path) -> None:
    """Removes what was written aside."""
    shutil.rmtree(aside(path), ignore_errors=True)


def _contents(path: Path) -> Iterator[str]:
    return iter(sorted(os.listdir(path))) if path.is_dir() else iter((path.name,))


def _may_be_replaced(path: Path) -> bool:
    return path.is_dir() and (not any(path.iterdir()) or (path / MARKER).exists() or (path / ".metadata").exists())


def complete(path: Path, data_files: set[str], plan: str | None) -> None:
    """Marks what was written aside as complete and puts it at the path, in place of what stood there.

    Raises:
        CheckpointError: files that other ranks wrote are not to be seen here.
        OSError: it cannot be written.
    """
    folder = aside(path)
    if plan is not None:
        _write(folder / PLAN, plan)
    unseen = sorted(name for name in data_files if not (folder / name).exists())
    if unseen:
        raise CheckpointError(
            f"a checkpoint must lie where all ranks see it ({path}: rank 0 does not see {', '.join(unseen)})",
            hint="save to a file system that all hosts share",
        )
    sizes = {name: (folder / name).stat().st_size for name in sorted(os.listdir(folder))}
    _write(folder / MARKER, json.dumps({"format": FORMAT, "files": sizes}, indent=1))
    _sync_folder(folder)
    if path.exists():
        if not faults(path):
            shutil.rmtree(previous(path), ignore_errors=True)
            path.rename(previous(path))
        else:
            shutil.rmtree(path)
    folder.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(previous(path), ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def faults(path: Path) -> list[str]:
    """What a checkpoint lacks of being complete; nothing for a complete one."""
    if not path.is_dir():
        return ["there is no such folder"]
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        format_number, files = marker["format"], marker["files"]
    except FileNotFoundError:
        return [f"{MARKER} is missing, which is written last"]
    except (ValueError, KeyError, TypeError):
        return [f"{MARKER} is damaged"]
    if format_number != FORMAT:
        return [f"its format is {format_number}, and this version reads format {FORMAT}"]
    found = []
    for name, size in files.items():
        file = path / name
        if not file.exists():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
    return found


def check_complete(path: Path) -> None:
    """Raises a `CheckpointError` that says what is missing, and where a complete checkpoint lies nearby."""
    found = faults(path)
    if not found:
        return
    nearby = _newest_complete(path)
    hint = f"a complete checkpoint lies at {nearby}" if nearby is not None else "no complete checkpoint lies beside it"
    raise CheckpointError(f"a checkpoint must be complete to be loaded ({path}: {'; '.join(found)})", hint=hint)


def _newest_complete(path: Path) -> Path | None:
    """What the path held before, if that is still there, else the newest complete checkpoint beside it."""
    if not faults(previous(path)):
        return previous(path)
    folders = [folder for folder in path.parent.glob("*") if folder.is_dir()] if path.parent.is_dir() else []
    complete_ones = [folder for folder in folders if not faults(folder)]
    return max(complete_ones, key=lambda folder: (folder / MARKER).stat().st_mtime, default=None)
