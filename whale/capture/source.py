"""The user's line for live frames, tracebacks and torch's stack traces."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

from whale.ir.scope import SourceLine

_NOT_THE_USERS = tuple(str(Path(file).resolve().parent) + os.sep for file in (torch.__file__, str(Path(__file__).parent)))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_line() -> SourceLine | None:
    """The innermost frame of the caller's stack outside whale and torch."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else SourceLine(_shorten(frame.f_code.co_filename), frame.f_lineno)


def line_of_traceback(last: TracebackType | None) -> SourceLine | None:
    """The innermost frame of a traceback outside whale and torch."""
    found = None
    while last is not None:
        file = last.tb_frame.f_code.co_filename
        if is_users(file):
            found = SourceLine(_shorten(file), last.tb_lineno)
        last = last.tb_next
    return found


def line_of_function(function: object) -> SourceLine | None:
    """Where a function (or the function of a partial) is defined; None if it has no code of its own."""
    code = getattr(inspect.unwrap(function.func) if isinstance(function, functools.partial) else function, "__code__", None)
    return SourceLine(_shorten(code.co_filename), code.co_firstlineno) if code is not None and is_users(code.co_filename) else None


def line_of(node: fx.Node) -> SourceLine | None:
    """The innermost user frame of a node's ``stack_trace``."""
    return _line_of_text(node.meta.get("stack_trace"))


@cache
def _line_of_text(text: str | None) -> SourceLine | None:
    for file, line in reversed(_FRAME.findall(text or "")):
        if is_users(file):
            return SourceLine(_shorten(file), int(line))
    return None


def inner_frames(summary: traceback.StackSummary, outermost: str) -> traceback.StackSummary:
    """The user's frames inside the outermost call of `forward` in a file."""
    start = next((index for index, frame in enumerate(summary) if frame.name == "forward" and frame.filename == outermost), len(summary))
    return traceback.StackSummary.from_list([frame for frame in summary[start:] if is_users(frame.filename)])


@cache
def is_users(file: str) -> bool:
    if file.startswith("<") or file.startswith("torch/"):
        return False
    return not str(Path(file).resolve()).startswith(_NOT_THE_USERS)


_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@cache
def is_of_a_library(file: str) -> bool:
    """Whether a file is installed, or generated code."""
    return file.startswith("<") or os.path.realpath(file).startswith(_LIBRARIES)


@cache
def _shorten(file: str) -> str:
    """A path relative to the working directory if it is inside, as compilers print it."""
    inside = Path(file).resolve()
    return str(inside.relative_to(Path.cwd())) if inside.is_relative_to(Path.cwd()) else file
