"""Models of published runs as graphs, of any size: captured small on the meta device, their blocks repeated."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from whale.workloads.repeat import count_blocks, repeat_blocks

if TYPE_CHECKING:
    from whale.workloads.decoder import GPT, gpt

__all__ = ["GPT", "count_blocks", "gpt", "repeat_blocks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'whale.workloads' has no attribute {name!r}")
    return getattr(import_module("whale.workloads.decoder"), name)  # torch is loaded only where a model is captured
