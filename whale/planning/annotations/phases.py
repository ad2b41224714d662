"""Stages of TaskGraphs that share a virtual device: as many as their ops alternate between replicate and split.

    replicate   r r . . r r . . r          ops in order of need, on one virtual device
    split       . . s s . . s s .
    stages      0 0 1 1 2 2 3 3 4          each a stage of its own; the devices run them one after another

Where only replicates share a virtual device they are one stage. Ops that read nothing of other phases (a mask, the counter of a
normalisation) make no stage of their own before the first that does: they run with the next ops of their kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.planning.structure.structure import Structure


@dataclass(frozen=True, slots=True)
class Phase:
    """Ops that run together: on virtual device `place`, after `level` changes of `kind` (a number per way to run)."""

    place: int
    level: int
    kind: int


def find_phases(
    structure: Structure, task_graph_of: Mapping[str, int], place_of: Sequence[int], kind_of: Sequence[int]
) -> dict[str, Phase]:
    """The phase of every scoped op.

    Args:
        task_graph_of: per scoped op, its TaskGraph.
        place_of: per TaskGraph, its virtual device.
        kind_of: per TaskGraph, a number that is equal for those that may run together.
    """
    phases: list[Phase | None] = [None] * len(structure.atoms)
    for atom in structure.order:
        before = [phase for source in structure.producers[atom] if (phase := phases[source]) is not None]
        own = [task_graph_of[name] for name in structure.atoms[atom] if name in task_graph_of]
        if own:
            place, kind = place_of[own[-1]], kind_of[own[-1]]
            levels = [phase.level + (phase.kind != kind) for phase in before if phase.place == place]
            phases[atom] = Phase(place, max(levels, default=0), kind)
        else:
            phases[atom] = max(before, key=lambda phase: (phase.place, phase.level), default=None)
    _join_next(structure, phases)
    found = {name: phase for name, atom in structure.atom_of.items() if name in task_graph_of and (phase := phases[atom]) is not None}
    for name, task_graph in task_graph_of.items():  # what is repeated anywhere
        found.setdefault(name, Phase(place_of[task_graph], 0, kind_of[task_graph]))
    return found


def _join_next(structure: Structure, phases: list[Phase | None]) -> None:
    """Moves the ops of a phase that reads no other to the next phase of its kind, where no op between needs one of them."""
    consumers: dict[int, list[Phase]] = {}
    reads_others: set[Phase] = set()
    for atom, sources in enumerate(structure.producers):
        own = phases[atom]
        for source in sources:
            other = phases[source]
            if own is not None and other is not None and other != own:
                consumers.setdefault(source, []).append(own)
                reads_others.add(own)
    for first in {phase for phase in phases if phase is not None and phase.level == 0} - reads_others:
        later = [phase for phase in phases if phase and (phase.place, phase.kind) == (first.place, first.kind) and phase.level > 0]
        if not later:
            continue
        following = min(later, key=lambda phase: phase.level)
        atoms = [atom for atom, phase in enumerate(phases) if phase == first]
        if all(_may_follow(reader, following) for atom in atoms for reader in consumers.get(atom, ())):
            for atom in atoms:
                phases[atom] = following


def _may_follow(reader: Phase, made: Phase) -> bool:
    """Whether ops of one phase may read what another makes."""
    return reader.place != made.place or reader.level > made.level or reader == made
