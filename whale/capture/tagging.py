"""Tags on modules: while a scope is open, every module that is made carries the scope's path in its `__dict__`.

`nn.Module.__init__` is wrapped for that time. Registration hooks would miss a scope's root modules and modules without
parameters, and would tag modules that were built elsewhere and only passed in. A tag in `__dict__` survives `deepcopy`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from whale.ir.scope import ScopePath

_TAG = "_whale_scope_path"
_lock = threading.Lock()
_depth = 0
_original: Callable[..., None] = nn.Module.__init__
_path: Callable[[], ScopePath] = tuple


def install(path: Callable[[], ScopePath]) -> None:
    """Wraps `nn.Module.__init__`, once however often it is asked for; `path` gives the tag of a module made now."""
    global _depth, _original, _path
    with _lock:
        if _depth == 0 and nn.Module.__init__ is not _tagging_init:
            _original, _path = nn.Module.__init__, path
            nn.Module.__init__ = _tagging_init  # type: ignore[method-assign]
        _depth += 1


def uninstall() -> None:
    """Undoes one `install`; the last one restores `nn.Module.__init__`."""
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0 and nn.Module.__init__ is _tagging_init:
            nn.Module.__init__ = _original  # type: ignore[method-assign]


def _tagging_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _original(self, *args, **kwargs)
    path = _path()
    if path:
        set_tag(self, path)


def set_tag(module: nn.Module, path: ScopePath) -> None:
    """Writes a module's tag."""
    module.__dict__[_TAG] = path


def tag_of(module: nn.Module) -> ScopePath | None:
    """A module's own tag, None if it was made under no scope."""
    return module.__dict__.get(_TAG)


def effective_tags(model: nn.Module) -> dict[str, ScopePath]:
    """Tags by module path. The default strategy's tag does not count on a module that holds others.

    Ops that such a module runs itself stand between TaskGraphs (a residual addition, say) and join
    their neighbours instead.
    """
    tags = {}
    for name, module in model.named_modules(remove_duplicate=False):
        path = tag_of(module)
        if path is None:
            continue
        if path[0].is_default and any(tag_of(inner) not in (None, path) for inner in module.modules()):
            continue
        tags[name] = path
    return tags
