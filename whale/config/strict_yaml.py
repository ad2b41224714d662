"""YAML read strictly: every value with its file and line, duplicate keys refused, no implicit types.

Numbers, ``true``, ``false`` and ``null`` are those of YAML 1.2, so that a host may be called ``no`` and ``1e-3`` is a number. Everything
else is text, a list or a mapping with text keys. Aliases are expanded, within bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from whale.errors import ConfigError, WhaleError, raise_faults
from whale.ir.scope import SourceLine
from whale.ir.serialization import MOST_BYTES_OF_YAML, MOST_DEPTH, MOST_VALUES, read_text

PathKey = tuple[str | int, ...]  # from the root: mapping keys and list positions


@dataclass(frozen=True)
class Document:
    """The contents of a YAML file."""

    file: str  # its path, as given
    data: object  # None, bool, int, float, str, list or dict with text keys, nested
    # per path from the root, the line of the value (for a mapping's entry, of its key), from 1
    lines: dict[PathKey, int] = field(repr=False)

    def place(self, *way: str | int) -> SourceLine:
        """File and line of a value, or of the nearest one around it."""
        while way and way not in self.lines:
            way = way[:-1]
        return SourceLine(self.file, self.lines.get(way, 1))


def read_yaml(path: str | Path, kind: type[WhaleError] = ConfigError) -> Document:
    """Reads one YAML document from a file. Raises an error of `kind`: unreadable, not YAML, or repeated keys; all at once."""
    try:
        text = read_text(path, MOST_BYTES_OF_YAML)
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise kind(f"cannot read {path}: {error}") from None
    return parse_yaml(text, str(path), kind)


def parse_yaml(text: str, file: str, kind: type[WhaleError] = ConfigError) -> Document:
    """Reads one YAML document from text; `file` is its name in errors."""
    reader = _NodeReader(file, kind)
    try:
        root = _Composer(text, reader).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise kind(f"not YAML: {error.problem or error}", where=SourceLine(file, line)) from None
    except yaml.YAMLError as error:
        raise kind(f"not YAML: {str(error).splitlines()[0]}", where=SourceLine(file, 1)) from None
    data = None if root is None else reader.read(root, (), ())
    raise_faults(reader.faults)
    return Document(file, data, reader.lines)


_NUMBERS = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {word: value for name, value in (("true", True), ("false", False)) for word in (name, name.capitalize(), name.upper())}


class _NodeReader:
    """Turns YAML's nodes into plain data, and collects lines and faults."""

    def __init__(self, file: str, kind: type[WhaleError]) -> None:
        self.file = file
        self.kind = kind
        self.lines: dict[PathKey, int] = {}
        self.faults: list[WhaleError] = []

    def read(self, node: yaml.Node, way: PathKey, above: tuple[yaml.Node, ...]) -> object:
        self.lines.setdefault(way, node.start_mark.line + 1)
        if any(node is other for other in above):
            self.fault("an alias is used inside its own value", node)
            return None
        above = (*above, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*way, index), above) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, way, above)
        try:
            return _scalar(node)
        except ValueError:  # Python's bound on the digits of whole numbers
            self.fault(f"a number of {len(str(node.value)):,} digits", node)
            return None

    def _mapping(self, node: yaml.MappingNode, way: PathKey, above: tuple[yaml.Node, ...]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fault("a key is a list or a mapping, not text", key_node)
                continue
            name = str(key_node.value)
            if name in result:
                self.fault(f"key {name!r} is given twice (first in line {self.lines[(*way, name)]})", key_node)
                continue
            self.lines[(*way, name)] = key_node.start_mark.line + 1
            result[name] = self.read(value_node, (*way, name), above)
        return result

    def fault(self, message: str, node: yaml.Node | yaml.Event) -> None:
        self.faults.append(self.at_fault(message, node))

    def at_fault(self, message: str, node: yaml.Node | yaml.Event) -> WhaleError:
        assert node.start_mark is not None
        return self.kind(message, where=SourceLine(self.file, node.start_mark.line + 1))


def _scalar(node: yaml.Node) -> object:
    text = str(node.value)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:  # quoted, or a block: text
        return text
    if text in _WORDS:
        return _WORDS[text]
    for pattern, number in _NUMBERS:
        if pattern.fullmatch(text):
            return number(text)
    return text


class _Composer(yaml.SafeLoader):
    """Makes nodes of text, within bounds; reports faults to the reader."""

    def __init__(self, text: str, reader: _NodeReader) -> None:
        super().__init__(text)
        self._reader = reader
        self._depth = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """The next value; an alias is the existing node."""
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if (tag := getattr(event, "tag", None)) is not None:
            self._reader.fault(f"tag {tag.replace('tag:yaml.org,2002:', '!!')!r} is not supported", event)
        if isinstance(event, yaml.CollectionStartEvent) and self._depth >= MOST_DEPTH:
            raise self._reader.at_fault(f"lists and mappings are nested more than {MOST_DEPTH} deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._extents[node] = self._extent(node, event)
        return node

    def _extent(self, node: yaml.Node, event: yaml.Event) -> tuple[int, int]:
        """Number of values in a node and their nesting depth, with aliases expanded."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        inner = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        extents = [self._extents.get(each, (1, 0)) for each in inner]  # an alias inside the value it stands for has none yet
        num_values, depth = 1 + sum(number for number, _ in extents), 1 + max((deep for _, deep in extents), default=0)
        if num_values > MOST_VALUES:
            reason = f"{num_values:,} values, with those that aliases stand for; a file may have at most {MOST_VALUES:,}"
            raise self._reader.at_fault(reason, event)
        if depth > MOST_DEPTH:
            reason = f"lists and mappings are nested {depth} deep, with those that aliases stand for; at most {MOST_DEPTH} is allowed"
            raise self._reader.at_fault(reason, event)
        return num_values, depth
