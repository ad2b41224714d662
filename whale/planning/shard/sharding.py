"""The cutting pass: along which axis each op of a split stage works on parts, and in which sizes, for the least predicted time.

Sizes come from each device's own speed, kind by kind: between two bridges the devices wait for one another, so the work along
each kind is balanced by itself, first that of all ops that might, then that of those that do. The labels of the ops are the
optimum of an integer program over these sizes. Where the choice overflows a device, sizes are divided again within the memory
that it leaves, and the choice is made once more.

The program's optimum is exact (HiGHS, gap 0; a search that runs out of time says its gap) for given sizes, for alike ops
that are labelled alike, and for prices by the cost model. Sizes and labels are settled in turn: that is a heuristic where
devices are unlike or memory is short.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from whale.errors import AnnotationError, raise_faults
from whale.estimate import Line
from whale.estimate.tolls import Site
from whale.ir.plan import Shard
from whale.ir.scope import Scope
from whale.planning.pipeline.balance import Curve, MemoryShortage, divide_units
from whale.planning.pricing.pricing import Pricing
from whale.planning.shard.classes import Classes
from whale.planning.shard.figures import Figures, Sizes
from whale.planning.shard.insisting import find_insisted, no_axis_fault
from whale.planning.shard.program import Program, Selection, solve
from whale.planning.shard.space import Scene, find_cut_space
from whale.planning.shard.write import names_of, write_shards


@dataclass(frozen=True)
class Cutting:
    """What was decided for one stage.

    Attributes:
        shards: per cut axis its sizes, in the model's order of axes.
        seconds: of the stage for one micro-batch on the slowest devices, with bridges and a share of the optimizer's step.
        uncut_seconds: the same if every device computed everything.
        bound_by_memory: whether memory changed sizes or axes.
        gap: how far the labels may be from the optimum at most, as a share of the seconds; 0 unless the search ran out of time.
        problem: what was solved.
    """

    shards: tuple[Shard, ...]
    seconds: float
    uncut_seconds: float
    bound_by_memory: bool
    gap: float
    problem: Problem = field(compare=False, repr=False)

    @cached_property
    def runner_up(self) -> tuple[tuple[str, ...], float]:
        """The next best set of axes, and its seconds; empty where there is no other. Searched for when asked."""
        other = solve(self.problem.program, self.problem.kinds)
        return (names_of(self.problem.classes, other.labels), other.seconds) if other else ((), 0.0)


@dataclass(frozen=True)
class Problem:
    """What the cutting of a stage solved.

    Attributes:
        classes: of its ops.
        program: the integer program.
        kinds: of axes that the solution makes use of.
    """

    classes: Classes
    program: Program
    kinds: frozenset[int]


@dataclass(frozen=True)
class _Choice:
    """Labels, and the sizes they were chosen for."""

    program: Program
    sizes: Sizes
    selection: Selection

    @property
    def rank(self) -> tuple[float, float]:
        return self.selection.excess, self.selection.seconds


def choose_cuts(scene: Scene, pricing: Pricing, site: Site, num_bytes: Line, scopes: Sequence[Scope] = ()) -> Cutting:
    """Chooses the axes of one stage, the ops that work along them, and the sizes.

    Args:
        scene: the stage.
        pricing: prices of the graph on the cluster.
        site: the devices, and the rows they take.
        num_bytes: what one device of the stage holds if nothing is cut, by rows.
        scopes: the `split` scopes of the stage; their `axis` must be among the axes.

    Raises:
        AnnotationError: no axis can be cut, or one that is asked for cannot.
    """
    stage = hash(scene.ops), scene.received, scene.handed_on, scene.shared, scene.rows_arriving, scene.rows_leaving, site.width
    place = tuple(_place(pricing, group) for group in site.groups), site.num_rows, site.in_flight, site.num_micro_batch
    key = stage, place, num_bytes, tuple(scopes)
    if key not in pricing.cuttings:
        if stage not in pricing.cuttings:
            pricing.cuttings[stage] = Classes(scene, find_cut_space(scene, site.width), pricing.kept)
        pricing.cuttings[key] = _choose(Figures(pricing.cuttings[stage], pricing, site, num_bytes), scopes)
    cutting: Cutting = pricing.cuttings[key]
    return cutting


def _place(pricing: Pricing, group: Sequence[str]) -> Hashable:
    """Groups of equal devices on equal links are cut alike."""
    kinds = tuple(pricing.cluster.by_name[name].kind for name in group)
    return kinds, tuple(pricing.link(a, b) for a, b in combinations(group, 2))


def _choose(figures: Figures, scopes: Sequence[Scope]) -> Cutting:
    scene, space, site = figures.classes.scene, figures.classes.space, figures.site
    insisted, faults = find_insisted(scene, space, scopes, site.width)
    raise_faults(faults)
    first = _settle(figures, insisted, scopes)
    if first is None:
        raise no_axis_fault(scene, space, scopes, site.width)
    best = _within_memory(figures, first, insisted)
    return Cutting(
        shards=write_shards(figures.classes, best.selection.labels, best.sizes),
        seconds=best.selection.seconds,
        uncut_seconds=figures.whole,
        bound_by_memory=best.sizes != first.sizes or best.selection != first.selection or best.selection.excess > 0,
        gap=best.selection.gap,
        problem=Problem(figures.classes, best.program, best.selection.kinds),
    )


def _settle(figures: Figures, insisted: Collection[int], scopes: Sequence[Scope]) -> _Choice | None:
    """The best labels as if memory were boundless, at sizes of the ops that work; None where nothing can be cut."""
    kinds = range(len(figures.classes.space.kinds))
    choice: _Choice | None = None
    sizes = tuple(_sizes(figures, kind) for kind in kinds)
    for _ in range(2):
        program = figures.program(sizes, insisted)
        if not any(label.divides for node in program.nodes for label in node):
            return None
        found = solve(replace(program, capacity=(2**62,) * len(program.capacity)))
        if found is None:
            raise _clash(figures, insisted, scopes)
        selection = program.evaluate(found.labels)
        assert selection is not None
        new = _Choice(program, sizes, selection)
        choice = new if choice is None or new.selection.seconds < choice.selection.seconds else choice
        again = tuple(_sizes(figures, kind, nodes=_working(figures, choice.selection, kind)) for kind in kinds)
        if again == sizes:
            break
        sizes = again
    return choice


def _within_memory(figures: Figures, first: _Choice, insisted: Collection[int]) -> _Choice:
    """The best choice that fits; where none does, the one that overflows least."""
    if first.selection.excess <= 0:
        return first
    best = first
    found = solve(first.program)
    if found is not None:
        best = min(best, _Choice(first.program, first.sizes, found), key=lambda choice: choice.rank)
    divided = sum(figures.divided_bytes(best.selection.labels))
    sizes = tuple(
        _sizes(figures, kind, _working(figures, best.selection, kind), divided) for kind in range(len(figures.classes.space.kinds))
    )
    if best.selection.excess > 0 or sizes != first.sizes:
        program = figures.program(sizes, insisted)
        found = solve(program)
        if found is not None:
            best = min(best, _Choice(program, sizes, found), key=lambda choice: choice.rank)
    return best


def _working(figures: Figures, selection: Selection, kind: int) -> frozenset[int] | None:
    """The nodes that work along a kind; None (for all that may) where none does."""
    nodes = figures.classes.nodes
    found = [
        number
        for number, index in enumerate(selection.labels)
        if nodes[number].labels[index].work == kind and nodes[number].first.kind == "call"
    ]
    return frozenset(found) or None


def _sizes(figures: Figures, kind: int, nodes: frozenset[int] | None = None, divided: float | None = None) -> tuple[int, ...]:
    """Units of every position: by speed alone, or within the memory that is left if so many bytes are cut in one proportion."""
    size = figures.size(kind)
    excess = np.zeros(size + 1)
    curves = []
    for position, seconds in enumerate(figures.curves(kind, nodes)):
        if divided is not None:
            share = np.arange(size + 1) / size
            excess = np.maximum(figures.num_bytes - divided * (1 - share) - figures.capacity[position], 0.0)
        curves.append(Curve(seconds, excess, 1))
    try:
        return divide_units(size, curves)
    except MemoryShortage as error:
        return error.sizes


def _clash(figures: Figures, insisted: Collection[int], scopes: Sequence[Scope]) -> AnnotationError:
    space = figures.classes.space
    chosen = {axis for kind in insisted for axis in space.kinds[kind]}
    return AnnotationError(
        f"axes that are cut together never meet in one op ({', '.join(axis for axis in space.axes if axis in chosen)})",
        where=next((scope.where for scope in scopes if scope.axis), None),
        hint="put the ops of each under a split of their own",
    )
