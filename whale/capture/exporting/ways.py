"""The ways that a model's code may take where it asks a tensor: found by trying them, and held to in every step.

    if labels.max() >= classes:          True:  raises at once, so the captured model goes on as for False,
        raise ValueError                        and every step checks that it is False
    if mask.any():                       True:  cannot be captured; so it goes on as for False, which every step checks:
        places = mask.nonzero()                 what parts of a batch cannot tell for the whole mixes samples (`whale.axes.mixing`)
    if lengths.max().item() > 64: ...    so it is for numbers that are read and compared, and for what the functions of torch ask
                                         in Python, which no mode sees (`whale.capture.exporting.numbers`)
    x = f(x) if x.sum() > 0 else g(x)    both can be captured: what holds is not known, and torch says so

Nothing is computed in a capture, so a way that a tensor decides is not known. But where only one of two ways leads to the
end, that one is what the model does wherever it does anything that can be captured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from whale.capture.source import user_line
from whale.errors import CaptureError, OpFault
from whale.ir.source import SourceLine

T = TypeVar("T")
_MARK = "whale way "
"""Begins the message of the assertion that stands for a read while a model is traced; its number follows."""

_ROWS, _NUMBER = re.compile(r"\bs\d+\b"), re.compile(r"\bz?u[fb]?\d+\b")
"""What torch calls the number of rows, and a number that is not known, in an error's text."""

_Stack = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class Way:
    """What one read of a tensor was taken for.

    Attributes:
        value: what the code was told; None where it was told nothing.
        where: the user's line.
        stack: the code that read, innermost first.
        error: what came of the other value; None where that has not been tried.
        at_once: whether that was raised before any operation, so that the read is a check and nothing else.
    """

    value: bool | None
    where: SourceLine | None
    stack: _Stack
    error: Exception | None = None
    at_once: bool = False

    @property
    def other(self) -> str:
        """What the other value leads to, in words."""
        if not self.at_once:
            return ""
        text = next((line.strip() for line in str(self.error).splitlines() if line.strip()), "")
        text = _NUMBER.sub("a number", _ROWS.sub("rows", text))
        return f"{type(self.error).__name__}: {text}".removesuffix(": ")


def held(condition: Tensor, value: bool, other: str, where: str) -> Tensor:
    """The op of a captured model that stands for a read: in every step the condition must be what the capture took it for.

    Raises:
        OpFault: it is not.
    """
    if bool(condition) != value:
        if other:
            raise OpFault(f"the model refuses this batch ({other})", where=where or None)
        raise OpFault(
            f"a captured model goes one way for every batch (what it asks of a tensor here is {not value}; it was captured for {value})",
            where=where or None,
            hint="use torch.where or masks in place of Python's if on tensors",
        )
    return condition


class Ways:
    """The reads of one trace after the other, and what each was told.

    Attributes:
        last_number: where a number was read of a tensor, the last time.
    """

    def __init__(self) -> None:
        self.last_number: SourceLine | None = None
        self._path: list[Way] = []
        self._num_read = 0
        self._num_ops = 0
        self._is_unanswered = False
        self._checks: dict[_Stack, Way] = {}

    @contextmanager
    def asked(self, is_known: Callable[[Tensor], bool]) -> Iterator[None]:
        """Around a run of the model's code, from its start: answers what it asks of tensors, but for those that are known."""
        self._num_read = 0
        with _Asked(self, is_known):
            yield

    @contextmanager
    def unanswered(self) -> Iterator[None]:
        """Around a read that has been told nothing: torch asks once more, of the number that it makes of it."""
        self._is_unanswered = True
        try:
            yield
        finally:
            self._is_unanswered = False

    def op(self) -> None:
        """An operation runs."""
        self._num_ops += 1

    def read(self, condition: Tensor) -> bool | None:
        """What a read of a condition is told, and has been written down to hold; None where it is told nothing."""
        if self._is_unanswered:
            return None
        if self._num_read == len(self._path):
            stack = _stack()
            known = self._checks.get(stack)
            self._path.append(Way(False, user_line(), stack) if known is None else known)
        way = self._path[self._num_read]
        if way.value is not None:
            truth = condition if condition.dtype == torch.bool else condition.ne(0)
            torch.ops.aten._assert_async.msg(truth, f"{_MARK}{self._num_read}")
        self._num_read += 1
        self._num_ops = 0
        return way.value

    def find(self, attempt: Callable[[], T | Exception]) -> tuple[T | Exception, tuple[Way, ...]]:
        """Traces until each read is told what leads to the end, where only one value does.

        Args:
            attempt: traces once; gives the exception where that fails.

        Returns:
            The trace, or why there is none; and what its reads were told.
        """
        result = self._search(attempt, [])
        ways, number = list(self._path), 0
        while not isinstance(result, Exception) and number < len(ways):
            way = ways[number]
            if way.value is not None and way.error is None:
                other = self._search(attempt, [*ways[:number], replace(way, value=not way.value, error=_TRIED)])
                if isinstance(other, Exception):
                    ways[number] = self._settled(replace(way, error=other, at_once=self._at_once))
                else:  # both lead to the end
                    result = self._search(attempt, [*ways[:number], replace(way, value=None)])
                    ways = list(self._path)
            number += 1
        return result, tuple(ways)

    def _search(self, attempt: Callable[[], T | Exception], start: Sequence[Way]) -> T | Exception:
        """The first trace that comes to its end, of those whose reads start so; else the first error that is no check's."""
        self._path = list(start)
        found: Exception | None = None
        while True:
            self._num_ops = 0
            result = attempt()
            if not isinstance(result, Exception):
                return result
            del self._path[self._num_read :]
            self._at_once = self._num_ops == 0 and bool(self._path)
            if found is None or self._found_at_once:
                found, self._found_at_once = result, self._at_once
            at_once = self._at_once
            while len(self._path) > len(start) and self._path[-1].error is not None:
                self._path.pop()
                at_once = False
            if len(self._path) == len(start) or self._path[-1].value is None:
                self._at_once = self._found_at_once
                return found
            last = self._path.pop()
            self._path.append(self._settled(replace(last, value=not last.value, error=result, at_once=at_once)))

    _at_once = False
    _found_at_once = False

    def _settled(self, way: Way) -> Way:
        """A check is one wherever the same code reads again, as in a loop over layers."""
        if way.at_once:
            self._checks[way.stack] = way
        return way


class _Asked(TorchFunctionMode):
    def __init__(self, ways: Ways, is_known: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._ways, self._is_known = ways, is_known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TRUTHS or func in _NUMBERS:
            read = args[0] if args else kwargs["input"]
            is_truth = func in _TRUTHS or (func == torch.Tensor.item and read.dtype == torch.bool)
            if is_truth and read.numel() == 1 and not self._is_known(read):
                told = self._ways.read(read)
                if told is not None:
                    return told
                with self._ways.unanswered():
                    return func(*args, **kwargs)
            if func in _NUMBERS and not self._is_known(read):
                self._ways.last_number = user_line()
        return func(*args, **kwargs)


_NUMBERS = (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.tolist)
_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
_TRIED = CaptureError("this way is being tried")


def way_of(node: fx.Node, ways: Sequence[Way]) -> Way | None:
    """What a node of a trace stands for a read of; None where it stands for none."""
    if node.target is not torch.ops.aten._assert_async.msg:
        return None
    message = str(node.args[1])
    return ways[int(message.removeprefix(_MARK))] if message.startswith(_MARK) else None


def _stack() -> _Stack:
    """Where the code is that reads, up to where the model, or its loss, is called."""
    found = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != "whale.capture.exporting.wrapper":
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
