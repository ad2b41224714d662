"""What namespaces and containers hold, in columns, so that C code compares it: about 40 ns for each value, in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, compress, repeat
from operator import is_, is_not
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


class _Missing:
    """The value of an attribute that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def in_columns(rows: Iterable[tuple[Any, ...]], num_columns: int) -> list[tuple[Any, ...]]:
    """The columns of a table, for `map`."""
    return list(zip(*rows, strict=True)) or [()] * num_columns


class HeldValues(Generic[Row]):
    """Entries of namespaces and the objects that they held.

    Args:
        entries: what stands for each, its namespace (a dict, or `vars` of a class), its name there, and the object; `MISSING` for none.
    """

    def __init__(self, entries: Iterable[tuple[Row, Mapping[str, Any], str, object]]) -> None:
        held = list(entries)
        assert all(isinstance(each[1], (dict, MappingProxyType)) for each in held)
        self._tables: list[tuple[Any, ...]] = [
            (get, *in_columns((each for each in held if isinstance(each[1], kind)), 4))
            for kind, get in ((dict, dict.get), (MappingProxyType, MappingProxyType.get))
        ]

    def differing(self) -> list[Row]:
        """What stands for those that hold another object now."""
        found: list[Row] = []
        for get, rows, namespaces, names, values in self._tables:
            found += compress(rows, map(is_not, map(get, namespaces, names, repeat(MISSING)), values))
        return found


class HeldItems:
    """Containers and the objects that they held, in order; of those with more than `most_items` the number alone."""

    def __init__(self, containers: Iterable[Any], most_items: int) -> None:
        self._containers = list(containers)
        walked = [each for each in self._containers if len(each) <= most_items]
        self._walked = [*walked, *(each.values() for each in walked if isinstance(each, dict))]
        self._lengths, self._items = self._read_lengths(), list(self._read_items())

    def are_same(self) -> bool:
        """Whether they hold the same objects in the same order."""
        return self._read_lengths() == self._lengths and all(map(is_, self._read_items(), self._items))

    def _read_lengths(self) -> list[int]:
        return [*map(len, self._containers)]

    def _read_items(self) -> Iterable[object]:
        return chain.from_iterable(self._walked)
