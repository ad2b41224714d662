"""From scopes to TaskGraphs, and from TaskGraphs to stages.

TaskGraphs on one virtual device form a stage per alternation between replicate and split:

    replicate   r r . . r r . . r          ops in order of need, on one virtual device
    split       . . s s . . s s .
    stages      0 0 1 1 2 2 3 3 4          run one after another

If only replicates share a virtual device, they are one stage. Ops that read nothing of other phases (a mask, the counter
of a normalisation) do not form a first stage of their own: they run with the next ops of their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale.config import Config
from whale.errors import AnnotationError, WhaleError, raise_faults
from whale.ir.graph import ModelGraph
from whale.ir.plan import TaskGraph
from whale.ir.scope import Scope
from whale.planning.annotations.scope_tree import Copies, ScopeNode, Sizes, resolve_sizes, scope_tree, share_devices
from whale.planning.structure.stages import Assignment, Late, Wish, assign
from whale.planning.structure.structure import Structure, analyse
from whale.schedules import placement


@dataclass(frozen=True, slots=True)
class Phase:
    """Ops that run together: on virtual device `place`, after `level` changes of `kind`."""

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
    """Moves the ops of a phase that reads no other to the next phase of its kind, if no op between needs them."""
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
    return reader.place != made.place or reader.level > made.level or reader == made


@dataclass(frozen=True)
class Annotations:
    """What the scopes say."""

    names: tuple[str, ...]  # per TaskGraph
    scopes: tuple[Scope, ...]  # per TaskGraph
    stages: tuple[int, ...]  # per TaskGraph
    task_graph_of: Mapping[str, int]  # per scoped op
    devices: tuple[int, ...]  # per stage, how many it asks for (all copies together)
    copies: Copies  # nesting of the virtual devices
    places: tuple[int, ...]  # per stage, its virtual device
    widths: tuple[int, ...]  # per stage, devices of a split group; 1 where nothing is split

    @property
    def num_stages(self) -> int:
        return len(self.devices)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each virtual device."""
        return tuple(dict(zip(self.places, self.devices, strict=True)).values())

    def names_of(self, stage: int) -> tuple[str, ...]:
        return tuple(name for name, own in zip(self.names, self.stages, strict=True) if own == stage)

    def split_scopes(self, stage: int) -> tuple[Scope, ...]:
        return tuple(scope for scope, own in zip(self.scopes, self.stages, strict=True) if own == stage and scope.kind == "split")


def read_scopes(graph: ModelGraph, config: Config, num_devices: int) -> Annotations | None:
    """The TaskGraphs of the scopes; None for a model without scopes.

    Raises:
        AnnotationError: scopes that cannot be honoured; all reasons at once.
    """
    tree, faults = scope_tree(graph)
    raise_faults(faults)
    if not tree.roots:
        return None
    sizes = resolve_sizes(tree.roots, num_devices, colocate=config.cluster.colocate_split_and_replicate)
    if config.pipeline.num_stages is None and num_chunks(config) == 1:
        sizes = share_devices(sizes, num_devices)
    leaves = sorted((leaf for node in tree.roots for leaf in node.leaves), key=lambda leaf: leaf.number)
    index = {leaf.number: position for position, leaf in enumerate(leaves)}
    task_graph_of = {}
    for op in graph.ops:
        node = tree.task_graph_of(op)
        if node is not None:
            task_graph_of[op.name] = index[node.number]
    if _is_mixed(leaves, sizes):
        return _by_phases(graph, leaves, sizes, task_graph_of)
    widths = {sizes.place_of[number]: width for number, width in sizes.widths.items()}
    return Annotations(
        names=tuple(_names(leaves)),
        scopes=tuple(leaf.scope for leaf in leaves),
        stages=tuple(sizes.place_of[leaf.number] for leaf in leaves),
        task_graph_of=task_graph_of,
        devices=sizes.devices,
        copies=sizes.copies,
        places=tuple(range(len(sizes.devices))),
        widths=tuple(widths.get(place, 1) for place in range(len(sizes.devices))),
    )


def place_sizes(graph: ModelGraph, config: Config, num_devices: int) -> tuple[int, ...]:
    """Devices of each virtual device of a replica that the scopes make of `num_devices`; chunks on one virtual device count once.

    Empty without scopes, and where chunks would have different numbers of stages.

    Raises:
        AnnotationError: scopes that cannot be honoured.
    """
    return sizes_in(read_scopes(graph, config, num_devices), num_chunks(config))


def sizes_in(annotations: Annotations | None, chunks: int) -> tuple[int, ...]:
    """`place_sizes` of what the scopes say, with so many chunks on a virtual device."""
    sizes = () if annotations is None else annotations.sizes
    return () if len(sizes) % chunks else sizes[: len(sizes) // chunks]


def num_chunks(config: Config) -> int:
    return len(placement(config.pipeline.schedule, num_ranks=1, num_chunks=config.pipeline.num_chunks))


def _is_mixed(leaves: Sequence[ScopeNode], sizes: Sizes) -> bool:
    """Whether a split shares its virtual device with another TaskGraph."""
    places = [sizes.place_of[leaf.number] for leaf in leaves]
    return any(places.count(sizes.place_of[number]) > 1 for number, width in sizes.widths.items() if width > 1)


def _by_phases(graph: ModelGraph, leaves: Sequence[ScopeNode], sizes: Sizes, task_graph_of: Mapping[str, int]) -> Annotations:
    """Annotations where TaskGraphs share a virtual device with splits: an interrupted TaskGraph becomes several."""
    places = [sizes.place_of[leaf.number] for leaf in leaves]
    widths = [sizes.widths.get(leaf.number, 1) for leaf in leaves]
    kinds = [number if width > 1 else 0 for number, width in enumerate(widths, start=1)]
    phase_of = find_phases(analyse(graph), task_graph_of, places, kinds)
    phases = sorted(dict.fromkeys(phase_of.values()), key=lambda phase: (phase.place, phase.level, phase.kind))
    stage_of = {phase: stage for stage, phase in enumerate(phases)}
    found = {(task_graph, stage_of[phase_of[name]]) for name, task_graph in task_graph_of.items()}
    pieces = sorted(found, key=lambda piece: (piece[1], piece[0]))
    number = {piece: index for index, piece in enumerate(pieces)}
    names = list(_names(leaves))
    first = dict(reversed(pieces))
    order = {task_graph: [stage for other, stage in pieces if other == task_graph] for task_graph in first}
    return Annotations(
        names=tuple(
            names[task_graph] + ("" if stage == first[task_graph] else f".{order[task_graph].index(stage)}") for task_graph, stage in pieces
        ),
        scopes=tuple(leaves[task_graph].scope for task_graph, _ in pieces),
        stages=tuple(stage for _, stage in pieces),
        task_graph_of={name: number[task_graph, stage_of[phase_of[name]]] for name, task_graph in task_graph_of.items()},
        devices=tuple(sizes.devices[phase.place] for phase in phases),
        copies=sizes.copies,
        places=tuple(phase.place for phase in phases),
        widths=tuple(widths[phase.kind - 1] if phase.kind else 1 for phase in phases),
    )


def _names(leaves: Sequence[ScopeNode]) -> Iterator[str]:
    for position, leaf in enumerate(leaves):
        yield leaf.scope.name if leaf.scope.name is not None else f"{leaf.scope.kind}_{position}"


def check_enough_devices(annotations: Annotations, wanted: int, num_devices: int) -> None:
    """Raises AnnotationError if a model replica takes more devices (`wanted`) than there are."""
    if wanted <= num_devices:
        return
    asked = [
        f"{name}: {annotations.devices[stage]} ({scope} at {scope.where})"
        for name, scope, stage in zip(annotations.names, annotations.scopes, annotations.stages, strict=True)
    ]
    raise AnnotationError(
        f"the scopes ask for {wanted} devices and the cluster has {num_devices}: " + "; ".join(asked),
        where=annotations.scopes[0].where,
        hint="ask for fewer devices, or colocate the TaskGraphs (cluster.colocate_split_and_replicate)",
    )


def assign_by_scopes(graph: ModelGraph, annotations: Annotations, structure: Structure | None = None) -> Assignment:
    """Assigns ops to the stages of their scopes; `structure` is that of the graph, where it is known.

    Raises:
        AnnotationError: an op needs the value of a later stage.
    """
    structure = structure or analyse(graph)
    pinned = _only_cheap(annotations, structure)
    if pinned:
        structure = analyse(graph, pinned)
    wishes = {
        name: Wish((annotations.stages[task_graph],), _is_firm(graph, annotations.scopes[task_graph], name))
        for name, task_graph in annotations.task_graph_of.items()
    }
    assignment, late = assign(graph, structure, wishes, annotations.num_stages)
    raise_faults([*_late_faults(graph, annotations, late), *_empty_faults(annotations, assignment)])
    return assignment


def _only_cheap(annotations: Annotations, structure: Structure) -> frozenset[str]:
    """Ops of TaskGraphs that would be empty if all cheap ops were repeated elsewhere."""
    kept = {task_graph for name, task_graph in annotations.task_graph_of.items() if name not in structure.repeatable}
    return frozenset(name for name, task_graph in annotations.task_graph_of.items() if task_graph not in kept)


def _is_firm(graph: ModelGraph, scope: Scope, name: str) -> bool:
    """A default strategy's ops between other scopes may move to where their values are; those with parameters may not."""
    return not scope.is_default or any(graph.by_name[source].kind == "parameter" for source in graph.by_name[name].inputs)


def _late_faults(graph: ModelGraph, annotations: Annotations, late: Sequence[Late]) -> Iterator[WhaleError]:
    seen: set[tuple[int, int]] = set()
    for fault in late:
        if (fault.stage, fault.needed_stage) in seen:
            continue
        seen.add((fault.stage, fault.needed_stage))
        op, needs = graph.by_name[fault.op], graph.by_name[fault.needs]
        own = annotations.names[annotations.task_graph_of[fault.op]]
        other = ", ".join(name for name, stage in zip(annotations.names, annotations.stages, strict=True) if stage == fault.needed_stage)
        yield AnnotationError(
            f"{op.name} in {own} (stage {fault.stage}) needs {needs.name} of the later stage {fault.needed_stage} ({other}, at "
            f"{needs.where})",
            where=op.where,
            hint=f"enter {own} once, or give the ops that run after {other} a scope of their own",
        )


def _empty_faults(annotations: Annotations, assignment: Assignment) -> Iterator[WhaleError]:
    for stage, part in enumerate(assignment.parts):
        if not part.ops:
            task_graph = annotations.stages.index(stage)
            yield AnnotationError(
                f"stage {annotations.names[task_graph]} has no op of its own: all its ops belong with those of another stage",
                where=annotations.scopes[task_graph].where,
                hint="ops that make, view and change a tensor in place stay together: change it out of place",
            )


def task_graphs(graph: ModelGraph, annotations: Annotations | None, stage_of: Mapping[str, int]) -> tuple[TaskGraph, ...]:
    """The TaskGraphs, which partition the calls of the graph.

    An op without a scope joins the TaskGraph of its first scoped consumer, else of a producer, within its stage.
    """
    calls = [op for op in graph.ops if op.kind == "call"]
    if annotations is None:
        return (TaskGraph(0, "model", "replicate", tuple(op.name for op in calls)),)
    found = dict(annotations.task_graph_of)
    for name in [name for name in found if stage_of.get(name, annotations.stages[found[name]]) != annotations.stages[found[name]]]:
        del found[name]
    for op in reversed(calls):
        _join(op.name, graph.users[op.name], found, annotations, stage_of)
    for op in calls:
        _join(op.name, op.inputs, found, annotations, stage_of)
        found.setdefault(op.name, annotations.stages.index(stage_of.get(op.name, 0)))
    members: list[list[str]] = [[] for _ in annotations.names]
    for op in calls:
        members[found[op.name]].append(op.name)
    return tuple(
        TaskGraph(index, name, scope.kind, tuple(members[index]))
        for index, (name, scope) in enumerate(zip(annotations.names, annotations.scopes, strict=True))
    )


def _join(name: str, others: Sequence[str], found: dict[str, int], annotations: Annotations, stage_of: Mapping[str, int]) -> None:
    if name in found:
        return
    for other in others:
        if other in found and stage_of.get(name, annotations.stages[found[other]]) == annotations.stages[found[other]]:
            found[name] = found[other]
            return
