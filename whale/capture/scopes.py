"""`replicate` and `split` as the user writes them: around construction, in `forward`, as decorators, nested.

A `with` cannot know where it stands, so it does both:
    construction   modules that are made inside carry its path (`tagging`)
    forward        ops that are captured inside carry its path (`torch.fx.traceback.annotate`)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.fx.traceback
from torch import nn

import whale.capture.tagging as tagging
from whale.capture.source import user_line
from whale.errors import AnnotationError
from whale.ir.scope import Scope, ScopeKind, ScopePath, SourceLine

T = TypeVar("T")

PATH_KEY = "whale.scopes"
DEFAULT_KEY = "whale.default_scope"
_FORWARD_BASE = 1 << 40  # entries of a capture are numbered after all entries of construction

_entries = itertools.count()
_open: ContextVar[ScopePath] = ContextVar("whale_open_scopes", default=())
_default: ContextVar[Scope | None] = ContextVar("whale_default_scope", default=None)


@dataclass
class ForwardScopes:
    entered: list[Scope] = field(default_factory=list)  # in order, numbered from a fixed base, so that equal captures give equal numbers
    # the scope of a decorated method per (decorator, module): repeated calls of one module are one TaskGraph
    of_module: dict[tuple[int, int], Scope] = field(default_factory=dict)

    def number(self) -> int:
        return _FORWARD_BASE + len(self.entered)


_capture: ContextVar[ForwardScopes | None] = ContextVar("whale_forward_scopes", default=None)


class Annotation:
    """A scope that is not entered yet: a context manager, and a decorator of functions and module classes."""

    def __init__(self, kind: ScopeKind, device_count: object, name: object, axis: object, where: SourceLine | None) -> None:
        self._kind = kind
        self._device_count = _checked_count(kind, device_count, where)
        self._name = _checked_text(kind, "name", name, where)
        self._axis = _checked_text(kind, "axis", axis, where)
        self._where = where
        self._opened: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Annotation:
        opened = _opened(self.entry())
        opened.__enter__()
        self._opened.append(opened)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.pop().__exit__(*exception)

    def __call__(self, target: T) -> T:
        """Decorates a function, a method or a module class; each call (of a class: each construction) enters the scope."""
        if inspect.isclass(target) and issubclass(target, nn.Module):
            target.__init__ = self._wrap(target.__init__, per_module=False)  # type: ignore[method-assign]
            return target
        if isinstance(target, nn.Module) or not callable(target):
            raise AnnotationError(
                f"{self._kind} decorates functions and module classes, not {type(target).__name__}",
                where=user_line(),
                hint="use whale.tag(module, scope) for a module that exists",
            )
        return self._wrap(target, per_module=getattr(target, "__name__", "") != "__init__")  # type: ignore[return-value]

    def entry(self, is_default: bool = False) -> Scope:
        capture = _capture.get()
        number = next(_entries) if capture is None else capture.number()
        scope = Scope(self._kind, self._device_count, self._name, self._axis, self._where, number, is_default)
        if capture is not None:
            capture.entered.append(scope)
        return scope

    def _wrap(self, function: Callable[..., Any], per_module: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with _opened(self._entry_of(args) if per_module else self.entry()):
                return function(*args, **kwargs)

        return inside

    def _entry_of(self, args: tuple[Any, ...]) -> Scope:
        capture = _capture.get()
        if capture is None or not args or not isinstance(args[0], nn.Module):
            return self.entry()
        key = (id(self), id(vars(args[0])))  # while it traces, torch calls modules through proxies that share their dict
        if key not in capture.of_module:
            capture.of_module[key] = self.entry()
        return capture.of_module[key]


def replicate(device_count: int | None = None, name: str | None = None) -> Annotation:
    """Every device holds the parameters; the batch is divided.

    Args:
        device_count: devices, or copies of what the scope encloses; None lets the planner choose.
        name: entries with one name are one TaskGraph.

    Raises:
        AnnotationError: a device count that is no positive integer, or a name that is no text.
    """
    return Annotation("replicate", device_count, name, None, user_line())


def split(device_count: int | None = None, name: str | None = None, axis: str | None = None) -> Annotation:
    """The parameters are divided along axes that the planner chooses, or along `axis`.

    Args:
        device_count: devices; None lets the planner choose.
        name: entries with one name are one TaskGraph.
        axis: the logical axis to cut.

    Raises:
        AnnotationError: a device count that is no positive integer, or a name that is no text.
    """
    return Annotation("split", device_count, name, axis, user_line())


def set_default_strategy(scope: Annotation | None) -> None:
    """The scope of modules and ops under no other; calling it again starts a new TaskGraph, None ends it."""
    if scope is not None and not isinstance(scope, Annotation):
        raise AnnotationError(
            f"set_default_strategy takes a scope or None, not {type(scope).__name__}", where=user_line(), hint="pass whale.replicate(...)"
        )
    entry = None if scope is None else scope.entry(is_default=True)
    before, _ = _default.get(), _default.set(entry)
    if _capture.get() is not None:
        _annotate_default()
    elif (before is None) != (entry is None):
        tagging.install(current_path) if entry is not None else tagging.uninstall()


def tag(module: nn.Module, scope: Annotation) -> nn.Module:
    """Puts an existing module, with all its submodules, under a scope. Scopes that it carries stay inside the new one.

    Returns:
        The module itself.

    Raises:
        AnnotationError: the scope is a `split` and the module carries scopes; or an argument has the wrong type.
    """
    if not isinstance(module, nn.Module) or not isinstance(scope, Annotation):
        raise AnnotationError(
            f"whale.tag takes a torch.nn.Module and a scope, not {type(module).__name__} and {type(scope).__name__}",
            hint="whale.tag(model.head, whale.split(2))",
        )
    outer = _nested(_open.get(), scope.entry())
    default = _default.get()

    def placed(path: ScopePath) -> ScopePath:
        around = tuple(each for each in path if each.is_default) or (() if default is None else (default,))
        own = functools.reduce(_nested, (each for each in path if not each.is_default), outer)
        return under_default(own, around)

    for inner in module.modules():
        tagging.retag(inner, placed)
    return module


def current_path() -> ScopePath:
    """The path for a module made now; empty under no scope and no default."""
    path, default = _open.get(), _default.get()
    return under_default(path, () if default is None else (default,))


def under_default(path: ScopePath, default: ScopePath) -> ScopePath:
    """The scopes that count under a default strategy: a split keeps it, since it runs on its devices; others replace it."""
    return (*default, *path) if not path or path[0].kind == "split" else path


@contextmanager
def capturing() -> Iterator[ForwardScopes]:
    """Numbers the scopes of one capture from a fixed base and lets them annotate ops; scopes open outside do not count."""
    scopes = ForwardScopes()
    tokens = (_capture.set(scopes), _open.set(()), _default.set(None))
    had_custom = "custom" in torch.fx.traceback.current_meta
    try:
        yield scopes
    finally:
        for variable, token in zip((_capture, _open, _default), tokens, strict=True):
            variable.reset(token)  # type: ignore[attr-defined]
        if not had_custom:
            torch.fx.traceback.current_meta.pop("custom", None)


def default_scope() -> Scope | None:
    return _default.get()


def renumber(paths: set[ScopePath]) -> dict[ScopePath, ScopePath]:
    """Paths with their entries numbered 0, 1, ... in order of entry, whatever else the process has entered."""
    entries = sorted({scope.entry for path in paths for scope in path})
    rank = {entry: position for position, entry in enumerate(entries)}
    return {path: tuple(replace(scope, entry=rank[scope.entry]) for scope in path) for path in paths}


@contextmanager
def _opened(scope: Scope) -> Iterator[None]:
    before = _open.get()
    path = _nested(before, scope)
    tagging.install(current_path)
    _open.set(path)
    try:
        with nullcontext() if _capture.get() is None else torch.fx.traceback.annotate({PATH_KEY: path}):
            yield
    finally:
        _open.set(before)
        tagging.uninstall()
        if _capture.get() is not None:
            _annotate_default()


def _annotate_default() -> None:
    custom = torch.fx.traceback.current_meta.setdefault("custom", {})
    if _default.get() is None:
        custom.pop(DEFAULT_KEY, None)
    else:
        custom[DEFAULT_KEY] = _default.get()


def _nested(path: ScopePath, scope: Scope) -> ScopePath:
    if path and path[-1].kind != "replicate":
        outer = path[-1]
        raise AnnotationError(
            f"{scope} is inside {outer} (from {outer.where}); only replicate may enclose other scopes",
            where=scope.where,
            hint="put the replicate outside and the split inside",
        )
    return (*path, scope)


def _checked_count(kind: ScopeKind, device_count: object, where: SourceLine | None) -> int | None:
    if device_count is None:
        return None
    try:
        count = None if isinstance(device_count, bool) else operator.index(device_count)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or count < 1:
        hint = f"write {kind}() to decorate" if callable(device_count) else "leave it out to let the planner choose"
        raise AnnotationError(f"device_count={device_count!r} of {kind} is not a positive integer", where=where, hint=hint)
    return int(count)


def _checked_text(kind: ScopeKind, argument: str, value: object, where: SourceLine | None) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise AnnotationError(f"{argument}={value!r} of {kind} is not a non-empty string", where=where)
