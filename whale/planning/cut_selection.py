"""Which kinds of axes to cut: the exact optimum of a small integer program (HiGHS, gap 0).

x_k = 1     kind k is cut                       saves whole_k - cut_k, costs its reductions forward
y_S = 1     some kind of S is cut               costs the reductions backward of the tensors that S makes enter
e           bytes beyond a device's memory      kept at 0; where nothing fits, at the least there is

minimise  sum x_k (cut_k + leaving_k - whole_k) + sum y_S entering_S
where     sum of x_k over the kinds that meet in one op <= 1,   x_k <= y_S for k in S,   sum x_k >= 1
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from whale.cost.op_table import Floats
from whale.planning.cut_figures import Figures


@dataclass(frozen=True)
class Selection:
    """A set of kinds.

    Attributes:
        kinds: indices, ascending.
        seconds: of the stage for one micro-batch.
        excess: bytes by which it overflows the memory of the tightest device.
    """

    kinds: tuple[int, ...]
    seconds: float
    excess: float


@dataclass(frozen=True)
class Sized:
    """The figures with the sizes of every kind fixed.

    Attributes:
        figures: what they are of.
        sizes: per kind, the units of each position.
    """

    figures: Figures
    sizes: tuple[tuple[int, ...], ...]

    def gain(self, kind: int) -> float:
        """Seconds by which cutting a kind changes the stage, without entrances: negative where it saves time."""
        own = self.figures.kinds[kind]
        cut = max(float(curve[units]) for curve, units in zip(own.cut, self.sizes[kind], strict=True))
        return cut + own.leaving - max(own.whole)

    def saved_bytes(self, kind: int) -> Floats:
        """Per position, the bytes that it need not hold if a kind is cut."""
        own = self.figures.kinds[kind]
        result: Floats = own.num_bytes * (1 - np.array(self.sizes[kind]) / own.size)
        return result

    def evaluate(self, kinds: Collection[int]) -> Selection:
        """A set of kinds, priced."""
        seconds = self.figures.whole + sum(self.gain(kind) for kind in kinds)
        seconds += sum(cost for users, cost in self.figures.entering if set(users) & set(kinds))
        held = self.figures.num_bytes - sum((self.saved_bytes(kind) for kind in kinds), np.zeros(len(self.figures.capacity)))
        return Selection(tuple(sorted(kinds)), float(seconds), max(0.0, float((held - np.array(self.figures.capacity)).max())))


def select(
    sized: Sized, conflicts: Sequence[Sequence[int]], insisted: Collection[int], other_than: Collection[int] | None = None
) -> Selection | None:
    """The best set of kinds.

    Args:
        sized: the prices.
        conflicts: sets of kinds of which at most one is cut.
        insisted: kinds that must be cut.
        other_than: a set that is not to be found again, for the runner-up.

    Returns:
        None where there is no other set.
    """
    cost = _cost(sized)
    rows = _rows(sized, conflicts, other_than)
    overflow = np.append(np.zeros(len(cost) - 1), 1.0)
    found = _solve(sized, cost, rows, insisted, 0.0)
    if found is None:  # nothing fits: what overflows least, and of that the fastest
        least = _solve(sized, overflow, rows, insisted, np.inf)
        found = None if least is None else _solve(sized, cost, rows, insisted, float(least[-1]) + 1e-7)
    if found is None:
        return None
    return sized.evaluate([kind for kind in range(len(sized.figures.kinds)) if found[kind] > 0.5])


def _solve(sized: Sized, cost: Floats, rows: tuple[Floats, Floats, Floats], insisted: Collection[int], most_excess: float) -> Floats | None:
    """The cheapest assignment whose overflow is at most so much; None where there is none."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second to load, and only a split needs it

    num_kinds, num_sets = len(sized.figures.kinds), len(sized.figures.entering)
    lower = np.zeros(len(cost))
    lower[list(insisted)] = 1.0
    upper = np.append(np.ones(num_kinds + num_sets), most_excess)
    integral = np.append(np.ones(num_kinds), np.zeros(num_sets + 1))
    found = milp(
        cost,
        integrality=integral,
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(*rows),
        options={"mip_rel_gap": 0.0},
    )
    result: Floats | None = found.x
    return result


def _cost(sized: Sized) -> Floats:
    """The objective, scaled so that the largest time is 1000; a device's memory counts as 1, and overflow costs nothing here."""
    times = np.array([sized.gain(kind) for kind in range(len(sized.figures.kinds))] + [cost for _, cost in sized.figures.entering])
    return np.append(times * (1000 / max(float(np.abs(times).max()), 1e-30)), 0.0)


def _rows(sized: Sized, conflicts: Sequence[Sequence[int]], other_than: Collection[int] | None) -> tuple[Floats, Floats, Floats]:
    num_kinds, num_sets = len(sized.figures.kinds), len(sized.figures.entering)
    width = num_kinds + num_sets + 1
    rows: list[Floats] = []
    low: list[float] = []
    high: list[float] = []

    def add(entries: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(width)
        row[list(entries)] = list(entries.values())
        rows.append(row)
        low.append(least)
        high.append(most)

    add(dict.fromkeys(range(num_kinds), 1.0), 1.0, np.inf)
    for conflict in conflicts:
        add(dict.fromkeys(conflict, 1.0), -np.inf, 1.0)
    for number, (users, _) in enumerate(sized.figures.entering):
        for kind in users:
            add({kind: 1.0, num_kinds + number: -1.0}, -np.inf, 0.0)
    saved = np.array([sized.saved_bytes(kind) for kind in range(num_kinds)])
    for position, capacity in enumerate(sized.figures.capacity):
        scale = 1 / max(capacity, 1)
        entries = {kind: -scale * float(saved[kind, position]) for kind in range(num_kinds)}
        add(entries | {width - 1: -1.0}, -np.inf, scale * (capacity - sized.figures.num_bytes))
    if other_than is not None:
        chosen = set(other_than)
        add({kind: -1.0 if kind in chosen else 1.0 for kind in range(num_kinds)}, 1.0 - len(chosen), np.inf)
    return np.array(rows), np.array(low), np.array(high)
