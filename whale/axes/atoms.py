"""Atoms: what tensor dimensions are made of, refined and unified while the graph is read.

A dimension is an ordered product of atoms, outermost first. An atom is a leaf, a product into which a view has cut it, or a
concatenation of dimensions. Two dimensions that an op takes as equal are unified atom by atom:

    [ 24 ]                     a view reads 24 as 6 x 4, another as 2 x 12:
    [ 6       | 4 ]            the 24 is refined to 2 x 3 x 4, wherever it occurs
    [ 2 | 3   | 4 ]

    [ 512     | 128 | 128 ]    an uneven split: the 768 is a concatenation of three dimensions, refined one by one

A dimension of size 1 is the empty product. The number of rows is unknown here, and stands as a prime that divides no other size:
then plain arithmetic tells `rows x 6` from every constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

ROWS = 2**61 - 1  # size of the batch axis during discovery: a prime larger than any other size

Dim = tuple[int, ...]  # a dimension: the numbers of its atoms, outermost first


class Clash(Exception):
    """Two factorings of one dimension have no common refinement (``2 x 3`` and ``3 x 2``)."""


class Atoms:
    """All atoms of one graph. Numbers stay valid while it is read; `leaves` gives their current refinement."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._parent: list[int] = []  # union-find over equal atoms
        self._factors: dict[int, Dim] = {}  # a root that was refined to a product
        self._pieces: dict[int, tuple[Dim, ...]] = {}  # a root that is a concatenation

    def fresh(self, size: int) -> Dim:
        """A new dimension, not equal to any other yet."""
        if size == 1:
            return ()
        self._size.append(size)
        self._parent.append(len(self._parent))
        return (len(self._parent) - 1,)

    def size(self, dim: Dim) -> int:
        return self._size[dim[0]] if len(dim) == 1 else prod([self._size[atom] for atom in dim])  # most have one

    def leaves(self, dim: Dim) -> Dim:
        """The dimension as atoms that are refined no further, one number per set of equal atoms."""
        found: list[int] = []
        for atom in dim:
            root = self._find(atom)
            factors = self._factors.get(root)
            if factors is None:
                found.append(root)
            else:
                found += self.leaves(factors)
        return tuple(found)

    def pieces(self, leaf: int) -> tuple[Dim, ...]:
        """The dimensions that a leaf concatenates, nested ones flattened; empty for a plain leaf."""
        flat: list[Dim] = []
        for piece in self._pieces.get(leaf, ()):
            inner = self.leaves(piece)
            nested = self.pieces(inner[0]) if len(inner) == 1 else ()
            flat += nested or (inner,)
        return tuple(flat)

    def unify(self, left: Dim, right: Dim) -> None:
        """Makes two dimensions of one size equal by refining both.

        Raises:
            Clash: their factors do not fit. Outer factors that did fit stay unified.
        """
        if left == right:
            return
        lefts, rights = list(reversed(left)), list(reversed(right))
        while lefts and rights:
            a, b = self._pop_leaf(lefts), self._pop_leaf(rights)
            if a == b:
                continue
            size_a, size_b = self._size[a], self._size[b]
            if size_a == size_b:
                self._merge(a, b)
                continue
            larger, rest, outer = (a, lefts, size_b) if size_a > size_b else (b, rights, size_a)
            self._refine(larger, outer)
            (rights if larger == a else lefts).append(b if larger == a else a)
            rest.append(larger)
        if lefts or rights:
            raise Clash

    def concatenate(self, pieces: Sequence[Dim]) -> Dim:
        """The concatenation of dimensions. Pieces of one size are unified: ``n`` of them are ``n x piece``, or `Clash`."""
        if len(pieces) == 1:
            return pieces[0]
        sizes = [self.size(piece) for piece in pieces]
        if len(set(sizes)) == 1:
            for piece in pieces[1:]:
                self.unify(pieces[0], piece)
            return self.fresh(len(pieces)) + pieces[0]
        joined = self.fresh(sum(sizes))
        self._pieces[joined[0]] = tuple(pieces)
        return joined

    def partition(self, dim: Dim, sizes: Sequence[int]) -> tuple[Dim, ...]:
        """The inverse of `concatenate`: consecutive parts of a dimension. Raises Clash: a boundary falls inside a factor."""
        if len(sizes) == 1:
            return (dim,)
        if len(set(sizes)) == 1:
            part = self.fresh(sizes[0])
            self.unify(dim, self.fresh(len(sizes)) + part)
            return (part,) * len(sizes)
        head, *tail = self.leaves(dim)
        inner = self.size(tuple(tail))
        if not inner or any(size % inner for size in sizes):
            raise Clash
        return tuple(part + tuple(tail) for part in self._cut(head, [size // inner for size in sizes]))

    def outer(self, dim: Dim, size: int) -> Dim:
        """The outermost atoms of a dimension, whose product is `size`; a refinement must have put a boundary there."""
        leaves = self.leaves(dim)
        count, product = 0, 1
        while product < size:
            product *= self._size[leaves[count]]
            count += 1
        assert product == size
        return leaves[:count]

    def _cut(self, leaf: int, sizes: Sequence[int]) -> Iterable[Dim]:
        if leaf not in self._pieces:
            self._pieces[leaf] = tuple(self.fresh(size) for size in sizes)
            return self._pieces[leaf]
        pieces = self.pieces(leaf)
        ends = list(accumulate(self.size(piece) for piece in pieces))
        parts, first = [], 0
        for stop in accumulate(sizes):
            if stop not in ends:
                raise Clash
            last = ends.index(stop) + 1
            parts.append(self.concatenate(pieces[first:last]))
            first = last
        return parts

    def _find(self, atom: int) -> int:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom

    def _pop_leaf(self, stack: list[int]) -> int:
        while True:
            root = self._find(stack.pop())
            factors = self._factors.get(root)
            if factors is None:
                return root
            stack += reversed(factors)

    def _merge(self, a: int, b: int) -> None:
        if a in self._pieces and b in self._pieces:
            ours, theirs = self.pieces(a), self.pieces(b)
            if [self.size(piece) for piece in ours] != [self.size(piece) for piece in theirs]:
                raise Clash
            for left, right in zip(ours, theirs, strict=True):
                self.unify(left, right)
            a, b = self._find(a), self._find(b)
        keep, drop = (b, a) if b in self._pieces else (a, b)
        self._parent[drop] = keep

    def _refine(self, leaf: int, outer: int) -> None:
        """Cuts a leaf into ``outer x (the rest)``."""
        size = self._size[leaf]
        if not outer or size % outer:
            raise Clash
        inner = self.fresh(size // outer)
        if leaf not in self._pieces:
            self._factors[leaf] = self.fresh(outer) + inner
            return
        # a concatenation whose pieces share an inner factor: (a x r | b x r) = (a | b) x r
        quotients = []
        for piece in self.pieces(leaf):
            if not self.size(inner) or self.size(piece) % self.size(inner):
                raise Clash
            quotients.append(self.fresh(self.size(piece) // self.size(inner)))
            self.unify(piece, quotients[-1] + inner)
        self._factors[leaf] = self.concatenate(quotients) + inner
