"""Classes of alike workers, links and wires: the coarsest equitable partition, as a plain refinement finds it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from whale.estimate.step.alike import Wire, classify


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[Wire]]:
    """Some workers and links, and wires between them, no two of which join the same over the same links; many are alike."""
    workers = draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
    links = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
    wires = dict[object, Wire]()
    for _ in range(draw(st.integers(0, 10))):
        parties = draw(st.lists(st.integers(0, len(workers) - 1), min_size=2, max_size=3, unique=True))
        passed = draw(st.lists(st.integers(0, len(links) - 1), max_size=2, unique=True))
        roles = tuple((draw(st.integers(0, 1)),) for _ in parties)
        wire = Wire(draw(st.integers(0, 1)), tuple(parties), roles, tuple((link, 1.0) for link in passed))
        wires[wire.parties, wire.links] = wire
    return workers, links, [*wires.values()]


@given(steps())
def test_classes_are_those_of_a_plain_refinement(step: tuple[list[int], list[int], list[Wire]]) -> None:
    workers, links, wires = step
    found = classify(workers, links, wires)
    assert (found.workers, found.links, found.wires) == tuple(map(_numbered, _refined(workers, links, wires)))


@given(steps())
def test_links_by_themselves_are_part_of_what_a_wire_is(step: tuple[list[int], list[int], list[Wire]]) -> None:
    workers, links, wires = step
    found = classify(workers, links, wires, by_links=False)
    apart = [
        Wire((wire.kind, tuple(sorted((links[link], load) for link, load in wire.links))), wire.parties, wire.roles, ()) for wire in wires
    ]
    of_worker, _, of_wire = map(_numbered, _refined(workers, [], apart))
    met = [
        (own, tuple(sorted((of_wire[n], load) for n, wire in enumerate(wires) for link, load in wire.links if link == number)))
        for number, own in enumerate(links)
    ]
    assert (found.workers, found.wires) == (of_worker, of_wire)
    assert found.links == _numbered(met)


def _refined(workers: Sequence[Hashable], links: Sequence[Hashable], wires: Sequence[Wire]) -> list[list[Hashable]]:
    """The colours, each told apart by sorted lists of what is met, as often as there are things to tell apart."""
    of_worker, of_link, of_wire = map(_numbered, (workers, links, [wire.kind for wire in wires]))
    for _ in range(len(workers) + len(links) + len(wires)):
        of_wire = _numbered(
            [
                (
                    of_wire[number],
                    tuple(sorted((role, of_worker[party]) for party, role in wire.with_roles)),
                    tuple(sorted((of_link[link], load) for link, load in wire.links)),
                )
                for number, wire in enumerate(wires)
            ]
        )
        of_worker = _numbered(
            [
                (
                    colour,
                    tuple(sorted((of_wire[n], role) for n, wire in enumerate(wires) for party, role in wire.with_roles if party == own)),
                )
                for own, colour in enumerate(of_worker)
            ]
        )
        of_link = _numbered(
            [
                (colour, tuple(sorted((of_wire[n], load) for n, wire in enumerate(wires) for link, load in wire.links if link == own)))
                for own, colour in enumerate(of_link)
            ]
        )
    return [list(of_worker), list(of_link), [(of_wire[number], wire.roles) for number, wire in enumerate(wires)]]


def _numbered(colours: Sequence[Hashable]) -> tuple[int, ...]:
    known: dict[Hashable, int] = {}
    return tuple(known.setdefault(colour, len(known)) for colour in colours)
