"""The sharding pass: along which axis each op of a split stage works on parts, and in which sizes, for the least predicted time.

Devices wait for one another at bridges, so sizes balance the work along each kind of axis separately by device speed: first
of all ops that can work along it, then of those that do, last with handling of messages. For given sizes the labels are the
exact optimum (`whale.planning.shard.solver`; a search that runs out of nodes states its gap), with equal labels for identical
ops. A stage takes the labels of an equal one with up to twice its rows on such devices, where they gain as much on its own. If a
choice overflows a device, sizes are divided again within the free memory, and labels chosen again, a few times. Alternating
between sizes and labels is a heuristic on heterogeneous devices or with little memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from whale.errors import AnnotationError, raise_faults
from whale.estimate.costs.line import Floats
from whale.estimate.prices.collective_costs import StagePlace
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Shard
from whale.ir.scope import Scope
from whale.planning.pipeline.balance import Curve, MemoryShortage, divide_units
from whale.planning.pipeline.placement import Likeness, likeness_of
from whale.planning.pipeline.scheduling import Split
from whale.planning.shard.classes import Classes
from whale.planning.shard.costs import Sizes, SplitCosts
from whale.planning.shard.memory import MemoryBudget
from whale.planning.shard.problem import ChosenLabels
from whale.planning.shard.space import Scene, ShardSpace, find_insisted, find_shard_space, no_axis_fault, written_axes
from whale.planning.shard.write import Outline, cuts_of, outline_of

GRAIN = 16
"""Units of a large axis that stay together, so that rows of a matrix align with cache lines and tensor-core tiles: otherwise products
take a sixth longer on a CPU (1,175 columns as long as 1,370). Halved or doubled: 1 of 3 plans differs, by less than 0.01 %.
"""

GRAINS_PER_DEVICE = 8
"""An axis with fewer grains is divided to the unit, because grains would cost more balance than they gain. Halved or doubled: none of 3
plans differs.
"""

NOT_ASKED = Split()

MAX_ROUNDS = 3
"""Alternations between labels and sizes with little memory. Of 49 searches and plans of examples/benchmarks/constants.py, 2 or 6: none
differs; 1: one finds no plan, one is slower by 44 %, with 12 % fewer estimates.
"""


@dataclass(frozen=True)
class StageSharding:
    """The decision for one stage."""

    shards: tuple[Shard, ...]  # per cut axis its sizes, in the model's order of axes
    seconds: float  # of the stage for one micro-batch on the slowest devices, with bridges and a share of the optimizer's step
    whole_seconds: float  # the same if every device computed everything
    bound_by_memory: bool  # whether memory changed sizes or axes
    free_seconds: float  # as `seconds`, without limits of memory
    gap: float  # bound of the labels' distance from the optimum, as a share; 0 unless the search ran out of nodes
    cut: Cut = field(compare=False, repr=False)  # how it was found


@dataclass(frozen=True, slots=True)
class Question:
    """What the choice of cuts depends on, except memory and insisted axes."""

    outline: int  # number of the stage's outline
    groups: tuple[Likeness, ...]  # its distinct split groups
    num_rows: float  # of a micro-batch per group
    num_micro_batch: int  # of a step
    only: frozenset[int] | None  # outline numbers of the axes that a written plan allows; None for all

    @property
    def has_rows_for_all(self) -> bool:
        """Whether the rows can be cut over a group."""
        return self.num_rows >= len(self.groups[0].devices)

    @property
    def kin(self) -> Hashable:
        """Equal for questions that have mostly equal answers: up to twice the rows, and hosts shared in other proportions."""
        groups = {
            (tuple(kind for kind, _ in each.devices), frozenset(link for _, _, link in each.links), each.network) for each in self.groups
        }
        return self.outline, frozenset(groups), math.frexp(self.num_rows)[1], self.has_rows_for_all, self.num_micro_batch, self.only


@dataclass(frozen=True, eq=False)
class Cut:
    """The choice for a stage of an outline."""

    outline: Outline  # of the stage that it was made for
    costs: SplitCosts  # of its labels
    insisted: tuple[int, ...]  # kinds that the user asks for
    sizes: Sizes  # per kind of axes
    chosen: ChosenLabels  # the labels

    @property
    def rank(self) -> tuple[float, float]:
        return self.chosen.excess, self.chosen.seconds

    @property
    def share(self) -> float:
        """Its seconds, of those of the uncut stage."""
        return self.chosen.seconds / self.costs.whole

    def near(self, num_rows: float) -> float:
        """How near its rows are to others."""
        return abs(math.log(num_rows / self.costs.site.num_rows))

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The cuts, in the model's order of axes."""
        kind_of, cuts = self.costs.classes.space.kind_of, cuts_of(self.costs.classes, self.chosen.labels)
        return tuple(replace(shard, sizes=self.sizes[kind_of[shard.axis]]) for shard in cuts)

    def working(self, kind: int) -> frozenset[int] | None:
        """The nodes that work along a kind; None (for all that can) where none does."""
        nodes = enumerate(zip(self.costs.classes.nodes, self.chosen.labels, strict=True))
        found = (number for number, (node, label) in nodes if node.labels[label].work == kind and node.first.kind == "call")
        return frozenset(found) or None


@dataclass(eq=False)
class Sharder:
    """The pass over the stages of one model: equal stages on equal devices are solved once."""

    prices: Prices
    _outlines: dict[Scene, Outline] = field(default_factory=dict, init=False)
    _numbers: dict[Hashable, int] = field(default_factory=dict, init=False)
    _classes: dict[tuple[int, int, bool, frozenset[int] | None], Classes] = field(default_factory=dict, init=False)
    _costs: dict[Question, SplitCosts] = field(default_factory=dict, init=False)
    _unbounded: dict[tuple[Question, tuple[int, ...]], Cut | None] = field(default_factory=dict, init=False)
    _solved: dict[Hashable, list[Cut]] = field(default_factory=dict, init=False)  # the exact ones, by kin
    _cuts: dict[tuple[Question, tuple[int, ...], MemoryBudget], tuple[Cut, bool]] = field(default_factory=dict, init=False)

    def choose(self, scene: Scene, site: StagePlace, budget: MemoryBudget, split: Split = NOT_ASKED) -> StageSharding:
        """Chooses the axes of one stage, the ops that work along them, and the sizes.

        Args:
            scene: the stage.
            site: the devices, and their rows.
            budget: what one device of the stage holds.
            split: what scopes and a written plan ask for.

        Raises:
            AnnotationError: no axis can be cut, or one that is asked for cannot.
        """
        outline = self.outline(scene)
        names = None if split.axes is None else written_axes((*split.axes, *split.more_axes), scene)
        insisted = self._insisted(scene, site, split, names)
        only = None if names is None else frozenset(number for number, axis in enumerate(outline.axes) if axis in names)
        groups = tuple(likeness_of((group,), self.prices.cluster) for group in site.groups)
        number = self._numbers.setdefault(outline.signature, len(self._numbers))
        question = Question(number, groups, site.num_rows, site.num_micro_batch, only)
        if question not in self._costs:
            place = number, site.width, question.has_rows_for_all, only
            if place not in self._classes:
                self._classes[place] = Classes(scene, find_shard_space(scene, site.width, site.num_rows, names), self.prices.kept)
            self._costs[question] = SplitCosts(self._classes[place], self.prices, site)
        key = question, insisted
        if key not in self._unbounded:
            self._unbounded[key] = self._without_limits(question, insisted, split.scopes)
        first = self._unbounded[key]
        if first is None:
            raise no_axis_fault(scene, find_shard_space(scene, site.width, site.num_rows, names), split.scopes, site.width)
        if (*key, budget) not in self._cuts:
            self._cuts[*key, budget] = _within_memory(first, budget)
        cut, bound_by_memory = self._cuts[*key, budget]
        shards = tuple(map(cut.outline.names_in(outline).renamed, cut.shards))
        return StageSharding(shards, cut.chosen.seconds, cut.costs.whole, bound_by_memory, first.chosen.seconds, cut.chosen.gap, cut)

    def _without_limits(self, question: Question, insisted: tuple[int, ...], scopes: Sequence[Scope]) -> Cut | None:
        """The best choice without memory limits: solved, or that of a kin question where it is as good."""
        costs, solved = self._costs[question], self._solved.setdefault((question.kin, insisted), [])
        if solved:
            model = min(solved, key=lambda cut: cut.near(question.num_rows))
            own = _with_labels(costs, model)
            if own is not None and own.share <= model.share:
                return _with_time_of_messages(own)
        found = _fastest(self.outline(costs.classes.scene), costs, insisted, scopes)
        if found is None:
            return None
        solved.append(found)
        return _with_time_of_messages(found)

    def outline(self, scene: Scene) -> Outline:
        if scene not in self._outlines:
            self._outlines[scene] = outline_of(scene, self.prices)
        return self._outlines[scene]

    def _insisted(self, scene: Scene, site: StagePlace, split: Split, names: Sequence[str] | None) -> tuple[int, ...]:
        """The kinds of axes along which all ops must work that can."""
        if split.axes is None and not any(scope.axis for scope in split.scopes):
            return ()
        space = find_shard_space(scene, site.width, site.num_rows, names)
        insisted, faults = find_insisted(scene, space, split.scopes, site.width)
        raise_faults(faults)
        own = {space.kind_of[axis] for axis in written_axes(split.axes or (), scene) if axis in space.kind_of}
        return tuple(dict.fromkeys((*insisted, *sorted(own))))


def _fastest(outline: Outline, costs: SplitCosts, insisted: tuple[int, ...], scopes: Sequence[Scope]) -> Cut | None:
    """The best labels without memory limits, with sizes balanced over the ops that work; None where nothing can be cut."""
    cut: Cut | None = None
    sizes = tuple(_by_speed(costs, kind) for kind in costs.kinds)
    for _ in range(2):
        if not any(label.divides for node in costs.problem(sizes, insisted).nodes for label in node):
            return None
        found = costs.best(sizes, insisted)
        if found is None:
            raise _clash(costs.classes.space, insisted, scopes)
        if cut is None or found.seconds < cut.chosen.seconds:
            cut = Cut(outline, costs, insisted, sizes, found)
        new_sizes = tuple(_by_speed(costs, kind, cut.working(kind)) for kind in costs.kinds)
        if new_sizes == sizes:
            break
        sizes = new_sizes
    return cut


def _with_labels(costs: SplitCosts, model: Cut) -> Cut | None:
    """The cut of another stage with the same classes, with sizes of its own; None where it is not allowed."""
    sizes = tuple(_by_speed(costs, kind, model.working(kind)) for kind in costs.kinds)
    chosen = costs.problem(sizes, model.insisted).evaluate(model.chosen.labels)
    return None if chosen is None else replace(model, costs=costs, sizes=sizes, chosen=replace(chosen, gap=model.chosen.gap))


def _with_time_of_messages(cut: Cut) -> Cut:
    """The cut with sizes that account for handling, which is attributed to the kinds in proportion to their work."""
    costs, taken = cut.costs, cut.costs.handled(cut.shards)
    if not taken.any():
        return cut
    nodes = {kind: own for kind in costs.kinds if (own := cut.working(kind)) is not None}
    slowest = {
        kind: max(curve[units] for curve, units in zip(costs.curves(kind, own), cut.sizes[kind], strict=True))
        for kind, own in nodes.items()
    }
    shares = {kind: seconds / sum(slowest.values()) for kind, seconds in slowest.items()}
    sizes = (_by_speed(costs, kind, nodes[kind], shares[kind] * taken) if kind in nodes else own for kind, own in enumerate(cut.sizes))
    return replace(cut, sizes=tuple(sizes))


def _within_memory(unbounded: Cut, budget: MemoryBudget) -> tuple[Cut, bool]:
    """The best choice that fits, else the one that overflows least; and whether memory changed anything."""
    costs, insisted = unbounded.costs, unbounded.insisted
    placed = costs.problem(unbounded.sizes, insisted, budget).evaluate(unbounded.chosen.labels)
    assert placed is not None
    first = replace(unbounded, chosen=replace(placed, gap=unbounded.chosen.gap))
    if placed.excess <= 0:
        return first, False
    best, sizes = first, first.sizes
    for _ in range(MAX_ROUNDS):
        found = costs.best(sizes, insisted, budget)
        if found is not None:
            best = min(best, replace(first, sizes=sizes, chosen=found), key=lambda cut: cut.rank)
        if sizes != first.sizes and best.chosen.excess <= 0:
            break
        lacking = costs.lacking_by_units(best.chosen.labels, budget)
        new_sizes = tuple(_in_free_memory(best, lacking, kind) for kind in costs.kinds)
        if new_sizes == sizes:
            break
        sizes = new_sizes
    return best, True


def _by_speed(costs: SplitCosts, kind: int, nodes: frozenset[int] | None = None, taken: Floats | None = None) -> tuple[int, ...]:
    """Units of every position, in grains, without memory limits.

    Args:
        nodes: those that work along the kind; None for all that can.
        taken: seconds of handling per position; None for none.
    """
    size = costs.size(kind)
    grain = GRAIN if size % GRAIN == 0 and size // GRAIN >= GRAINS_PER_DEVICE * costs.site.width else 1
    fitting = np.zeros(size // grain + 1)
    curves = zip(costs.curves(kind, nodes), np.zeros(costs.site.width) if taken is None else taken, strict=True)
    grains = divide_units(size // grain, [Curve(seconds[::grain] + more, fitting, 1) for seconds, more in curves])
    return tuple(grain * count for count in grains)


def _in_free_memory(cut: Cut, lacking: tuple[Floats, Floats], kind: int) -> tuple[int, ...]:
    """Units of every position within the free memory, to the unit.

    `lacking`: by position, bytes with no unit of any axis, and with all of them; linear in between.
    """
    size, (none, every) = cut.costs.size(kind), lacking
    excess = np.maximum(none + (every - none) * np.arange(size + 1)[:, None] / size, 0.0)
    curves = zip(cut.costs.curves(kind, cut.working(kind)), excess.T, strict=True)
    try:
        return divide_units(size, [Curve(seconds, own, 1) for seconds, own in curves])
    except MemoryShortage as error:
        return error.sizes


def _clash(space: ShardSpace, insisted: Sequence[int], scopes: Sequence[Scope]) -> AnnotationError:
    chosen = {axis for kind in insisted for axis in space.kinds[kind]}
    return AnnotationError(
        f"{', '.join(axis for axis in space.axes if axis in chosen)} cannot be cut together: they meet in one op",
        where=next((scope.where for scope in scopes if scope.axis), None),
        hint="put the ops of each under a split of their own",
    )
