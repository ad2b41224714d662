"""Strict YAML: places, duplicates, and what bare words mean."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from whale.config import load_config, parse_yaml, read_plan, read_yaml
from whale.errors import ClusterError, ConfigError, WhaleError
from whale.hardware.cluster_file import load_cluster
from whale.ir.serialization import MOST_BYTES_OF_YAML

text = st.text(
    st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=20
)  # YAML bounds the length of keys
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)


@at_most(50)
@given(plain)
def test_reads_what_json_writes(value: object) -> None:
    assert parse_yaml(json.dumps(value), "f").data == json.loads(json.dumps(value))


@at_most(50)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.integers() | st.text() | st.none() | st.booleans()))
def test_reads_what_yaml_writes(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value), "f").data == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("true", True), ("False", False), ("null", None), ("~", None), ("1e-3", 0.001), ("12:30", "12:30"),
        ("0x10", "0x10"), ("2020-01-01", "2020-01-01"), (".5", 0.5), ("7.", 7.0), ("-3", -3),
        ("'3'", "3"), ('"true"', "true"), ("1_000", "1_000"),
    ],
)  # fmt: skip
def test_bare_words(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}", "f").data
    assert found == {"key": value}
    assert isinstance(found, dict)
    assert type(found["key"]) is type(value)


def test_places() -> None:
    document = parse_yaml("a: 1\nb:\n  - x\n  - c: 2\n    d: 3\n", "file.yaml")
    assert str(document.place("b")) == "file.yaml:2"
    assert str(document.place("b", 1, "d")) == "file.yaml:5"
    assert str(document.place("b", 1, "nothing", "deeper")) == "file.yaml:4"
    assert str(document.place()) == "file.yaml:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "key 'a' is given twice (first in line 1)\n  at f:2"),
        ("a: {b: 1, b: 2}\nc: {d: 1, d: 2}\n", "2 faults"),
        ("a: &x [*x]\n", "an alias is used inside its own value"),
        ("a: !!python/object:os.system x\n", "tag '!!python/object:os.system' is not supported"),
        ("a: !mine x\n", "tag '!mine' is not supported"),
        ("? [1, 2]\n: 3\n", "a key is a list or a mapping"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: [1\n", "not YAML"),
        ("a: \x00\n", "not YAML"),
        ("a: 1\nb: " + "9" * 5000, "a number of 5,000 digits\n  at f:2"),
        ("\tb: 1\n", "not YAML"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f")
    assert message in str(caught.value)


def test_aliases_stand_for_values() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\n", "f").data == {"a": {"b": 1}, "c": {"b": 1}}


def bomb(num_lines: int, fan_out: int) -> str:
    """Lists of aliases of the list in the line before."""
    lines = [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * fan_out)}]" for number in range(1, num_lines)]
    return "\n".join(["a0: &a0 [x]", *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(100, 10), r"211,111 values, with those that aliases stand for; a file may have at most 200,000\n  at .*:6"),
        (bomb(5000, 1), r"nested 101 deep, with those that aliases stand for; at most 100 is allowed\n  at .*:101"),
        ("[" * 10_000 + "]" * 10_000, r"nested more than 100 deep\n  at .*:1"),
        ("{a: " * 10_000 + "}" * 10_000, r"nested more than 100 deep"),
        ("\n".join(" " * number + "a:" for number in range(1000)), r"nested more than 100 deep\n  at .*:101"),
        ("#" * (MOST_BYTES_OF_YAML + 1), r"4,194,305 bytes, more than 4,194,304"),
    ],
    ids=["aliases", "chain", "lists", "mappings", "lines", "size"],
)
def test_what_would_take_long_is_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    for read in (partial(load_config, environment={}), read_plan, load_cluster):
        with pytest.raises(WhaleError, match=message):
            read(file)


def test_a_hundred_deep_may_be_nested() -> None:
    data = parse_yaml("[" * 100 + "]" * 100, "f").data
    for _ in range(100):
        assert isinstance(data, list)
        data = data[0] if data else None
    assert data is None


def test_an_empty_file() -> None:
    assert parse_yaml("# nothing\n", "f").data is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read"):
        read_yaml(tmp_path, ClusterError)
    (tmp_path / "latin").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_yaml(tmp_path / "latin")
