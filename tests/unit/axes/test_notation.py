"""The notation of rules: roles of letters, and what is no rule."""

from __future__ import annotations

import pytest

from whale.axes.notation import parse
from whale.errors import ConfigError


def kinds(text: str) -> dict[str, str]:
    return {letter: str(role).split(":")[0] for letter, role in parse(text).roles.items()}


def test_kept_contracted_and_leading_dimensions() -> None:
    rule = parse("input[... i] weight[o i] +bias[o] -> [... o]")
    assert kinds(rule.text) == {"...": "kept", "i": "contracted by sum", "o": "kept"}
    assert [operand.name for operand in rule.operands] == ["input", "weight", "bias"]
    assert [operand.added for operand in rule.operands] == [False, False, True]


def test_marks() -> None:
    assert kinds("w[(v:lookup) d!] ids[...] -> [... d! n^]") == {"v": "contracted by lookup", "d": "whole", "...": "kept", "n": "broadcast"}


def test_operands_that_are_needed_whole() -> None:
    roles = parse("q[s< d!] k[m& d!] mask[s& m&] -> [s d!]").roles
    assert roles["s"].kind == "kept" and roles["s"].grows and roles["s"].gathers == (("mask", 2),)
    assert roles["m"].kind == "whole" and roles["m"].gathers == (("k", 1), ("mask", 2))
    assert not roles["d"].gathers


def test_what_is_not_said_is_whole() -> None:
    roles = parse("x[a b] -> [a c]").roles
    assert roles["b"].kind == roles["c"].kind == "whole"
    assert "drops it" in roles["b"].reason
    assert "makes it" in roles["c"].reason


def test_an_added_operand_alone_does_not_contract() -> None:
    assert parse("x[a b] +c[b] -> [a]").roles["b"].kind == "whole"


def test_products_and_sizes() -> None:
    rule = parse("x[n g=4*c!] -> [n g=4*c! 1]")
    assert rule.operands[0].terms == (("n",), ("g", "c"))
    assert rule.results[0][2] == ()
    assert rule.sizes == {"g": 4}


def test_several_results() -> None:
    assert len(parse("x[a] -> [a], [a]").results) == 2
    assert parse("-> [a^]").operands == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x[a] [a]", "'->'"),
        ("x(a) -> [a]", "not an operand"),
        ("x[a] -> a", "not a result"),
        ("x[a?] -> [a]", "is not a letter"),
        ("x[... a ...] -> [a]", "once"),
        ("x[(a)] -> [a]", "contracted"),
        ("x[(a:average)] -> []", "combine"),
        ("q[s] k[s] -> [s&]", "only operands are gathered"),
    ],
)
def test_bad_rules_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)
