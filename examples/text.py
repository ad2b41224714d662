"""The source text of the Python standard library found on the machine, as windows of bytes; some files are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

_HELD_OUT = 16  # one file in so many is kept for evaluation
_ELSEWHERE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class SourceText(Dataset[dict[str, Tensor]]):
    """Windows of consecutive bytes: ``{"ids": [context], "targets": [context]}``, int64, targets one byte later.

    Args:
        context: bytes of a window.
        held_out: whether to take the files kept for evaluation, or all others.
        limit: use at most this many bytes.
    """

    def __init__(self, context: int, *, held_out: bool = False, limit: int | None = None) -> None:
        self.context = context
        self.text = torch.frombuffer(bytearray(_read(held_out)[:limit]), dtype=torch.uint8)
        if len(self.text) <= context:
            raise ValueError(f"{len(self.text)} bytes of text are no window of {context} bytes and one more")

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return {"ids": window[:-1], "targets": window[1:]}


def _read(held_out: bool) -> bytes:
    # A file's side depends on its own path only, so that another Python version moves no file across.
    root = Path(sysconfig.get_path("stdlib"))
    return b"\n".join((root / path).read_bytes() for path in sorted(_files(root)) if _is_held_out(path) == held_out)


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _ELSEWHERE]
        yield from (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))


def _is_held_out(path: Path) -> bool:
    return hashlib.sha256(path.as_posix().encode()).digest()[0] % _HELD_OUT == 0
