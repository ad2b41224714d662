"""The configuration: an immutable value made of sections, by the ``section.key`` names a user writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from whale.config.replicas import REPLICAS, ReplicaBlock
from whale.config.sections import Cluster, Communication, Estimate, Gradient, Memory, Pipeline, Planning, Recompute, Runtime, Trace
from whale.config.settings import KEYS, SECTIONS, Setting, check
from whale.errors import raise_faults


@dataclass(frozen=True, init=False)
class Config:
    """All configuration values; ``Config({"pipeline.num_micro_batch": 4})`` sets one and leaves the rest at their defaults,
    and so does ``Config({"pipeline": {"num_micro_batch": 4}})``.

    ``replicas`` stands beside the sections: a list of blocks, one per replica.

    Two configurations are equal when all their values are.

    Attributes:
        explicit: the keys that were set, as opposed to left at their defaults; `load_config` lays these over others.

    Raises:
        ConfigError: an unknown key, or a value that breaks its key's rule; all of them at once.
    """

    pipeline: Pipeline
    cluster: Cluster
    memory: Memory
    gradient: Gradient
    communication: Communication
    runtime: Runtime
    recompute: Recompute
    trace: Trace
    planning: Planning
    estimate: Estimate
    replicas: tuple[ReplicaBlock, ...]
    explicit: frozenset[str] = field(compare=False, repr=False)

    def __init__(self, mapping: Mapping[str, object] | None = None) -> None:
        values, faults = check(Setting(name, value) for name, value in (mapping or {}).items())
        raise_faults(faults)
        for section, kind in SECTIONS.items():
            own = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
            object.__setattr__(self, section, kind(**own))
        object.__setattr__(self, "replicas", values.get(REPLICAS, ()))
        object.__setattr__(self, "explicit", frozenset(values))

    def with_values(self, mapping: Mapping[str, object]) -> Config:
        """A copy with these ``section.key`` values instead of its own.

        Raises:
            ConfigError: as for `Config`.
        """
        own = dict(self.explicit_items())
        changed = Config(mapping)
        return Config({**own, **dict(changed.explicit_items())})

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every ``section.key`` with its value, and ``replicas`` where there are blocks."""
        for name in KEYS:
            section, _, attribute = name.partition(".")
            yield name, getattr(getattr(self, section), attribute)
        if self.replicas:
            yield REPLICAS, self.replicas

    def explicit_items(self) -> Iterator[tuple[str, Any]]:
        """The keys that were set, with their values, in the order of `items`."""
        return ((name, value) for name, value in self.items() if name in self.explicit)

    def __str__(self) -> str:
        """YAML, in the form of a recipe."""
        nested: dict[str, Any] = {}
        for name, value in self.items():
            if name == REPLICAS:
                nested[name] = [block.as_data() for block in value]
                continue
            section, _, attribute = name.partition(".")
            nested.setdefault(section, {})[attribute] = dict(value) if isinstance(value, tuple) else value
        return yaml.safe_dump(nested, sort_keys=False).rstrip()
