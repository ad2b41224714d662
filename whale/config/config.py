"""The configuration: an immutable value made of sections, with the ``section.key`` names that a user writes.

Precedence: environment > recipe file > ``config=`` > ``whale.init`` > defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import whale.config.sections as sections
from whale.config.elsewhere import foreign_key
from whale.config.keys import did_you_mean, nearest
from whale.config.replicas import PLAN, REPLICAS, ReplicaBlock
from whale.config.sections import EPL_KEYS, KEYS, OF_THE_PAPER, SECTIONS
from whale.config.settings import Setting, check, expand, from_text, hint_for_key, is_section
from whale.config.strict_yaml import Document, parse_yaml, read_yaml
from whale.errors import ConfigError, WhaleError, first_few, raise_faults
from whale.units import format_bytes


@dataclass(frozen=True, init=False)
class Config:
    """All configuration values; equal if all values are.

    ``Config({"pipeline.num_micro_batch": 4})``, or ``Config({"pipeline": {"num_micro_batch": 4}})``, sets one and leaves the rest at their
    defaults. ``replicas`` stands next to the sections: a list of blocks, one per replica.

    Attributes:
        explicit: the keys that were set; `load_config` lays these over others.

    Raises:
        ConfigError: an unknown key, or a value that breaks its key's rule; all of them at once.
    """

    pipeline: sections.PipelineSettings
    cluster: sections.ClusterSettings
    memory: sections.MemorySettings
    precision: sections.PrecisionSettings
    gradient: sections.GradientSettings
    communication: sections.CommunicationSettings
    runtime: sections.RuntimeSettings
    recompute: sections.RecomputeSettings
    trace: sections.TraceSettings
    planning: sections.PlanningSettings
    estimate: sections.EstimateSettings
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
        """A copy with these ``section.key`` values instead of its own. Raises ConfigError as `Config`."""
        own = dict(self.explicit_items())
        changed = Config(mapping)
        return Config({**own, **dict(changed.explicit_items())})

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every ``section.key`` with its value, and ``replicas`` if there are blocks."""
        for name in KEYS:
            section, _, attribute = name.partition(".")
            yield name, getattr(getattr(self, section), attribute)
        if self.replicas:
            yield REPLICAS, self.replicas

    def explicit_items(self) -> Iterator[tuple[str, Any]]:
        """The keys that were set, with their values, in the order of `items`."""
        yield from ((name, value) for name, value in self.items() if name in self.explicit)
        if REPLICAS in self.explicit and not self.replicas:  # taken back
            yield REPLICAS, self.replicas

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


PREFIX = "WHALE_"
RECIPE_VARIABLE = "WHALE_RECIPE"

# a Config, a mapping of ``section.key`` to values or of sections to mappings, a recipe file, or nothing
Source = Config | Mapping[str, object] | str | Path | None


def load_config(source: Source, *, environment: Mapping[str, str], base: Config | None = None) -> Config:
    """The configuration that results from all its sources.

    Precedence: an environment variable (``WHALE_PIPELINE_NUM_MICRO_BATCH=4``); the recipe that the environment variable ``WHALE_RECIPE``
    names (``whale run --recipe`` sets it); `source`; `base`; the defaults.

    Args:
        source: the user's ``config=``.
        environment: usually ``os.environ``.
        base: the user's ``whale.init``.

    Raises:
        ConfigError: unknown keys, wrong values, unreadable files; those of all sources at once.
    """
    faults: list[WhaleError] = []
    values: dict[str, object] = dict(base.explicit_items()) if base is not None else {}
    for settings in _sources(source, environment, faults):
        found, wrong = check(settings)
        values |= found
        faults += wrong
    raise_faults(faults)
    return Config(values)


def _sources(source: Source, environment: Mapping[str, str], faults: list[WhaleError]) -> Iterable[list[Setting]]:
    """The settings of each source, the weakest first; files that cannot be read become faults."""
    for entry, place in ((source, None), (environment.get(RECIPE_VARIABLE) or None, f"environment variable {RECIPE_VARIABLE}")):
        try:
            yield _settings(entry, faults)
        except ConfigError as fault:
            faults.append(ConfigError(fault.message, where=fault.where or place, hint=fault.hint))
    yield from_environment(environment)


def read_plan(path: str | Path) -> dict[str, object]:
    """The values of a configuration in a written plan: its file has the content of a recipe's ``plan``, below that word or alone.

    Raises:
        ConfigError: an unreadable file, unknown keys, wrong values; all of them at once.
    """
    document = read_yaml(path)
    data, way = document.data, tuple[str, ...]()
    if isinstance(data, dict) and PLAN in data:  # as in a recipe
        if others := [section for section in data if section != PLAN]:
            message = f"a plan's file has {first_few(others)} beside {PLAN}: it is a recipe"
            raise ConfigError(message, where=document.place(others[0]), hint=f"--recipe {path}, or config={str(path)!r}")
        data, way = data[PLAN], (PLAN,)
    values, faults = check([Setting(PLAN, data, document.place(*way), partial(document.place, *way))])
    raise_faults(faults)
    return values


def _settings(source: Source, faults: list[WhaleError]) -> list[Setting]:
    if source is None:
        return []
    if isinstance(source, Config):
        return [Setting(name, value) for name, value in source.explicit_items()]
    if isinstance(source, (str, Path)):
        return _recipe(source, faults)
    if isinstance(source, Mapping):
        return [Setting(name, value) for name, value in source.items()]
    raise ConfigError(f"config= is {type(source).__name__}, not a whale.Config, a mapping or a recipe file")


def from_environment(environment: Mapping[str, str]) -> list[Setting]:
    """The settings among environment variables.

    ``WHALE_SECTION_KEY`` with a known section is a setting, known or not. Variables that nearly spell one count too, so that a typo is an
    error. All others are ignored.
    """
    names = {variable_of(name): name for name in (*KEYS, *(entry.name for entry in EPL_KEYS))}
    settings = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == RECIPE_VARIABLE:
            continue
        written = next((name for name in (REPLICAS, PLAN) if variable == variable_of(name)), None)
        if written is not None:
            where = f"environment variable {variable}"
            settings.append(Setting(written, parse_yaml(text, where).data, where))
            continue
        name = names.get(variable)
        section, _, attribute = variable.removeprefix(PREFIX).lower().partition("_")
        if name is None and ((section in SECTIONS and attribute) or nearest(variable, names, cutoff=0.92)):
            name = f"{section}.{attribute}"
        if name is not None:
            value = from_text(KEYS[name], text) if name in KEYS else text
            settings.append(Setting(name, value, f"environment variable {variable}"))
    return settings


def variable_of(name: str) -> str:
    """The environment variable of a key: ``pipeline.num_stages`` is ``WHALE_PIPELINE_NUM_STAGES``."""
    return PREFIX + name.replace(".", "_").upper()


def _recipe(path: str | Path, faults: list[WhaleError]) -> list[Setting]:
    """The settings of a recipe: sections of keys, and values for one key, as ``cluster: FILE`` and ``recompute: auto``."""
    document = read_yaml(path)
    if document.data is None:
        return []
    if not isinstance(document.data, dict):
        raise ConfigError("the recipe is not a mapping of sections such as 'pipeline:'", where=document.place())
    settings: list[Setting] = []
    for section, content in document.data.items():
        try:
            settings += _section(document, section, content)
        except ConfigError as fault:
            faults.append(fault)
    return [_relative_to(path, setting) for setting in settings]


def _section(document: Document, section: str, content: object) -> Iterable[Setting]:
    where = document.place(section)
    if section in (REPLICAS, PLAN):
        return [Setting(section, content, where, partial(document.place, section))]
    if foreign_key(section) is not None and section not in SECTIONS and not isinstance(content, dict):
        return [Setting(section, content, where)]
    if section not in OF_THE_PAPER and not is_section(section):
        hint = did_you_mean(section, (*SECTIONS, REPLICAS, PLAN))
        if section.partition(".")[0] in SECTIONS:
            head, _, tail = section.partition(".")
            hint = f"write '{head}:' and, indented below it, '{tail}: ...'" if section in KEYS else hint_for_key(section)
        raise ConfigError(f"unknown section {section!r}", where=where, hint=hint)
    found = expand(Setting(section, content, where, partial(document.place, section)))
    if any(setting.name == section for setting in found):
        raise ConfigError(f"section {section}: {content!r} is not 'key: value' lines", where=where)
    return found


def _relative_to(recipe: str | Path, setting: Setting) -> Setting:
    """The setting, with a file that a recipe names relative to the recipe."""
    if setting.name not in ("cluster.file", "cluster.profile") or not isinstance(setting.value, str) or not setting.value:
        return setting
    return Setting(setting.name, os.path.normpath(Path(recipe).parent / setting.value), setting.where)


def key_table() -> str:
    """Every key: what it takes, its default, what it is."""
    rows = ((f"`{key.name}`", key.takes.removesuffix(" or null"), _default(key.default, key.unit), key.doc) for key in KEYS.values())
    return _table(("key", "takes", "default", "what it is"), rows)


def _default(value: object, unit: str | None) -> str:
    if value is None:
        return "null"
    if unit == "B" and isinstance(value, int):
        return f"{value} ({format_bytes(value)})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
