"""What `whale.init` sets: the configuration that later calls of `whale.parallelize` start from."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path

from whale.config import Config, load_config

_SESSION: ContextVar[Config | None] = ContextVar("whale_session", default=None)


def init(config: Config | dict[str, object] | str | Path | None = None) -> Config:
    """Sets the configuration for the engines made from here on; optional.

    Args:
        config: a `Config`, a mapping of ``section.key`` to values, or the path of a recipe. ``config=`` of
            `parallelize` wins over it key by key.

    Raises:
        ConfigError: unknown keys or wrong values.
    """
    settings = load_config(config, environment={})
    _SESSION.set(settings)
    return settings


def resolve_config(config: Config | dict[str, object] | str | Path | None) -> Config:
    """The configuration of one engine, from all its sources."""
    return load_config(config, environment=os.environ, base=_SESSION.get())
