"""Whale trains PyTorch models on the GPUs people really have.

Names are loaded when they are first used, so that planning works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whale import workloads
    from whale.api import Engine, init, parallelize
    from whale.axes import register_rule
    from whale.capture import replicate, set_default_strategy, split, tag
    from whale.config import Config
    from whale.errors import (
        AnnotationError,
        BatchError,
        CaptureError,
        CheckpointError,
        ClusterError,
        ConfigError,
        InitializationError,
        PlanError,
        Preempted,
        RuntimeFault,
        ScheduleError,
        WhaleError,
    )

__version__ = "0.1.0"

__all__ = [
    "AnnotationError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "Config",
    "ConfigError",
    "Engine",
    "InitializationError",
    "PlanError",
    "Preempted",
    "RuntimeFault",
    "ScheduleError",
    "WhaleError",
    "init",
    "parallelize",
    "register_rule",
    "replicate",
    "set_default_strategy",
    "split",
    "tag",
    "workloads",
]

_HOMES = {
    "Config": "whale.config",
    "Engine": "whale.api",
    "init": "whale.api",
    "parallelize": "whale.api",
    "register_rule": "whale.axes",
    "replicate": "whale.capture",
    "set_default_strategy": "whale.capture",
    "split": "whale.capture",
    "tag": "whale.capture",
}


def __getattr__(name: str) -> Any:
    if name == "workloads":
        return import_module("whale.workloads")
    home = _HOMES.get(name, "whale.errors" if name in __all__ else None)
    if home is None:
        raise AttributeError(f"module 'whale' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
