"""YAML read strictly: every value with its file and line, duplicate keys refused, and no surprises in what text means.

Numbers, ``true``, ``false`` and ``null`` are those of YAML 1.2, so that a host may be called ``no`` and ``1e-3`` is a number.
Everything else is text, a list or a mapping with text keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from whale.errors import ConfigError, WhaleError, raise_faults
from whale.ir.source import SourceLine

PathKey = tuple[str | int, ...]
"""The way to a value from the root: mapping keys and list positions."""


@dataclass(frozen=True)
class Document:
    """A YAML file's contents.

    Attributes:
        file: its path, as it was given.
        data: None, bool, int, float, str, list or dict with text keys, nested.
        lines: per way from the root, the line of the value (for a mapping's entry, of its key), from 1.
    """

    file: str
    data: object
    lines: dict[PathKey, int] = field(repr=False)

    def place(self, *way: str | int) -> SourceLine:
        """File and line of the value there, or of the nearest one around it."""
        while way and way not in self.lines:
            way = way[:-1]
        return SourceLine(self.file, self.lines.get(way, 1))


def read_yaml(path: str | Path, kind: type[WhaleError] = ConfigError) -> Document:
    """Reads one YAML document from a file.

    Raises:
        WhaleError: of the given kind: the file cannot be read, or is not YAML, or repeats a key; all faults at once.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not text in UTF-8 (byte {error.start})") from None
    return parse_yaml(text, str(path), kind)


def parse_yaml(text: str, file: str, kind: type[WhaleError] = ConfigError) -> Document:
    """Reads one YAML document from text; `file` is what errors call it."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise kind(f"not YAML: {error.problem or error}", where=SourceLine(file, line)) from None
    except yaml.YAMLError as error:
        raise kind(f"not YAML: {str(error).splitlines()[0]}", where=SourceLine(file, 1)) from None
    reader = _Reader(file, kind)
    for token in yaml.scan(text):
        if isinstance(token, yaml.TagToken):
            reader.fault(f"tag {''.join(part or '' for part in token.value)!r} has no meaning here", token)
    data = None if root is None else reader.read(root, (), ())
    raise_faults(reader.faults)
    return Document(file, data, reader.lines)


_NUMBERS = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {word: value for name, value in (("true", True), ("false", False)) for word in (name, name.capitalize(), name.upper())}


class _Reader:
    """Turns YAML's nodes into plain data, and keeps lines and faults on the way."""

    def __init__(self, file: str, kind: type[WhaleError]) -> None:
        self.file = file
        self.kind = kind
        self.lines: dict[PathKey, int] = {}
        self.faults: list[WhaleError] = []

    def read(self, node: yaml.Node, way: PathKey, above: tuple[yaml.Node, ...]) -> object:
        self.lines.setdefault(way, node.start_mark.line + 1)
        if any(node is other for other in above):
            self.fault("an alias stands inside the value it stands for", node)
            return None
        above = (*above, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*way, index), above) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, way, above)
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, way: PathKey, above: tuple[yaml.Node, ...]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fault("a key is text, not a list or a mapping", key_node)
                continue
            name = str(key_node.value)
            if name in result:
                self.fault(f"key {name!r} stands twice (first in line {self.lines[(*way, name)]})", key_node)
                continue
            self.lines[(*way, name)] = key_node.start_mark.line + 1
            result[name] = self.read(value_node, (*way, name), above)
        return result

    def fault(self, message: str, node: yaml.Node | yaml.Token) -> None:
        self.faults.append(self.kind(message, where=SourceLine(self.file, node.start_mark.line + 1)))


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
