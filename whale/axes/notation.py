"""The notation of rules, which says what letters an op keeps, contracts, needs whole or makes; and how a rule binds to one op.

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
    i<           kept, and the work for an element grows with its position
    i&           whole in this operand, though the op may work on parts of it in others
    i^           made by the op, which can make any part of it alone
    i=4          has this size
    -> [..] [..] the results

A letter in operands and results is kept. One that is only in two or more operands is contracted. Any other letter that vanishes or
appears without a mark is whole: what a rule does not say is not assumed. Letters are bound to dimensions by position, and unified if one
occurs twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from whale.axes.atoms import ROWS, Clash, Dim
from whale.axes.outcome import CLASHES, MAKES, READS, Dims, Letter, Reading, RuleMisfit, RuleOutcome
from whale.axes.values import Role
from whale.errors import ConfigError
from whale.ir.graph import Argument, Op, Ref

# how results for parts of a contracted axis combine. ``lookup``: each part answers for its indices; ``softmax``: cross-entropy from parts
# of the classes; ``weighted_mean``: sums of values and of weights, divided at the end
COMBINES = ("sum", "mean", "weighted_mean", "max", "min", "any", "all", "prod", "lookup", "softmax")

_OPERAND = re.compile(r"\s*(\+?)(\w+)\[([^\]]*)\]")
_RESULT = re.compile(r"\s*\[([^\]]*)\]\s*,?")
_FACTOR = re.compile(r"(?P<open>\()?(?P<letter>\.\.\.|[A-Za-z_]\w*)(?::(?P<how>\w+))?(?(open)\))(?:=(?P<size>\d+))?(?P<mark>[!^~<&]?)$")

Term = tuple[str, ...]  # one dimension in a rule: the product of letters; empty for size 1


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a rule, with its dimensions; `added` once, after the contraction."""

    name: str
    terms: tuple[Term, ...]
    added: bool = False


@dataclass(frozen=True)
class Notation:
    """A parsed rule: operands in order, the dimensions of each result, what the op does with each letter, and stated sizes."""

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
    """Reads a rule. Raises ConfigError: it is not in the notation, or contradicts itself."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ConfigError(f"rule {text!r} has no '->' between operands and results", hint=_HINT)
    reader = _RuleReader(text)
    operands: list[Operand] = []
    position = 0
    while left[position:].strip():
        found = _OPERAND.match(left, position)
        if not found:
            raise ConfigError(f"{left[position:].strip()!r} is not an operand of the form name[letters]", hint=_HINT)
        operands.append(Operand(found[2], reader.terms(found[3], len(operands), bool(found[1])), bool(found[1])))
        position = found.end()
    results: list[tuple[Term, ...]] = []
    position = 0
    while right[position:].strip():
        found = _RESULT.match(right, position)
        if not found:
            raise ConfigError(f"{right[position:].strip()!r} is not a result of the form [letters]", hint=_HINT)
        results.append(reader.terms(found[1], None, False))
        position = found.end()
    return Notation(text, tuple(operands), tuple(results), reader.roles([operand.name for operand in operands]), reader.sizes)


_HINT = "for example: input[... i] weight[o i] +bias[o] -> [... o]"


class _RuleReader:
    """Collects what the factors of one rule say of its letters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sizes: dict[str, int] = {}
        self._marks: dict[str, str] = {}
        self._gathers: dict[str, list[int]] = {}  # per letter, the operands that are whole along it
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
            raise ConfigError(f"'...' occurs more than once in {self.text!r}", hint=_HINT)
        return found

    def _factor(self, text: str, operand: int | None, added: bool) -> str:
        found = _FACTOR.match(text)
        if not found:
            raise ConfigError(f"{text!r} is not a letter of the rule {self.text!r}", hint=_HINT)
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
                raise ConfigError(f"{text!r} is not a way to combine parts: {', '.join(COMBINES)}")
            self._marks[letter] = how
        elif found["mark"] == "&":
            if operand is None:
                raise ConfigError(f"{text!r} in a result of {self.text!r}: only operands are gathered", hint=_HINT)
            self._gathers.setdefault(letter, []).append(operand)
        elif found["mark"]:
            self._marks[letter] = found["mark"]
        return letter

    def roles(self, names: Sequence[str]) -> dict[str, Role]:
        """The role of each letter; `names` are those of the operands."""
        gathers = {letter: tuple((names[index], index) for index in found) for letter, found in self._gathers.items()}
        return {letter: replace(self._role(letter), gathers=gathers.get(letter, ())) for letter in self._letters}

    def _role(self, letter: str) -> Role:
        mark = self._marks.get(letter, "")
        taken, given = letter in self._in_operands, letter in self._in_results
        if letter in self._doubled:
            return Role("whole", reason="has it twice in one tensor")
        if mark in COMBINES:
            if given:
                raise ConfigError(f"letter {letter!r} is contracted, but occurs in a result of {self.text!r}", hint=_HINT)
            return Role("contracted", mark)
        if mark == "!":
            return READS if taken else MAKES
        if mark == "~":
            return Role("pooled", reason="takes statistics over all of it")
        if letter in self._gathers and not given:
            return READS
        if given and not taken:
            return Role("broadcast") if mark == "^" else Role("whole", reason="makes it without saying how")
        if taken and not given:
            joined = len(self._readers.get(letter, ())) > 1
            return Role("contracted", "sum") if joined else Role("whole", reason="drops it without saying how")
        return Role("kept", grows=mark == "<")


def bind(rule: Notation, op: Op, reading: Reading) -> RuleOutcome:
    """Applies a rule to an op. Raises RuleMisfit: ranks or sizes are not what the rule says."""
    tensors = _operands(rule, op, reading)
    ranks = tuple(None if dims is None else len(dims) for dims in tensors)
    operands, results = _expand(rule, ranks)
    binder = _Binder(rule, reading)
    for simple in (True, False):  # single letters first: products are solved by what they give
        for terms, dims in zip(operands, tensors, strict=True):
            for term, dim in zip(terms, dims or (), strict=False):
                if dim and (len(term) == 1) == simple:
                    binder.bind(term, dim)
        # one head of keys for a group of queries: what is alone in a dimension of size 1 is no factor of another
        if simple:
            binder.settle(term[0] for terms, dims in zip(operands, tensors, strict=True) if dims for term in terms if len(term) == 1)
    binder.settle(letter for terms, dims in zip(operands, tensors, strict=True) if dims is not None for term in terms for letter in term)
    if len(results) != len(op.outputs):
        raise RuleMisfit(f"it has {len(op.outputs)} results where its rule has {len(results)}")
    made = tuple(binder.result(terms, spec.shape_at(ROWS)) for terms, spec in zip(results, op.outputs, strict=True))
    letters = binder.letters()
    if not _may_gather(letters, op, reading):
        letters = [replace(letter, role=replace(letter.role, gathers=())) for letter in letters]
    return RuleOutcome(made, tuple(letters))


def _may_gather(letters: Iterable[Letter], op: Op, reading: Reading) -> bool:
    """Whether operands can be gathered for the parts of others: one tensor cannot be both, and they must be told by their places."""
    places = {place for letter in letters for _, place in letter.role.gathers}
    if not places:
        return True
    operands = placed_operands(op)
    if any(each is not None and reading.tensor(each) is None for each in operands):
        return False
    whole = {each for place, each in enumerate(operands) if place in places and each is not None}
    return whole.isdisjoint(each for place, each in enumerate(operands) if place not in places)


class _Binder:
    """The letters of one op while they are bound."""

    def __init__(self, rule: Notation, reading: Reading) -> None:
        self.rule = rule
        self.atoms = reading.atoms
        self.bound: dict[str, Dim] = {}
        self.clashed: list[tuple[str, Dim]] = []

    def bind(self, term: Term, dim: Dim) -> None:
        """Binds a term to a dimension of an operand, whose size is not 1: sizes of 1 are broadcast and bind nothing."""
        if not term:
            raise RuleMisfit("a dimension that should have size 1 has not")
        if len(term) == 1 and term[0] not in self.bound and term[0] not in self.rule.sizes:
            self.bound[term[0]] = dim
            return
        known = self._solve(term, self.atoms.size(dim))
        try:
            self.atoms.unify(known, dim)
        except Clash:
            self.clashed += [(letter, dim) for letter in term]

    def settle(self, letters: Iterable[str]) -> None:
        """Letters of operands that are still unbound stand for sizes of 1."""
        for letter in letters:
            self.bound.setdefault(letter, ())

    def result(self, terms: tuple[Term, ...], sizes: tuple[int, ...]) -> Dims:
        """The dimensions of a result; letters that no operand bound get fresh ones."""
        if len(terms) != len(sizes):
            raise RuleMisfit(f"a result has {len(sizes)} dimensions where its rule has {len(terms)}")
        return tuple(self._solve(term, size) if term or size != 1 else () for term, size in zip(terms, sizes, strict=True))

    def letters(self) -> list[Letter]:
        clashed = {letter for letter, _ in self.clashed}  # whole on both sides: parts of one would meet all of the other
        found = [Letter(letter, CLASHES if letter in clashed else self.rule.role(letter), dim) for letter, dim in self.bound.items()]
        return found + [Letter(letter, CLASHES, dim) for letter, dim in self.clashed]

    def _solve(self, term: Term, size: int) -> Dim:
        """The dimension, of this size, that a term stands for; binds the one letter that is still unknown."""
        if len(term) == 1 and term[0] in self.bound:  # most are
            dim = self.bound[term[0]]
            if self.atoms.size(dim) != size or not size:
                raise RuleMisfit("its sizes do not fit its rule")
            return dim
        unknown = [letter for letter in term if letter not in self.bound]
        for letter in [letter for letter in unknown if letter in self.rule.sizes]:
            self.bound[letter] = self.atoms.fresh(self.rule.sizes[letter])
            unknown.remove(letter)
        known = prod(self.atoms.size(self.bound[letter]) for letter in term if letter in self.bound)
        if len(unknown) > 1 or not known or size % known or (not unknown and known != size):
            raise RuleMisfit("its sizes do not fit its rule")
        for letter in unknown:
            self.bound[letter] = self.atoms.fresh(size // known)
        return tuple(atom for letter in term for atom in self.bound[letter])


def _operands(rule: Notation, op: Op, reading: Reading) -> list[Dims | None]:
    """The op's tensors in the rule's order: positional ones (lists in place), then keywords by name; None if absent."""
    found: list[Dims | None] = []
    for argument in _flat(op.args):
        if argument is None:
            found.append(None)
        elif (dims := reading.tensor(argument)) is not None:
            found.append(dims)
    named = {key: dims for key, value in op.kwargs if (dims := reading.tensor(value)) is not None}
    wanted = rule.operands
    # an absent optional argument that is no tensor may have left a None too many
    extra = [index for index, dims in enumerate(found) if index >= len(wanted)]
    if any(found[index] is not None for index in extra):
        raise RuleMisfit(f"it reads {sum(dims is not None for dims in found)} tensors where its rule has {len(wanted)}")
    found = found[: len(wanted)]
    return found + [named.get(operand.name) for operand in wanted[len(found) :]]


def placed_operands(op: Op) -> list[Ref | None]:
    """What an op reads in place, in order of the operands of its rule, where none of it is a number; None if absent."""
    return [each for each in _flat(op.args) if each is None or isinstance(each, Ref)]


def _flat(arguments: tuple[Argument, ...]) -> list[Argument]:
    """Arguments with lists of tensors flattened; lists of numbers vanish with the numbers."""
    found: list[Argument] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            found += [item for item in argument if isinstance(item, Ref)]
        elif argument is None or isinstance(argument, Ref):
            found.append(argument)
    return found


@lru_cache(maxsize=4096)
def _expand(rule: Notation, ranks: tuple[int | None, ...]) -> tuple[list[tuple[Term, ...]], list[tuple[Term, ...]]]:
    """The terms of operands and results for these ranks: `...` becomes `...2 ...1`, numbered from the right."""
    longest = 0
    operands = []
    for operand, rank in zip(rule.operands, ranks, strict=True):
        if rank is None:
            operands.append(operand.terms)
            continue
        length = _ellipsis_length(operand, rank)
        longest = max(longest, length)
        terms = _fill(operand.terms, length)
        operands.append(terms[len(terms) - rank :])
    return operands, [_fill(terms, longest) for terms in rule.results]


def _ellipsis_length(operand: Operand, rank: int) -> int:
    """How many dimensions `...` stands for. An added operand may lack leading dimensions: it is broadcast."""
    length = rank - sum("..." not in term for term in operand.terms)
    if operand.added and length < 0:
        return 0
    if length < 0 or (length > 0 and not any("..." in term for term in operand.terms)):
        raise RuleMisfit(f"its {operand.name} has {rank} dimensions where its rule has {len(operand.terms)}")
    return length


def _fill(terms: tuple[Term, ...], length: int) -> tuple[Term, ...]:
    filled: list[Term] = []
    for term in terms:
        filled += [(f"...{index}",) for index in range(length, 0, -1)] if "..." in term else [term]
    return tuple(filled)
