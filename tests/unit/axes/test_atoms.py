"""Atoms: refinement, unification and concatenation keep dimensions what they are."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.axes.graphs import Build
from tests.unit.axes.law import positions
from whale.axes.atoms import ROWS, Atoms, Clash
from whale.axes.discover import read

FACTORS = st.permutations([2, 2, 3, 5]).flatmap(lambda factors: st.just(tuple(factors)))


def grouped(factors: tuple[int, ...], shards: tuple[int, ...]) -> list[int]:
    """Products of consecutive factors."""
    bounds = sorted({0, len(factors), *(shard % (len(factors) + 1) for shard in shards)})
    return [prod(factors[a:b]) for a, b in pairwise(bounds)]


@at_most(50)
@given(st.lists(st.tuples(FACTORS, st.tuples(st.integers(0, 9), st.integers(0, 9))), min_size=1, max_size=5))
def test_a_dimension_is_the_product_of_all_its_factorings(factorings: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    atoms = Atoms()
    whole = atoms.fresh(60)
    agreed = []
    for factors, shards in factorings:
        sizes = grouped(factors, shards)
        parts = [atoms.fresh(size) for size in sizes]
        joined = tuple(atom for part in parts for atom in part)
        try:
            atoms.unify(whole, joined)
        except Clash:
            continue
        agreed.append((sizes, parts, joined))
    for sizes, parts, joined in agreed:
        assert atoms.leaves(joined) == atoms.leaves(whole)
        assert [atoms.size(part) for part in parts] == sizes
        assert [prod(atoms.size((leaf,)) for leaf in atoms.leaves(part)) for part in parts] == sizes


@at_most(50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_partition_is_the_inverse_of_concatenate(sizes: list[int]) -> None:
    atoms = Atoms()
    pieces = [atoms.fresh(size) for size in sizes]
    joined = atoms.concatenate(pieces)
    assert atoms.size(joined) == sum(sizes)
    parts = atoms.partition(joined, sizes)
    assert [atoms.leaves(part) for part in parts] == [atoms.leaves(piece) for piece in pieces]
    atoms.unify(atoms.concatenate(parts), joined)


def test_refinement_reaches_every_dimension_that_has_the_atom() -> None:
    atoms = Atoms()
    a, b = atoms.fresh(24), atoms.fresh(24)
    atoms.unify(a, b)
    atoms.unify(a, atoms.fresh(4) + atoms.fresh(6))
    atoms.unify(b, atoms.fresh(2) + atoms.fresh(12))
    assert [atoms.size((leaf,)) for leaf in atoms.leaves(a)] == [2, 2, 6]
    assert atoms.leaves(a) == atoms.leaves(b)


def test_factors_that_do_not_fit_clash() -> None:
    atoms = Atoms()
    dim = atoms.fresh(2) + atoms.fresh(3)
    with pytest.raises(Clash):
        atoms.unify(dim, atoms.fresh(3) + atoms.fresh(2))


def test_rows_are_no_constant() -> None:
    atoms = Atoms()
    rows = atoms.fresh(ROWS)
    both = rows + atoms.fresh(6)
    atoms.unify(both, atoms.fresh(ROWS) + atoms.fresh(2) + atoms.fresh(3))
    assert atoms.leaves(rows) == atoms.leaves(both)[:1]
    with pytest.raises(Clash):
        atoms.unify(atoms.fresh(6) + atoms.fresh(ROWS), both)


def test_pieces_of_a_concatenation_share_an_inner_factor() -> None:
    atoms = Atoms()
    q, k, v = atoms.fresh(16), atoms.fresh(8), atoms.fresh(8)
    fused = atoms.concatenate([q, k, v])
    heads, size = atoms.fresh(8), atoms.fresh(4)
    atoms.unify(fused, heads + size)
    assert [atoms.size((leaf,)) for leaf in atoms.leaves(fused)] == [8, 4]
    assert [atoms.size(piece) for piece in atoms.pieces(atoms.leaves(heads)[0])] == [4, 2, 2]
    assert atoms.leaves(q)[1:] == atoms.leaves(size)


def test_a_split_of_a_piece_is_a_nested_concatenation() -> None:
    atoms = Atoms()
    whole = atoms.fresh(10)
    first, second = atoms.partition(whole, [7, 3])
    atoms.partition(first, [5, 2])
    assert [atoms.size(piece) for piece in atoms.pieces(atoms.leaves(whole)[0])] == [5, 2, 3]
    assert atoms.leaves(atoms.partition(whole, [5, 2, 3])[2]) == atoms.leaves(second)


@at_most(50)
@given(
    st.permutations([2, 2, 3, 5]),
    st.lists(st.tuples(FACTORS, st.tuples(st.integers(0, 9), st.integers(0, 9)), st.randoms(use_true_random=False)), max_size=4),
)
def test_chains_of_views_and_permutations_move_the_parts_as_torch_does(start, steps) -> None:  # type: ignore[no-untyped-def]
    """The elements at a part of an axis are the same elements in every tensor of the chain."""
    tensor = torch.arange(60).reshape(tuple(start))
    build = Build()
    name = build.input("x", *tensor.shape)
    chain = [(name.op, tensor)]
    for factors, shards, random in steps:
        tensor = tensor.reshape(grouped(factors, shards))
        name = build.call("reshape.default", name, tuple(tensor.shape), out=tuple(tensor.shape))
        chain.append((name.op, tensor))
        order = list(range(tensor.dim()))
        random.shuffle(order)
        tensor = tensor.permute(order)
        name = build.call("permute.default", name, tuple(order), out=tuple(tensor.shape))
        chain.append((name.op, tensor))
    reading, outcomes = read(build.graph())
    atoms = reading.atoms
    seen: dict[tuple[int, int], set[int]] = {}
    for op, values in chain:
        dims = outcomes[op].results[0]
        for leaf in {leaf for dim in dims for leaf in atoms.leaves(dim)}:
            for place in range(atoms.size((leaf,))):
                part = values
                for axis, dim in enumerate(dims):
                    part = part.index_select(axis, torch.tensor(positions(atoms, dim, leaf, (place, place + 1))))
                elements = set(part.flatten().tolist())
                assert seen.setdefault((leaf, place), elements) == elements


def test_boundaries_of_uneven_parts_are_kept() -> None:
    atoms = Atoms()
    dim = atoms.fresh(12) + atoms.fresh(5)
    parts = atoms.partition(dim, [35, 20, 5])
    assert [atoms.size(part) for part in parts] == [35, 20, 5]
    assert list(accumulate(atoms.size(part) for part in parts))[-1] == atoms.size(dim)
    with pytest.raises(Clash):
        atoms.partition(dim, [33, 27])
