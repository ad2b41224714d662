"""The user's own function that a command line names: found, called, and what fails in it told in a word."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from whale.config import did_you_mean
from whale.errors import CaptureError, WhaleError

_WHOLE = "WHALE_DEBUG=1 shows the whole traceback"


def load_function(source: str) -> Callable[..., object]:
    """The function of ``FILE.py:FUNCTION``; the file is run as a module, its folder first on the import path.

    Raises:
        CaptureError: there is no such file, no such function in it, or the file fails.
    """
    name, colon, function = source.rpartition(":")
    path = Path(name)
    if not colon or path.suffix != ".py":
        raise CaptureError(f"expected FILE.py:FUNCTION, model.json or gpt:KEY=VALUE,... (not {source!r})")
    if not path.is_file():
        raise CaptureError(f"there is no file {name}")
    module = _import_file(path)
    found = vars(module).get(function)
    if not callable(found):
        own = [each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise CaptureError(f"{name} has no function {function!r}", hint=did_you_mean(function, own) if own else None)
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles of the file look their module up
    with users_code(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def users_code(path: Path) -> Iterator[None]:
    """Around code of the user's file: what it raises is told in a word, with the last line of the file that led there.

    Raises:
        CaptureError: it has raised something, for which `WHALE_DEBUG=1` shows the whole traceback.
    """
    try:
        yield
    except WhaleError:
        raise
    except Exception as error:
        raise CaptureError(f"{path} fails: {type(error).__name__}: {error}", where=_place_in(path, error), hint=_WHOLE) from error


def _place_in(path: Path, error: Exception) -> str | None:
    """The line of a file where an error was raised, or from where what raised it was called; None where there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    return f"{path}:{lines[-1]}" if lines else None
