"""Errors: rule, place, hint, and several at once."""

from __future__ import annotations

import pickle

import pytest

from whale.errors import ClusterError, ConfigError, OutOfMemory, PlanError, WhaleError, first_few, raise_faults
from whale.ir.scope import SourceLine


def test_prints_rule_place_and_hint() -> None:
    error = ConfigError("a must be b (c)", where=SourceLine("train.py", 41), hint="do d")
    assert str(error) == "a must be b (c)\n  at train.py:41\n  hint: do d"
    assert str(ConfigError("a")) == "a"


def test_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ClusterError("m", where=SourceLine("f", 1), hint="h")))
    assert type(error) is ClusterError
    assert str(error) == "m\n  at f:1\n  hint: h"


def test_no_fault_and_one_fault() -> None:
    raise_faults([])
    one = ConfigError("only")
    with pytest.raises(ConfigError) as caught:
        raise_faults([one])
    assert caught.value is one


def test_several_faults_are_numbered() -> None:
    with pytest.raises(ConfigError) as caught:
        raise_faults([ConfigError("a", hint="h"), ConfigError("b")])
    assert str(caught.value) == "2 faults\n1. a\n  hint: h\n2. b"


def test_a_fault_of_several_places_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        raise_faults([ConfigError("a"), ConfigError("b"), ConfigError("a")])
    assert str(caught.value) == "2 faults\n1. a\n2. b"
    with pytest.raises(ConfigError, match=r"^a$"):
        raise_faults([ConfigError("a"), ConfigError("a")])


def test_faults_of_several_kinds_are_of_their_common_class() -> None:
    with pytest.raises(WhaleError) as caught:
        raise_faults([ConfigError("a"), ClusterError("b")])
    with pytest.raises(PlanError, match="2 faults"):
        raise_faults([OutOfMemory("a"), PlanError("b")])
    assert type(caught.value) is WhaleError


def test_lists_are_cut_short() -> None:
    assert first_few(["a", "b", "c"]) == "a, b, c" and first_few([]) == ""
    assert first_few(list("abcdef")) == "a, b, c and 3 more"
    assert first_few(["a", "b"], 1, separator="; ", count=9) == "a and 8 more"
