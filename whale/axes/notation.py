"""The notation of rules: which letters an op keeps, contracts, needs whole or makes.

    linear     input[... i] weight[o i] +bias[o] -> [... o]
    embedding  weight[(vocabulary:lookup) hidden] indices[...] -> [... hidden]

    name[...]    an operand, by the name it has in the op's signature; its dimensions, outermost first
    +name[...]   an operand that is added once, after contracted letters have been summed
    i            a letter (a word serves too, and then names the axis)
    a*b          one dimension that is the product of two letters
    1            a dimension of size 1
    ...          any number of dimensions, broadcast against each other from the right
    i!           must be whole
    (i) (i:how)  contracted: results for parts of it are combined, by `sum` or as `how` says
    i~           kept, with statistics over all of it
    i^           made by the op, which can make any part of it alone
    i=4          has this size
    -> [..] [..] the results

A letter in operands and results is kept. One that is only in two or more operands is contracted. Any other letter
that vanishes or appears without a mark is whole: what a rule does not say is not assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from whale.axes.values import Role
from whale.errors import ConfigError

COMBINES = ("sum", "mean", "weighted_mean", "max", "min", "any", "all", "prod", "lookup", "softmax")
"""How results for parts of a contracted axis make the whole result.

``lookup``: each part answers for the indices that fall in it; ``softmax``: cross-entropy from parts of the classes;
``weighted_mean``: sums of values and of weights, divided at the end."""

_OPERAND = re.compile(r"\s*(\+?)(\w+)\[([^\]]*)\]")
_RESULT = re.compile(r"\s*\[([^\]]*)\]\s*,?")
_FACTOR = re.compile(r"(?P<open>\()?(?P<letter>\.\.\.|[A-Za-z_]\w*)(?::(?P<how>\w+))?(?(open)\))(?:=(?P<size>\d+))?(?P<mark>[!^~]?)$")

Term = tuple[str, ...]
"""One dimension in a rule: the letters it is the product of; empty for a dimension of size 1."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a rule.

    Attributes:
        name: in the op's signature.
        terms: its dimensions.
        added: it is added once, after the contraction.
    """

    name: str
    terms: tuple[Term, ...]
    added: bool = False


@dataclass(frozen=True)
class Notation:
    """A parsed rule.

    Attributes:
        text: as written.
        operands: in order.
        results: the dimensions of each result.
        roles: what becomes of each letter.
        sizes: letters whose size the rule states.
    """

    text: str
    operands: tuple[Operand, ...]
    results: tuple[tuple[Term, ...], ...]
    roles: dict[str, Role]
    sizes: dict[str, int]

    def __hash__(self) -> int:
        return hash(self.text)

    def role(self, letter: str) -> Role:
        """The role of a letter, or of one of the dimensions that `...` stands for."""
        return self.roles["..." if letter.startswith("...") else letter]


@lru_cache(maxsize=4096)
def parse(text: str) -> Notation:
    """Reads a rule.

    Raises:
        ConfigError: it is not in the notation, or contradicts itself.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ConfigError(f"a rule needs '->' between operands and results ({text!r})", hint=_HINT)
    reader = _Reader(text)
    operands: list[Operand] = []
    position = 0
    while left[position:].strip():
        found = _OPERAND.match(left, position)
        if not found:
            raise ConfigError(f"a rule's operands are written name[letters] ({left[position:].strip()!r})", hint=_HINT)
        operands.append(Operand(found[2], reader.terms(found[3], len(operands), bool(found[1])), bool(found[1])))
        position = found.end()
    results: list[tuple[Term, ...]] = []
    position = 0
    while right[position:].strip():
        found = _RESULT.match(right, position)
        if not found:
            raise ConfigError(f"a rule's results are written [letters] ({right[position:].strip()!r})", hint=_HINT)
        results.append(reader.terms(found[1], None, False))
        position = found.end()
    return Notation(text, tuple(operands), tuple(results), reader.roles(), reader.sizes)


_HINT = "for example: input[... i] weight[o i] +bias[o] -> [... o]"


class _Reader:
    """Collects what the factors of one rule say of its letters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sizes: dict[str, int] = {}
        self._marks: dict[str, str] = {}
        self._doubled: set[str] = set()
        self._readers: dict[str, set[int]] = {}  # per letter, the operands that have it; added ones do not count
        self._letters: dict[str, None] = {}
        self._in_operands: set[str] = set()
        self._in_results: set[str] = set()

    def terms(self, text: str, operand: int | None, added: bool) -> tuple[Term, ...]:
        found = tuple(() if word == "1" else tuple(self._factor(f, operand, added) for f in word.split("*")) for word in text.split())
        letters = [letter for term in found for letter in term]
        self._doubled.update(letter for letter in letters if letters.count(letter) > 1)
        if sum("..." in term for term in found) > 1:
            raise ConfigError(f"'...' may stand once in an operand or result ({self.text!r})", hint=_HINT)
        return found

    def _factor(self, text: str, operand: int | None, added: bool) -> str:
        found = _FACTOR.match(text)
        if not found:
            raise ConfigError(f"{text!r} is no letter of a rule ({self.text!r})", hint=_HINT)
        letter = found["letter"]
        self._letters[letter] = None
        if operand is None:
            self._in_results.add(letter)
        else:
            self._in_operands.add(letter)
            if not added:
                self._readers.setdefault(letter, set()).add(operand)
        if found["size"]:
            self.sizes[letter] = int(found["size"])
        if found["open"]:
            how = found["how"] or "sum"
            if how not in COMBINES:
                raise ConfigError(f"parts are combined by one of {', '.join(COMBINES)} ({text!r})")
            self._marks[letter] = how
        elif found["mark"]:
            self._marks[letter] = found["mark"]
        return letter

    def roles(self) -> dict[str, Role]:
        return {letter: self._role(letter) for letter in self._letters}

    def _role(self, letter: str) -> Role:
        mark = self._marks.get(letter, "")
        taken, given = letter in self._in_operands, letter in self._in_results
        if letter in self._doubled:
            return Role("whole", reason="has it twice in one tensor")
        if mark in COMBINES:
            if given:
                raise ConfigError(f"a contracted letter cannot be in a result ({letter!r} in {self.text!r})", hint=_HINT)
            return Role("contracted", mark)
        if mark == "!":
            return Role("whole", reason="reads all of it at once" if taken else "makes all of it at once")
        if mark == "~":
            return Role("pooled", reason="takes statistics over all of it")
        if given and not taken:
            return Role("broadcast") if mark == "^" else Role("whole", reason="makes it without saying how")
        if taken and not given:
            joined = len(self._readers.get(letter, ())) > 1
            return Role("contracted", "sum") if joined else Role("whole", reason="drops it without saying how")
        return Role("kept")
