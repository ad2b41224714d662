"""The cutting pass: which axes a split stage is cut along, and in which sizes, so that the predicted time is least.

Sizes come from each device's own speed, kind by kind: between two reductions the devices wait for one another, so each
kind is balanced by itself. The set of kinds is the optimum of an integer program over these sizes. Where the choice
overflows a device, sizes are divided again within the memory that it leaves, and the choice is made once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from whale.cost import Line
from whale.errors import AnnotationError, raise_faults
from whale.ir.plan import Cut
from whale.ir.scope import Scope
from whale.planning.balance import Curve, MemoryShortage, divide_units
from whale.planning.cut_figures import Figures, Site, price_cuts
from whale.planning.cut_selection import Selection, Sized, select
from whale.planning.cut_space import CutSpace, Scene, find_cut_space
from whale.planning.insisting import find_insisted, no_axis_fault
from whale.planning.pricing import Pricing


@dataclass(frozen=True)
class Cutting:
    """What was decided for one stage.

    Attributes:
        cuts: per cut axis its sizes, in the model's order of axes.
        seconds: of the stage for one micro-batch on the slowest devices, reductions included.
        uncut_seconds: the same if every device computed everything.
        runner_up: the next best set of axes, and its seconds; empty where there is no other.
        runner_up_seconds: 0 where there is no other.
        bound_by_memory: whether memory changed sizes or axes.
    """

    cuts: tuple[Cut, ...]
    seconds: float
    uncut_seconds: float
    runner_up: tuple[str, ...]
    runner_up_seconds: float
    bound_by_memory: bool


def choose_cuts(scene: Scene, pricing: Pricing, site: Site, num_bytes: Line, scopes: Sequence[Scope] = ()) -> Cutting:
    """Chooses the axes of one stage and their sizes.

    Args:
        scene: the stage.
        pricing: prices of the graph on the cluster.
        site: the devices, and the rows they take.
        num_bytes: what one device of the stage holds if nothing is cut, by rows.
        scopes: the `split` scopes of the stage; their `axis` must be among the axes.

    Raises:
        AnnotationError: no axis can be cut, or one that is asked for cannot.
    """
    space = find_cut_space(scene, site.width)
    insisted, faults = find_insisted(scene, space, scopes, site.width)
    if not space.kinds and not faults:
        faults = [no_axis_fault(scene, space, scopes, site.width)]
    raise_faults(faults)
    figures = price_cuts(scene, space, pricing, site, num_bytes)
    sized = Sized(figures, tuple(_sizes(figures, kind) for kind in range(len(space.kinds))))
    first = best = _best(sized, space, insisted, scopes)
    if best.excess > 0:
        limited = Sized(figures, tuple(_sizes(figures, kind, best.kinds) for kind in range(len(space.kinds))))
        again = _best(limited, space, insisted, scopes)
        if again.excess < best.excess:
            best, sized = again, limited
    other = select(sized, space.conflicts, insisted, best.kinds)
    return Cutting(
        cuts=_cuts(scene, space, sized, best.kinds),
        seconds=best.seconds,
        uncut_seconds=figures.whole,
        runner_up=_names(space, other.kinds) if other else (),
        runner_up_seconds=other.seconds if other else 0.0,
        bound_by_memory=best != first or best.excess > 0 or _fastest(sized, space, insisted) < best.seconds * (1 - 1e-9),
    )


def _best(sized: Sized, space: CutSpace, insisted: Collection[int], scopes: Sequence[Scope]) -> Selection:
    found = select(sized, space.conflicts, insisted)
    if found is None:
        raise AnnotationError(
            f"axes that are cut together never meet in one op ({', '.join(_names(space, insisted))})",
            where=next((scope.where for scope in scopes if scope.axis), None),
            hint="put the ops of each under a split of their own",
        )
    return found


def _fastest(sized: Sized, space: CutSpace, insisted: Collection[int]) -> float:
    """Seconds of the best set if memory were no matter."""
    boundless = tuple(2**62 for _ in sized.figures.capacity)
    free = Figures(sized.figures.kinds, sized.figures.entering, sized.figures.whole, sized.figures.num_bytes, boundless)
    found = select(Sized(free, sized.sizes), space.conflicts, insisted)
    return found.seconds if found else 0.0


def _sizes(figures: Figures, kind: int, within: Collection[int] | None = None) -> tuple[int, ...]:
    """Units of every position: by speed alone, or within the memory that is left if the kinds `within` are cut in one proportion."""
    own = figures.kinds[kind]
    excess = np.zeros(own.size + 1)
    curves = []
    for position, seconds in enumerate(own.cut):
        if within is not None:
            divided = sum(figures.kinds[other].num_bytes for other in within)
            share = np.arange(own.size + 1) / own.size
            excess = np.maximum(figures.num_bytes - divided * (1 - share) - figures.capacity[position], 0.0)
        curves.append(Curve(seconds, excess, 1))
    try:
        return divide_units(own.size, curves)
    except MemoryShortage as error:
        return error.sizes


def _names(space: CutSpace, kinds: Collection[int]) -> tuple[str, ...]:
    chosen = {axis for kind in kinds for axis in space.kinds[kind]}
    return tuple(axis for axis in space.axes if axis in chosen)


def _cuts(scene: Scene, space: CutSpace, sized: Sized, kinds: Collection[int]) -> tuple[Cut, ...]:
    sizes = {axis: sized.sizes[kind] for kind in kinds for axis in space.kinds[kind]}
    return tuple(Cut(axis, sizes[axis]) for axis in space.axes if axis in sizes)
