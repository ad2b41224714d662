"""Resharding: any sharding becomes any other, what is copied is no more than what lacks, and gradients go back by the transpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sharding.shardings import SIZES, Arrays, carry_out, run, scatter, shardings, spaces, value
from whale.sharding import IndexSpace, Move, Region, Sharding, Step, moves, reshard

SEEDS = st.integers(0, 99)


def received(steps: Sequence[Step], space: IndexSpace) -> Counter[int]:
    """Elements that arrive at each device."""
    found: Counter[int] = Counter()
    for step in steps:
        for (_, device), count in step.elements(space).items():
            found[device] += count
    return found


@given(shardings(), shardings(terms="groups"), spaces, SEEDS)
def test_a_tensor_is_the_same_in_every_sharding(source: Sharding, target: Sharding, space: IndexSpace, seed: int) -> None:
    arrays = scatter(source, space, seed)
    there = run(reshard(source, target), source, target, space, arrays)
    assert np.array_equal(value(target, space, there), value(source, space, arrays))


@given(shardings(terms="none"), shardings(terms="none"), spaces, SEEDS)
def test_there_and_back_nothing_has_changed(source: Sharding, target: Sharding, space: IndexSpace, seed: int) -> None:
    arrays = scatter(source, space, seed)
    there = run(reshard(source, target), source, target, space, arrays)
    back = run(reshard(target, source), target, source, space, there)
    assert all(np.array_equal(back[device], arrays[device]) for device in source.mesh)


@given(shardings(terms="none"), shardings(terms="none"), spaces)
def test_every_device_receives_what_it_lacks_and_no_more(source: Sharding, target: Sharding, space: IndexSpace) -> None:
    arrived = received(reshard(source, target), space)
    for device, wanted in target.held.items():
        has = space.num_elements(source.held[device].intersect(wanted)) if device in source.held else 0
        assert arrived[device] == space.num_elements(wanted) - has


@given(shardings(), shardings(terms="groups"), spaces, SEEDS)
def test_the_adjoint_of_a_step_is_its_transpose(source: Sharding, target: Sharding, space: IndexSpace, seed: int) -> None:
    generator = np.random.default_rng(seed)

    def drawn(ends: Sequence[tuple[int, Region]]) -> Arrays:
        return {device: generator.standard_normal(space.shape(region)) for device, region in ends}

    def product(a: Arrays, b: Arrays) -> float:
        return sum(float((a[device] * b[device]).sum()) for device in a)

    for step in reshard(source, target):
        values, gradients = drawn(step.before), drawn(step.after)
        forward, backward = carry_out(step, space, values), carry_out(step.adjoint, space, gradients)
        assert product(forward, gradients) == pytest.approx(product(values, backward))
        assert step.adjoint.adjoint == step


@given(shardings(terms="none"))
def test_what_a_device_has_it_takes_from_itself(sharding: Sharding) -> None:
    assert all(move.source == move.target for move in moves(sharding, sharding))
    assert reshard(sharding, sharding) == ()


@given(shardings())
def test_pieces_are_the_whole_and_each_has_its_owners(sharding: Sharding) -> None:
    pieces = sharding.pieces
    assert all(a.region.intersect(b.region).is_empty for index, a in enumerate(pieces) for b in pieces[:index])
    assert sum(piece.region.volume for piece in pieces) == sharding.hull.volume
    for piece in pieces:
        assert list(piece.owners) == sorted(device for device, held in sharding.held.items() if held.contains(piece.region))
        assert {sharding.own_terms[sharding.mesh.index(owner)] for owner in piece.contributors} == {
            sharding.own_terms[sharding.mesh.index(owner)] for owner in piece.owners
        }


def heads(*sizes: int) -> Sharding:
    return Sharding.along(range(len(sizes)), "heads", sizes)


def all_terms(num_devices: int) -> Sharding:
    return Sharding(tuple(range(num_devices)), (Region(),) * num_devices, tuple(range(num_devices)))


@pytest.mark.parametrize(
    ("source", "target", "kind", "arrives"),
    [
        (heads(3, 1), Sharding.whole(range(2)), "all-gather", {0: 10, 1: 30}),
        (Sharding.whole(range(2)), heads(3, 1), "slice", {}),
        (heads(3, 1), Sharding.along(range(2), "batch", (1, 4)), "all-to-all", {0: 2, 1: 24}),
        (all_terms(2), Sharding.whole(range(2)), "all-reduce", {0: 40, 1: 40}),
        (all_terms(3), heads(2, 1, 1), "reduce-scatter", {0: 40, 1: 20, 2: 20}),
        (heads(3, 1), Sharding.along((4, 5, 6), "heads", (1, 1, 2)), "send", {4: 10, 5: 10, 6: 20}),
    ],
)
def test_the_table_of_steps(source: Sharding, target: Sharding, kind: str, arrives: dict[int, int]) -> None:
    """10 elements per head, 8 per row of the batch."""
    space = IndexSpace((("batch",), ("heads",), ("width",)), SIZES)
    steps = reshard(source, target)
    assert {step.kind for step in steps} == {kind}
    assert {device: count for device, count in received(steps, space).items() if count} == arrives


def test_a_ring_sums_what_replicas_hold_in_unlike_shards() -> None:
    regions = tuple(Region((("heads", start, stop),)) for start, stop in ((0, 3), (3, 4), (0, 2), (2, 4)))
    gradients = Sharding((0, 1, 2, 3), regions, (0, 1, 2, 3))
    assert [(step.kind, step.participants) for step in reshard(gradients, gradients.final)] == [
        ("all-reduce", (0, 2)),
        ("all-reduce", (0, 3)),
        ("all-reduce", (1, 3)),
    ]


def test_copies_spread_and_stay_on_a_host_where_they_can() -> None:
    spread = moves(Sharding.whole((0, 1)), Sharding.whole((4, 5, 6, 7)))
    assert Counter(move.source for move in spread) == {0: 2, 1: 2}
    near = moves(Sharding.whole((0, 1)), Sharding.whole((4, 5)), {0: "a", 1: "b", 4: "b", 5: "a"})
    assert [move.source for move in near] == [1, 0]


@given(st.integers(1, 4), st.integers(1, 7))
def test_no_holder_sends_more_than_one_copy_more_than_another(num_holders: int, num_targets: int) -> None:
    found = moves(Sharding.whole(range(num_holders)), Sharding.whole(range(10, 10 + num_targets)))
    sent = Counter(move.source for move in found)
    assert max(sent.values()) - min(sent[holder] for holder in range(num_holders)) <= 1


def test_the_picture_of_moves() -> None:
    found = moves(Sharding.along((0, 1), "batch", (5, 3)), Sharding.along((2, 3), "batch", (4, 4)))
    assert found == (
        Move(0, 2, Region((("batch", 0, 4),))),
        Move(0, 3, Region((("batch", 4, 5),))),
        Move(1, 3, Region((("batch", 5, 8),))),
    )


def test_prints() -> None:
    assert str(heads(3, 1)) == "heads[0:3] on {0} | heads[3:4] on {1}"
    assert str(all_terms(2)) == "whole on {0 + 1}"
    assert str(Sharding.whole((0, 1))) == "whole on {0 1}"
    assert str(reshard(heads(3, 1), Sharding.along((2,), "heads", (4,)))[0]) == "send over {0 1 2}: 0 -> 2 heads[0:3], 1 -> 2 heads[3:4]"
