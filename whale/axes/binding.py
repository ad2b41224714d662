"""Binds a rule in the notation to one op: letters to dimensions, by position, unifying where a letter comes twice."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from whale.axes.atoms import Clash, Dim
from whale.axes.notation import Notation, Operand, Term
from whale.axes.outcome import CLASHES, Dims, Letter, Misfit, Outcome, Reading, sizes_of
from whale.ir.graph import Argument, Op, Ref


def bind(rule: Notation, op: Op, reading: Reading) -> Outcome:
    """Applies a rule to an op.

    Raises:
        Misfit: ranks or sizes are not what the rule says.
    """
    tensors = _operands(rule, op, reading)
    ranks = tuple(None if dims is None else len(dims) for dims in tensors)
    operands, results = _expand(rule, ranks)
    binder = _Binder(rule, reading)
    for simple in (True, False):  # single letters first: products are solved by what they give
        for terms, dims in zip(operands, tensors, strict=True):
            for term, dim in zip(terms, dims or (), strict=False):
                if dim and (len(term) == 1) == simple:
                    binder.bind(term, dim)
    binder.settle(letter for terms, dims in zip(operands, tensors, strict=True) if dims is not None for term in terms for letter in term)
    if len(results) != len(op.outputs):
        raise Misfit(f"it has {len(op.outputs)} results where its rule has {len(results)}")
    made = tuple(binder.result(terms, sizes_of(spec)) for terms, spec in zip(results, op.outputs, strict=True))
    return Outcome(made, tuple(binder.letters()))


class _Binder:
    """The letters of one op while they are bound."""

    def __init__(self, rule: Notation, reading: Reading) -> None:
        self.rule = rule
        self.atoms = reading.atoms
        self.bound: dict[str, Dim] = {}
        self.clashed: list[tuple[str, Dim]] = []

    def bind(self, term: Term, dim: Dim) -> None:
        """Takes a dimension of an operand, whose size is not 1, for a term. Sizes of 1 are broadcast and bind nothing."""
        if not term:
            raise Misfit("a dimension that should have size 1 has not")
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
            raise Misfit(f"a result has {len(sizes)} dimensions where its rule has {len(terms)}")
        return tuple(self._solve(term, size) if term or size != 1 else () for term, size in zip(terms, sizes, strict=True))

    def letters(self) -> list[Letter]:
        clashed = {letter for letter, _ in self.clashed}  # whole on both sides: parts of one would meet all of the other
        found = [Letter(letter, CLASHES if letter in clashed else self.rule.role(letter), dim) for letter, dim in self.bound.items()]
        return found + [Letter(letter, CLASHES, dim) for letter, dim in self.clashed]

    def _solve(self, term: Term, size: int) -> Dim:
        """The dimension that a term stands for, where it must have this size; binds the one letter that is still unknown."""
        if len(term) == 1 and term[0] in self.bound:  # most are
            dim = self.bound[term[0]]
            if self.atoms.size(dim) != size or not size:
                raise Misfit("its sizes do not fit its rule")
            return dim
        unknown = [letter for letter in term if letter not in self.bound]
        for letter in [letter for letter in unknown if letter in self.rule.sizes]:
            self.bound[letter] = self.atoms.fresh(self.rule.sizes[letter])
            unknown.remove(letter)
        known = prod(self.atoms.size(self.bound[letter]) for letter in term if letter in self.bound)
        if len(unknown) > 1 or not known or size % known or (not unknown and known != size):
            raise Misfit("its sizes do not fit its rule")
        for letter in unknown:
            self.bound[letter] = self.atoms.fresh(size // known)
        return tuple(atom for letter in term for atom in self.bound[letter])


def _operands(rule: Notation, op: Op, reading: Reading) -> list[Dims | None]:
    """The op's tensors in the rule's order: positional ones (lists in place), then keywords by name; None where absent."""
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
        raise Misfit(f"it reads {sum(dims is not None for dims in found)} tensors where its rule has {len(wanted)}")
    found = found[: len(wanted)]
    return found + [named.get(operand.name) for operand in wanted[len(found) :]]


def _flat(arguments: tuple[Argument, ...]) -> list[Argument]:
    """Arguments with lists of tensors in place; lists of numbers vanish with the numbers."""
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
        raise Misfit(f"its {operand.name} has {rank} dimensions where its rule has {len(operand.terms)}")
    return length


def _fill(terms: tuple[Term, ...], length: int) -> tuple[Term, ...]:
    filled: list[Term] = []
    for term in terms:
        filled += [(f"...{index}",) for index in range(length, 0, -1)] if "..." in term else [term]
    return tuple(filled)
