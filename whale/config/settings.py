"""From what the user wrote to checked values: one setting at a time, all faults of a source together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from whale.config.elsewhere import foreign_key, is_foreign_section, plain
from whale.config.keys import TYPE_WORDS, ByName, Key, Shares, guess, nearest
from whale.config.replicas import PLAN, RECOMPUTE, REPLICAS, Place, Reader
from whale.config.sections import (
    AUTO,
    EPL_KEYS,
    KEYS,
    OF_THE_PAPER,
    REFUSED,
    SECTIONS,
    STRATEGIES,
)
from whale.config.strict_yaml import parse_yaml
from whale.errors import ConfigError, WhaleError
from whale.units import parse_quantity

_BLOCK_KEYS = {name.partition(".")[2]: found for name, found in KEYS.items() if name.startswith("pipeline.")}
_BLOCK_KEYS |= {RECOMPUTE: KEYS["recompute.policy"]}

STRATEGY = "pipeline.strategy"
SCHEDULE = "pipeline.schedule"


@dataclass(frozen=True, slots=True)
class Setting:
    """A key and its value as the user wrote them, or a section and its content."""

    name: object
    value: object
    where: object = None  # anything that prints as a line
    inside: Place | None = None  # gives the line of a value inside, by its path; None if unknown


_SHORT = {"cluster": "cluster.file", "recompute": "recompute.policy"}  # sections that may be the value of one of their keys


def is_section(name: object) -> bool:
    """Whether a name is a section of Whale, of EPL or of another system."""
    return name in SECTIONS or any(entry.name.startswith(f"{name}.") for entry in EPL_KEYS) or is_foreign_section(name)


def is_of_block(name: object) -> bool:
    """Whether a name may stand in a written plan: a key of its blocks, or `replicas` itself."""
    return name == REPLICAS or name in _READER.names


def expand(setting: Setting) -> list[Setting]:
    """The settings in a section: a mapping of its keys, or a value for one of them (``recompute: auto``); any other value unchanged."""
    name, content = setting.name, setting.value
    if not isinstance(name, str):
        return [setting]
    if name in OF_THE_PAPER:
        return [Setting(OF_THE_PAPER[name], content, setting.where)]
    if not is_section(name):
        return [setting]
    if name in _SHORT and (isinstance(content, str) or _is_own_mapping(KEYS[_SHORT[name]], content)):
        return [Setting(_SHORT[name], content, setting.where)]
    if content is None:
        return []
    if not isinstance(content, Mapping):
        return [setting]
    place = _places_in(setting)
    return [Setting(f"{name}.{key}", value, place(key)) for key, value in content.items()]


def _is_own_mapping(key: Key, content: object) -> bool:
    """Whether the content of a section is itself a value of a key, by stage or by name."""
    if not isinstance(content, Mapping):
        return False
    return _has_patterns(key, content.items()) or any(key.by_stage and str(name).lstrip("-").isdigit() for name in content)


def _has_patterns(key: Key, pairs: Iterable[tuple[object, object]]) -> bool:
    """Whether some of these pairs of a name and a value are a choice by names."""
    return bool(key.by_name) and any("*" in str(name) or ("." in str(name) and value in key.by_name) for name, value in pairs)


def check(settings: Iterable[Setting]) -> tuple[dict[str, object], list[WhaleError]]:
    """The checked values of one source by key, and the faults of the wrong ones."""
    values: dict[str, object] = {}
    faults: list[WhaleError] = []
    for setting in (each for given in settings for each in expand(given)):
        if setting.name in (REPLICAS, PLAN):
            if REPLICAS in values:
                faults.append(ConfigError(f"{REPLICAS} are given twice: next to the sections and inside {PLAN}", where=setting.where))
                continue
            read = _READER.plan if setting.name == PLAN else _READER.replicas
            values[REPLICAS], wrong = read(setting.value, _places_in(setting))
            faults += wrong
            continue
        try:
            if setting.name == AUTO:
                _check_flag(setting)
                continue
            name, value = _carried(setting) if setting.name == STRATEGY else _read(setting)
            if values.setdefault(name, value) != value:  # only these two names can meet
                raise ConfigError(
                    f"{STRATEGY} and {SCHEDULE} contradict each other ({values[name]} and {value})",
                    where=setting.where,
                    hint=f"leave {STRATEGY} out",
                )
        except ConfigError as fault:
            faults.append(fault)
    return values, faults


def _places_in(setting: Setting) -> Place:
    return setting.inside or (lambda *_: setting.where)


def _check_flag(setting: Setting) -> None:
    if not isinstance(setting.value, bool) and str(setting.value).lower() not in _BOOLEANS:
        raise ConfigError(f"{AUTO}: {setting.value!r} is not {TYPE_WORDS['bool']}", where=setting.where)


def _carried(setting: Setting) -> tuple[str, object]:
    """EPL's ``pipeline.strategy`` as the schedule it stands for."""
    if not isinstance(setting.value, str) or setting.value not in STRATEGIES:
        raise ConfigError(
            f"{STRATEGY}: {setting.value!r} is not one of {', '.join(STRATEGIES)}",
            where=setting.where,
            hint=f"{SCHEDULE} takes the other schedules by name",
        )
    return SCHEDULE, STRATEGIES[setting.value]


def _read(setting: Setting) -> tuple[str, object]:
    name = _known(setting)
    return name, _checked(KEYS[name], setting.value, setting.where)


def _known(setting: Setting) -> str:
    name = setting.name
    if not isinstance(name, str):
        raise ConfigError(f"configuration key {name!r} is not text of the form section.key", where=setting.where)
    if name in KEYS:
        return name
    if name in REFUSED:
        raise ConfigError(f"configuration key {name} of EPL does not carry over: {REFUSED[name].note}", where=setting.where)
    if (foreign := foreign_key(name)) is not None:
        raise ConfigError(f"configuration key {name} of {foreign.system} does not carry over: {plain(foreign.note)}", where=setting.where)
    if name in SECTIONS:
        keys = [key for key in KEYS if key.startswith(f"{name}.")]
        raise ConfigError(f"{name!r} is a section, not a key", where=setting.where, hint=f"its keys: {', '.join(keys)}")
    raise ConfigError(f"unknown configuration key {name!r}", where=setting.where, hint=hint_for_key(name))


def hint_for_key(name: str) -> str:
    """The key a user most likely meant by an unknown name: one of its section, else one of another."""
    section, _, attribute = name.rpartition(".")
    own = {key.partition(".")[2]: key for key in KEYS if key.startswith(f"{section}.")}
    every = {key.partition(".")[2]: key for key in KEYS}
    for keys in (own, every):
        if found := nearest(attribute, keys):
            return f"did you mean {keys[found]!r}?"
    if found := nearest(name, KEYS, cutoff=0.8):
        return f"did you mean {found!r}?"
    return f"keys of {section}: {', '.join(own)}" if own else f"sections: {', '.join((*SECTIONS, REPLICAS, PLAN))}"


def _checked(key: Key, given: object, where: object) -> object:
    if isinstance(given, Mapping) or _is_pairs(given):
        pairs: Iterable[tuple[object, object]] = given.items() if isinstance(given, Mapping) else given  # type: ignore[assignment]
        if key.by_stage and not _has_patterns(key, pairs):
            return _shares(key, given, where)
        if key.by_name:
            return _by_name(key, given, where)
    value = _typed(key, given)
    if value is None and not (key.optional and given is None):
        hint = guess(str(given), key.choices) if key.choices else None
        raise ConfigError(f"{key.name}: {given!r} is not {key.takes}", where=where, hint=hint)
    if value is None:
        return None
    if key.choices and value not in key.choices:
        hint = guess(str(value), key.choices)
        if value in STRATEGIES and key.name == SCHEDULE:
            hint = f"{value} of EPL is {SCHEDULE}: {STRATEGIES[str(value)]}"
        raise ConfigError(f"{key.name}: {value!r} is not {key.takes}", where=where, hint=hint)
    if key.rule is not None and not key.rule.holds(value):
        raise ConfigError(f"{key.name}: {value!r} is not {key.rule.words}", where=where)
    return value


_READER = Reader(_BLOCK_KEYS, _checked)


def _is_pairs(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)


def _shares(key: Key, value: object, where: object) -> Shares:
    """A mapping of stages to shares or words (or an earlier result of this), sorted."""
    pairs: Iterable[tuple[object, object]] = value.items() if isinstance(value, Mapping) else value  # type: ignore[assignment]
    found: dict[int, float | str] = {}
    for stage, share in pairs:
        number = int(stage) if isinstance(stage, str) and stage.isdecimal() else stage
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 0:
            raise ConfigError(f"{key.name}: stage {stage!r} is not a whole number from 0", where=where)
        if isinstance(share, str) and share in key.by_stage:
            found[int(number)] = share
        elif isinstance(share, bool) or not isinstance(share, Real) or not 0 <= float(share) <= 1:
            words = f"stage {stage}: {share!r} is not a share from 0 to 1, or {', '.join(key.by_stage)}"
            hint = guess(share, key.by_stage) if isinstance(share, str) else None
            raise ConfigError(f"{key.name}: {words}", where=where, hint=hint)
        else:
            found[int(number)] = float(share)
    return tuple(sorted(found.items()))


def _by_name(key: Key, value: object, where: object) -> ByName:
    """A mapping of patterns of names to choices (or an earlier result of this), in order."""
    pairs: Iterable[tuple[object, object]] = value.items() if isinstance(value, Mapping) else value  # type: ignore[assignment]
    found: dict[str, str] = {}
    for pattern, choice in pairs:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{key.name}: {pattern!r} is not a pattern of {key.named} names", where=where)
        choice = str(choice)  # YAML reads the choice 2 as a number
        if choice not in key.by_name:
            words = f"{pattern}: {choice!r} is not one of {', '.join(key.by_name)}"
            raise ConfigError(f"{key.name}: {words}", where=where, hint=guess(choice, key.by_name))
        found[pattern] = choice
    if [*found][-1:] != ["*"]:
        last = f"the last is {[*found][-1]}" if found else "there is none"
        raise ConfigError(
            f"{key.name} does not end with the pattern '*', for all that no other matches ({last})",
            where=where,
            hint=f'{{"*norm*": {key.by_name[0]}, "*": {key.by_name[1]}}}',
        )
    others = sorted({choice for choice in found.values() if choice != key.by_name[0]})
    if key.rule is not None and not key.rule.holds(tuple(found.items())):
        raise ConfigError(f"{key.name} has {' and '.join(others)}; it can have {key.rule.words}", where=where)
    return tuple(found.items())


def _typed(key: Key, value: object) -> object:
    """The value in the key's own type; None if it is of another."""
    if key.type == "bool" or isinstance(value, bool):
        return value if key.type == "bool" and isinstance(value, bool) else None
    if key.type == "str":
        value = str(value) if key.choices and isinstance(value, Integral) else value  # YAML reads the choice 2 as a number
        return value if isinstance(value, str) and value and "\0" not in value else None
    if key.unit is not None and isinstance(value, str):
        try:
            value = parse_quantity(value, key.unit)
            value = round(value) if key.type == "int" else value
        except (ValueError, OverflowError):
            return None
    if key.type == "int":
        return int(value) if isinstance(value, Integral) else None
    return _finite(value) if isinstance(value, Real) else None


def _finite(value: Real) -> float | None:
    try:
        found = float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return found if math.isfinite(found) else None


_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def from_text(key: Key, text: str) -> object:
    """A value from bare text, as of environment variables; the text itself if it cannot be read."""
    bare = text.strip()
    if key.optional and bare.lower() in ("none", "null", ""):
        return None
    if key.type == "bool":
        return _BOOLEANS.get(bare.lower(), text)
    if (key.by_stage or key.by_name) and bare.startswith("{"):
        return parse_yaml(bare, f"the text for {key.name}").data
    if key.type == "str":
        return bare
    try:
        return int(bare) if key.type == "int" else float(bare)
    except ValueError:  # no number, or one of thousands of digits
        return text
