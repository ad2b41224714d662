"""Plain data as JSON: what a checkpoint keeps besides tensors (hyperparameters, schedules, random states); no code.

None, bool, int, float, str     unchanged
list                            a list
tuple, dict, set ...            {"tuple": [...]}, {"dict": [[key, value], ...]}: JSON has one kind of list, and only text keys
tensor                          {"tensor": key}: it lies with the other tensors
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whale.errors import CheckpointError, first_few
from whale.ir import serialization

MOST_DEPTH = (serialization.MOST_DEPTH - 3) // 3
"""Of what is kept: a dict is three lists and mappings of JSON, and lies in three of the index."""

_CONTAINERS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, tuple),
    "size": (torch.Size, torch.Size),
    "set": (set, set),
    "dict": (dict, dict),
    "ordered": (OrderedDict, OrderedDict),
    "counter": (Counter, lambda pairs: Counter(dict(pairs))),
}
"""By the word that stands for it, a kind of container and how it is made of its items."""


NUMPY_KINDS = "biufU"
"""Of scalars that JSON has the value of."""


def is_plain_tensor(value: object) -> bool:
    """Whether shape, type and numbers describe a tensor completely: no subclass, none that is sparse."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized  # type: ignore[attr-defined]


def to_plain(value: object, place: str, keep: Callable[[str, Tensor], str], depth: int = 0) -> Any:
    """A value as JSON has it.

    Args:
        value: numbers, text, None, lists, tuples, dicts, sets and tensors, nested.
        place: its name in errors.
        keep: takes a tensor and its place, and gives the key that it will lie under.
        depth: of nesting.

    Raises:
        CheckpointError: it holds something else, and where.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if is_plain_tensor(value):
        assert isinstance(value, Tensor)
        return {"tensor": keep(place, value.detach()), "is_cuda": value.is_cuda}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, np.generic):
        return {"numpy": [value.dtype.str, value.item()]}
    if depth >= MOST_DEPTH:
        raise CheckpointError(f"{place} is nested more than {MOST_DEPTH} deep, which a checkpoint cannot hold")
    if type(value) is list:
        return _items(value, place, keep, depth + 1)
    for word, (kind, _) in _CONTAINERS.items():
        if type(value) is kind:
            return {word: _items(value, place, keep, depth + 1)}
    raise CheckpointError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        hint="use numbers, text, None, tensors, and lists, tuples, dicts or sets of them: loading a checkpoint runs no code",
    )


def _items(values: Any, place: str, keep: Callable[[str, Tensor], str], depth: int) -> list[Any]:
    if isinstance(values, dict):
        named = ((key, to_plain(key, f"a key of {place}", keep, depth)) for key in values)
        return [[plain, to_plain(values[key], f"{place}[{key!r}]", keep, depth)] for key, plain in named]
    return [to_plain(each, f"{place}[{number}]", keep, depth) for number, each in enumerate(values)]


def from_plain(data: Any, tensor: Callable[[str, bool], Tensor]) -> Any:
    """The inverse of `to_plain`; ``tensor`` gives the tensor of a key, on a GPU if it was on one.

    Raises:
        ValueError: it is nothing that `to_plain` gives.
    """
    try:
        return _value(data, tensor)
    except (TypeError, KeyError, OverflowError, StopIteration) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _value(data: Any, tensor: Callable[[str, bool], Tensor]) -> Any:
    if isinstance(data, list):
        return [_value(each, tensor) for each in data]
    if not isinstance(data, Mapping):
        return data
    if {*data} == {"tensor", "is_cuda"} and type(data["tensor"]) is str and type(data["is_cuda"]) is bool:
        return tensor(data["tensor"], data["is_cuda"])
    if len(data) != 1:
        raise ValueError(f"{first_few(sorted(data))} stand for no kind of value")
    [(word, inner)] = data.items()
    if not isinstance(inner, list):
        raise ValueError(f"{word} has no list")
    if word == "complex":
        return complex(*inner)
    if word == "numpy":
        code, value = inner
        if not (type(code) is str and (found := np.dtype(code)).kind in NUMPY_KINDS and isinstance(value, (bool, int, float, str))):
            raise ValueError(f"{code!r} is no type of a number")
        return found.type(value)
    kind, make = _CONTAINERS[word]
    items = _value(inner, tensor)
    if not issubclass(kind, dict):
        if kind is torch.Size and not all(type(each) is int for each in items):
            raise ValueError("sizes are whole numbers")
        return make(items)
    if not all(isinstance(each, list) and len(each) == 2 for each in items):
        raise ValueError(f"{word} has other items than pairs")
    return make([tuple(each) for each in items])
