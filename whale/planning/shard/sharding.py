"""The sharding pass: along which axis each op of a split stage works on parts, and in which sizes, for the least predicted time.

Sizes come from each device's own speed, kind by kind: between two bridges the devices wait for one another, so the work along
each kind is balanced by itself, first that of all ops that might, then that of those that do, and last beside the time that messages
take of the devices. The labels of the ops are the optimum over these sizes (`whale.planning.shard.solve`). Where the choice overflows a
device, sizes are divided again within the memory that it leaves, and the choice is made again, a few times in turn.

The optimum is exact (a search that runs out of nodes says its gap) for given sizes, for alike ops that are labelled alike, and
for prices by the cost model. Sizes and labels are settled in turn: that is a heuristic where devices are unlike or memory is
short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from whale.errors import AnnotationError, raise_faults
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.tolls import Site
from whale.ir.cluster import Device, Link
from whale.ir.plan import Shard
from whale.ir.scope import Scope
from whale.planning.pipeline.balance import Curve, MemoryShortage, divide_units
from whale.planning.pipeline.scheduling import AskedAxes
from whale.planning.shard.classes import Classes
from whale.planning.shard.figures import Figures, Load, Sizes
from whale.planning.shard.handled import handled
from whale.planning.shard.insisting import find_insisted, no_axis_fault, written_axes
from whale.planning.shard.outline import outline_of
from whale.planning.shard.program import Selection
from whale.planning.shard.space import Scene, find_shard_space
from whale.planning.shard.write import names_of, write_shards

GRAIN = 16
"""Units of a large axis that stay together: rows of a matrix then begin with a line of the cache, and with a tile of a tensor core.
Products of other widths take a sixth longer on a CPU (1,175 columns as long as 1,370)."""

GRAINS_PER_DEVICE = 8
"""An axis with fewer grains is divided to the unit: what balance loses by whole grains must be less than they bring."""

MAX_ROUNDS = 3
"""Where memory is short, labels and sizes are settled in turn at most so often."""


@dataclass(frozen=True)
class StageSharding:
    """What was decided for one stage.

    Attributes:
        shards: per cut axis its sizes, in the model's order of axes.
        seconds: of the stage for one micro-batch on the slowest devices, with bridges and a share of the optimizer's step.
        whole_seconds: the same if every device computed everything.
        bound_by_memory: whether memory changed sizes or axes.
        gap: how far the labels may be from the optimum at most, as a share of the seconds; 0 unless the search ran out of nodes.
        problem: what was solved.
    """

    shards: tuple[Shard, ...]
    seconds: float
    whole_seconds: float
    bound_by_memory: bool
    gap: float
    problem: Problem = field(compare=False, repr=False)

    @cached_property
    def runner_up(self) -> tuple[tuple[str, ...], float]:
        """The next best set of axes, and its seconds; empty where there is no other. Searched for when asked."""
        problem = self.problem
        other = problem.figures.best(problem.sizes, problem.insisted, problem.load, problem.kinds)
        return (names_of(problem.classes, other.labels), other.seconds) if other else ((), 0.0)


@dataclass(frozen=True)
class Problem:
    """What the sharding of a stage solved.

    Attributes:
        classes: of its ops.
        figures: of a stage of the same outline.
        sizes: per kind of axes.
        insisted: kinds that the user asks for.
        load: what its devices hold.
        kinds: of axes that the solution makes use of.
    """

    classes: Classes
    figures: Figures
    sizes: Sizes
    insisted: tuple[int, ...]
    load: Load
    kinds: frozenset[int]


@dataclass(frozen=True, slots=True)
class Group:
    """A split group but for names: of equal groups each is cut alike.

    Attributes:
        kinds: of its devices.
        links: between every two of them.
    """

    kinds: tuple[Device, ...]
    links: tuple[Link, ...]


def group_of(devices: Sequence[str], prices: Prices) -> Group:
    """A split group of these devices."""
    kinds = tuple(prices.cluster.by_name[name].kind for name in devices)
    return Group(kinds, tuple(prices.link(a, b) for a, b in combinations(devices, 2)))


@dataclass(frozen=True, slots=True)
class Question:
    """What the choice of cuts depends on, memory apart.

    Attributes:
        outline: of the stage.
        groups: the unlike ones among its split groups.
        num_rows: of a micro-batch that a group takes.
        num_micro_batch: of a step.
        asked: the axes of a written plan; None where all may be cut.
    """

    outline: str
    groups: tuple[Group, ...]
    num_rows: float
    num_micro_batch: int
    asked: AskedAxes | None


@dataclass(frozen=True)
class _Choice:
    """Labels, and the sizes they were chosen for."""

    sizes: Sizes
    selection: Selection

    @property
    def rank(self) -> tuple[float, float]:
        return self.selection.excess, self.selection.seconds


@dataclass(eq=False)
class Sharder:
    """The pass over the stages of one model: equal stages on equal devices are solved once.

    Args:
        prices: of the graph on the cluster.
    """

    prices: Prices
    _outlines: dict[Scene, str] = field(default_factory=dict, init=False)
    _classes: dict[tuple[Scene, int, AskedAxes | None], Classes] = field(default_factory=dict, init=False)
    _figures: dict[Question, Figures] = field(default_factory=dict, init=False)
    _settled: dict[tuple[Question, tuple[int, ...]], _Choice | None] = field(default_factory=dict, init=False)
    _written: dict[tuple[Classes, tuple[int, ...]], tuple[Shard, ...]] = field(default_factory=dict, init=False)
    _shardings: dict[tuple[Scene, Question, Load, tuple[Scope, ...]], StageSharding] = field(default_factory=dict, init=False)

    def choose(self, scene: Scene, site: Site, load: Load, scopes: tuple[Scope, ...] = (), asked: AskedAxes | None = None) -> StageSharding:
        """Chooses the axes of one stage, the ops that work along them, and the sizes.

        Args:
            scene: the stage.
            site: the devices, and the rows they take.
            load: what one device of the stage holds.
            scopes: the `split` scopes of the stage; their `axis` must be among the axes.
            asked: the axes that a written plan cuts; None where it leaves them open.

        Raises:
            AnnotationError: no axis can be cut, or one that is asked for cannot.
        """
        if scene not in self._outlines:
            self._outlines[scene] = outline_of(scene, self.prices)
        groups = tuple(group_of(group, self.prices) for group in site.groups)
        question = Question(self._outlines[scene], groups, site.num_rows, site.num_micro_batch, asked)
        key = scene, question, load, scopes
        if key not in self._shardings:
            self._shardings[key] = self._cut(scene, site, question, load, scopes)
        return self._shardings[key]

    def _cut(self, scene: Scene, site: Site, question: Question, load: Load, scopes: tuple[Scope, ...]) -> StageSharding:
        asked = question.asked
        key = scene, site.width, asked
        if key not in self._classes:
            only = None if asked is None else written_axes((*asked.axes, *asked.more), scene)
            self._classes[key] = Classes(scene, find_shard_space(scene, site.width, only), self.prices.kept)
        classes = self._classes[key]
        insisted, faults = find_insisted(scene, classes.space, scopes, site.width)
        raise_faults(faults)
        if asked is not None:
            kind_of = classes.space.kind_of
            own = {kind_of[axis] for axis in written_axes(asked.axes, scene) if axis in kind_of}
            insisted = tuple(dict.fromkeys((*insisted, *sorted(own))))
        if question not in self._figures:
            self._figures[question] = Figures(classes, self.prices, site)
        figures = self._figures[question]
        if (question, insisted) not in self._settled:
            self._settled[question, insisted] = _settle(figures, insisted, classes, scopes)
        first = self._settled[question, insisted]
        if first is None:
            raise no_axis_fault(scene, classes.space, scopes, site.width)
        first = _beside_messages(figures, first, handled(scene, figures, self._write(classes, first)))
        at_first = figures.program(first.sizes, insisted, load).evaluate(first.selection.labels)
        assert at_first is not None
        first = _Choice(first.sizes, replace(at_first, gap=first.selection.gap))
        best = _within_memory(figures, first, insisted, load)
        return StageSharding(
            shards=self._write(classes, best),
            seconds=best.selection.seconds,
            whole_seconds=figures.whole,
            bound_by_memory=best.sizes != first.sizes or best.selection != first.selection or best.selection.excess > 0,
            gap=best.selection.gap,
            problem=Problem(classes, figures, best.sizes, insisted, load, best.selection.kinds),
        )

    def _write(self, classes: Classes, choice: _Choice) -> tuple[Shard, ...]:
        """The cuts of a stage; those of equal labels differ in their sizes alone."""
        key = classes, choice.selection.labels
        if key not in self._written:
            self._written[key] = write_shards(classes, choice.selection.labels)
        return tuple(replace(shard, sizes=choice.sizes[classes.space.kind_of[shard.axis]]) for shard in self._written[key])


def _settle(figures: Figures, insisted: tuple[int, ...], classes: Classes, scopes: Sequence[Scope]) -> _Choice | None:
    """The best labels as if memory were boundless, at sizes of the ops that work; None where nothing can be cut."""
    choice: _Choice | None = None
    sizes = tuple(_by_speed(figures, kind) for kind in figures.kinds)
    for _ in range(2):
        program = figures.program(sizes, insisted)
        if not any(label.divides for node in program.nodes for label in node):
            return None
        found = figures.best(sizes, insisted)
        if found is None:
            raise _clash(classes, insisted, scopes)
        choice = _Choice(sizes, found) if choice is None or found.seconds < choice.selection.seconds else choice
        again = tuple(_by_speed(figures, kind, _working(figures, choice.selection, kind)) for kind in figures.kinds)
        if again == sizes:
            break
        sizes = again
    return choice


def _beside_messages(figures: Figures, choice: _Choice, taken: Sequence[float]) -> _Choice:
    """The choice at sizes that leave devices the time that messages take of them, which falls to the kinds as work does.

    Args:
        taken: seconds of each position.
    """
    if not any(taken):
        return choice
    nodes = {kind: _working(figures, choice.selection, kind) for kind in sorted(choice.selection.kinds)}
    curves = {kind: figures.curves(kind, own) for kind, own in nodes.items() if own is not None}
    work = {kind: max(float(curve[size]) for curve, size in zip(curves[kind], choice.sizes[kind], strict=True)) for kind in curves}
    sizes = list(choice.sizes)
    for kind, own in work.items():
        share = own / sum(work.values())
        sizes[kind] = _by_speed(figures, kind, nodes[kind], [share * seconds for seconds in taken])
    return replace(choice, sizes=tuple(sizes))


def _within_memory(figures: Figures, first: _Choice, insisted: tuple[int, ...], load: Load) -> _Choice:
    """The best choice that fits; where none does, the one that overflows least."""
    if first.selection.excess <= 0:
        return first
    best, sizes = first, first.sizes
    for _ in range(MAX_ROUNDS):
        found = figures.best(sizes, insisted, load)
        if found is not None:
            best = min(best, _Choice(sizes, found), key=lambda choice: choice.rank)
        if sizes != first.sizes and best.selection.excess <= 0:
            break
        room = Room(load, *figures.held_at(best.selection.labels, insisted, load))
        again = tuple(_within(room, figures, kind, _working(figures, best.selection, kind)) for kind in figures.kinds)
        if again == sizes:
            break
        sizes = again
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


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that sizes must keep to.

    Attributes:
        load: of the devices.
        none, every: bytes that a device holds with no unit of any axis, and with all of them; in proportion between.
    """

    load: Load
    none: float
    every: float


def _by_speed(figures: Figures, kind: int, nodes: frozenset[int] | None = None, beside: Sequence[float] | None = None) -> tuple[int, ...]:
    """Units of every position, in grains, as if memory were boundless.

    Args:
        nodes: those that work along the kind; None for all that may.
        beside: seconds that each position has to do beside; None for nothing.
    """
    size = figures.size(kind)
    grain = GRAIN if size % GRAIN == 0 and size // GRAIN >= GRAINS_PER_DEVICE * figures.site.width else 1
    free = np.zeros(size // grain + 1)
    taken = beside or [0.0] * figures.site.width
    curves = zip(figures.curves(kind, nodes), taken, strict=True)
    grains = divide_units(size // grain, [Curve(seconds[::grain] + more, free, 1) for seconds, more in curves])
    return tuple(grain * count for count in grains)


def _within(room: Room, figures: Figures, kind: int, nodes: frozenset[int] | None) -> tuple[int, ...]:
    """Units of every position within the memory that is left, to the unit."""
    size = figures.size(kind)
    held = room.none + (room.every - room.none) * np.arange(size + 1) / size
    curves = []
    for position, seconds in enumerate(figures.curves(kind, nodes)):
        excess = np.maximum(held - room.load.capacity(figures.capacity[position]), 0.0)
        curves.append(Curve(seconds, excess, 1))
    try:
        return divide_units(size, curves)
    except MemoryShortage as error:
        return error.sizes


def _clash(classes: Classes, insisted: Sequence[int], scopes: Sequence[Scope]) -> AnnotationError:
    space = classes.space
    chosen = {axis for kind in insisted for axis in space.kinds[kind]}
    return AnnotationError(
        f"axes that are cut together never meet in one op ({', '.join(axis for axis in space.axes if axis in chosen)})",
        where=next((scope.where for scope in scopes if scope.axis), None),
        hint="put the ops of each under a split of their own",
    )
