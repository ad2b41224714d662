"""Hooks on the user's modules: a capture calls them once, so whoever counts on a call per step is told."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from whale.capture.source import line_of_function
from whale.errors import first_few, warn


def warn_of_hooks(model: nn.Module) -> None:
    """Warns of forward hooks of the user's own: torch's own (weight norm) are tensor operations alone."""
    forward = list(_hooks(model, "_forward_hooks", "_forward_pre_hooks"))
    if forward:
        warn(
            "forward hooks are called while the model is captured and never again: the tensor operations in them stay in the model, "
            f"nothing else that they do is repeated ({first_few(forward)})"
        )


def _hooks(model: nn.Module, *kinds: str) -> Iterator[str]:
    for name, module in model.named_modules():
        for kind in kinds:
            for hook in getattr(module, kind).values():
                where = line_of_function(hook)
                if where is not None:
                    yield f"{name or type(module).__name__}: {getattr(hook, '__name__', type(hook).__name__)} at {where}"
