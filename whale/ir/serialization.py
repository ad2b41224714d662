"""JSON for the values: one codec that follows the dataclasses' own types, so that no class states its form twice.

User files are read within bounds, so that a broken or malicious file is an error at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from whale.ir.graph import Ref

MOST_BYTES_OF_YAML, MOST_BYTES_OF_JSON = 2**22, 2**29
MOST_VALUES = 200_000  # in a YAML file, with aliases expanded
MOST_DEPTH = 100  # of nested lists and mappings

_BETWEEN_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^"\[\]{}]++', re.DOTALL)


def read_text(path: str | Path, most_bytes: int) -> str:
    """A file's text. Raises ValueError: it is larger, or not UTF-8."""
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
        num_bytes = max(os.fstat(file.fileno()).st_size, len(data))
    if num_bytes > most_bytes:
        raise ValueError(f"it has {num_bytes:,} bytes, more than {most_bytes:,}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8 (byte {error.start})") from None


def parse_json(text: str) -> Any:
    """The value of JSON text. Raises ValueError: it nests too deep, has a number too long for Python, or (`json.JSONDecodeError`) is no
    JSON.
    """
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    depth = max(accumulate(steps.get(each, 0) for each in _BETWEEN_BRACKETS.sub("", text)), default=0)
    if depth > MOST_DEPTH:
        raise ValueError(f"lists and mappings are nested {depth} deep, more than {MOST_DEPTH}")
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"a number of {len(digits):,} digits") from None


def read_json(path: str | Path) -> Any:
    """The value of a JSON file. Raises OSError or ValueError as `read_text` and `parse_json`."""
    return parse_json(read_text(path, MOST_BYTES_OF_JSON))


T = TypeVar("T")


def to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(encode(value), indent=indent)


def from_json(kind: type[T], text: str) -> T:
    """The inverse of `to_json`. Raises ValueError: not JSON, a missing or unknown field, or a value of another type; says where."""
    decoded = decode(kind, parse_json(text))
    assert isinstance(decoded, kind)
    return decoded


def read_value(kind: type[T], path: str | Path) -> T:
    """A value from a file that `to_json` wrote. Raises OSError or ValueError as `read_text` and `from_json`."""
    return from_json(kind, read_text(path, MOST_BYTES_OF_JSON))


def encode(value: object) -> Any:
    """A value as plain lists, dicts, numbers and text."""
    if isinstance(value, Ref):
        return {"ref": value.op}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: encode(getattr(value, f.name)) for f in fields if f.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(encode(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


class Misfit(ValueError):
    """Data that is no value of a type, and its place: ``replicas[0].stages[1].split: 'x' is no int``."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place.removeprefix('.')}: {reason}" if place else reason)
        self.reason, self.place = reason, place


def _decode_at(place: str, hint: Any, data: Any) -> Any:
    try:
        return decode(hint, data)
    except Misfit as misfit:
        raise Misfit(misfit.reason, place + misfit.place) from None
    except ValueError as error:
        raise Misfit(str(error), place) from None


def decode(hint: Any, data: Any) -> Any:
    """Plain data as a value of the hinted type. Raises ValueError: it is none; says where."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(hint), data)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"{data!r} is not a list")
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_decode_at(f"[{index}]", inner[0], item) for index, item in enumerate(data))
        return tuple(_decode_at(f"[{index}]", kind, item) for index, (kind, item) in enumerate(zip(inner, data, strict=True)))
    if origin is frozenset:
        return frozenset(data)
    if origin is Mapping and not isinstance(data, Mapping):
        raise ValueError(f"{data!r} is not a mapping")
    if origin is Literal:
        if data not in get_args(hint):
            raise ValueError(f"{data!r} is not one of {', '.join(map(str, get_args(hint)))}")
        return data
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    if hint is float:
        return float(data)
    if hint in (int, str, bool) and type(data) is not hint:
        raise ValueError(f"{data!r} is not of type {hint.__name__}")
    return data


def _decode_union(members: tuple[Any, ...], data: Any) -> Any:
    if data is None:
        return None
    if Ref in members:  # an op's argument
        return _decode_argument(data)
    kinds = [member for member in members if member is not type(None)]
    return decode(kinds[0], data) if len(kinds) == 1 else data


def _decode_argument(data: Any) -> Any:
    if isinstance(data, dict):
        return Ref(data["ref"])
    if isinstance(data, list):
        return tuple(_decode_argument(item) for item in data)
    return data


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_dataclass(kind: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r} is not of type {kind.__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
    missing = [n for n, f in fields.items() if n not in data and f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    hints = _hints(kind)
    try:
        return kind(**{name: _decode_at(f".{name}", hints[name], value) for name, value in data.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
