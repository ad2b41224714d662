"""Stages of TaskGraphs that share a virtual device: as many as their ops alternate between replicate and split.

    replicate   r r . . r r . . r          ops in order of need, on one virtual device
    split       . . s s . . s s .
    stages      0 0 1 1 2 2 3 3 4          each a stage of its own; the devices run them one after another

Where only replicates share a virtual device they are one stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.planning.structure import Structure


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
    found = {name: phase for name, atom in structure.atom_of.items() if name in task_graph_of and (phase := phases[atom]) is not None}
    for name, task_graph in task_graph_of.items():  # what is repeated anywhere
        found.setdefault(name, Phase(place_of[task_graph], 0, kind_of[task_graph]))
    return found
