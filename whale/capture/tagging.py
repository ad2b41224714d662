"""Tags on modules and bare parameters: a module that is made under a scope carries the scope's path in its `__dict__`.

`nn.Module.__init__` is wrapped while a scope is open. Registration hooks would miss root modules and modules without parameters, and
would tag modules that were made elsewhere and passed in; they serve for parameters that such modules register meanwhile.
A tag in `__dict__` survives `deepcopy`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from whale.ir.scope import ScopePath

Init = Callable[..., None]

_TAG = "_whale_scope_path"
_PARAMETER_TAGS = "_whale_parameter_scope_paths"
_lock = threading.Lock()
_depth = 0
_wrapped: tuple[Init, Init] | None = None  # what `nn.Module.__init__` was, and what it was replaced by
_registration: RemovableHandle | None = None


def install(path: Callable[[], ScopePath]) -> None:
    """Wraps `nn.Module.__init__` (nested calls only count); `path` gives the tag of a module or parameter made now."""
    global _depth, _wrapped, _registration
    with _lock:
        if _depth == 0:
            _wrapped = (nn.Module.__init__, _tagging(nn.Module.__init__, path))
            nn.Module.__init__ = _wrapped[1]  # type: ignore[method-assign]
            _registration = register_module_parameter_registration_hook(_tagging_parameters(path))
        _depth += 1


def uninstall() -> None:
    """Undoes one `install`; the last one restores `nn.Module.__init__`.

    If another library has wrapped it meanwhile, our wrapper stays underneath and does nothing while no scope is open.
    """
    global _depth, _wrapped, _registration
    with _lock:
        _depth -= 1
        if _depth == 0 and _wrapped is not None and _registration is not None:
            _registration.remove()
            if nn.Module.__init__ is _wrapped[1]:
                nn.Module.__init__ = _wrapped[0]  # type: ignore[method-assign]
            _wrapped = _registration = None


def _tagging(original: Init, path: Callable[[], ScopePath]) -> Init:
    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if found := path():
            set_tag(self, found)

    return init


def _tagging_parameters(path: Callable[[], ScopePath]) -> Callable[[nn.Module, str, nn.Parameter | None], None]:
    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        found = path()
        if found and parameter is not None and tag_of(module) != found:
            module.__dict__.setdefault(_PARAMETER_TAGS, {})[name] = found

    return register


def retag(module: nn.Module, place: Callable[[ScopePath], ScopePath]) -> None:
    set_tag(module, place(tag_of(module) or ()))
    for name, path in _own_parameter_tags(module).items():
        module.__dict__[_PARAMETER_TAGS][name] = place(path)


def _own_parameter_tags(module: nn.Module) -> dict[str, ScopePath]:
    return dict(module.__dict__.get(_PARAMETER_TAGS, {}))


def parameter_tags(model: nn.Module) -> dict[str, ScopePath]:
    """Full names and scopes of parameters that were registered under another scope than their module was made in."""
    return {
        f"{path}.{name}" if path else name: found
        for path, module in model.named_modules(remove_duplicate=False)
        for name, found in _own_parameter_tags(module).items()
    }


def set_tag(module: nn.Module, path: ScopePath) -> None:
    module.__dict__[_TAG] = path


def tag_of(module: nn.Module) -> ScopePath | None:
    return module.__dict__.get(_TAG)


def effective_tags(model: nn.Module) -> dict[str, ScopePath]:
    """Tags by module path. A default strategy's tag does not count on a module that contains others.

    Ops of such a module stand between TaskGraphs (a residual addition, say) and join their neighbours.
    """
    tags = {}
    for name, module in model.named_modules(remove_duplicate=False):
        path = tag_of(module)
        if path is None:
            continue
        if path[-1].is_default and any(_has_others(inner, path) for inner in module.modules()):
            continue
        tags[name] = path
    return tags


def default_tags(model: nn.Module) -> dict[str, ScopePath]:
    """By module path, the default strategy that was in force where the module was made."""
    paths = ((name, tag_of(module)) for name, module in model.named_modules(remove_duplicate=False))
    return {name: path[:1] for name, path in paths if path is not None and path[0].is_default}


def _has_others(module: nn.Module, path: ScopePath) -> bool:
    return tag_of(module) not in (None, path) or bool(_own_parameter_tags(module))
