"""Models of published runs as graphs, of any size: captured small on the meta device, their blocks repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whale.workloads.repeat import repeat_blocks

if TYPE_CHECKING:
    from whale.workloads.decoder import GPT

__all__ = ["GPT", "repeat_blocks"]


def __getattr__(name: str) -> type[GPT]:
    if name != "GPT":
        raise AttributeError(f"module 'whale.workloads' has no attribute {name!r}")
    from whale.workloads.decoder import GPT  # torch is loaded only where a model is captured

    return GPT
