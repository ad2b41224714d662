"""The least sum of tables over some variables, exactly: one variable after another is eliminated from the tables that it is in.

    a(x, y) + b(y, z) + c(z)        x goes: a'(y) = min over x of a(x, y)        then y: b'(z) = min over y of a'(y) + b(y, z)

Along chains of ops, with branches that join again, tables stay small (dynamic programming over a tree decomposition).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.op_table import Floats


@dataclass(frozen=True)
class Table:
    """A term of the sum.

    Attributes:
        variables: that it depends on.
        values: by their values, one dimension each; infinite where they do not go together.
    """

    variables: tuple[int, ...]
    values: Floats


@dataclass(frozen=True)
class _Step:
    """One variable gone: by the values of those that it met, its best own."""

    variable: int
    met: tuple[int, ...]
    best: NDArray[np.intp]


def minimise(sizes: Sequence[int], tables: Iterable[Table], max_entries: int) -> tuple[float, tuple[int, ...]] | None:
    """The least sum, and the values of the variables that make it; of equal ones those that come first.

    Args:
        sizes: per variable, how many values it may have.
        tables: the terms.
        max_entries: of a table on the way.

    Returns:
        None where a table would have more entries; infinity where no values go together.
    """
    by_variable: list[list[Table]] = [[] for _ in sizes]
    meets: list[set[int]] = [{variable} for variable in range(len(sizes))]
    for table in tables:
        _file(table, by_variable, meets)
    total, steps = 0.0, []
    left = dict.fromkeys(range(len(sizes)))
    entries = [prod(sizes[other] for other in own) for own in meets]
    while left:
        variable = min(left, key=entries.__getitem__)
        if entries[variable] > max_entries:
            return None
        del left[variable]
        met = tuple(sorted(meets[variable] - {variable}))
        joined = _sum(by_variable[variable], (variable, *met), sizes)
        steps.append(_Step(variable, met, joined.argmin(axis=0)))
        rest = Table(met, joined.min(axis=0))
        for other in met:
            by_variable[other] = [table for table in by_variable[other] if variable not in table.variables]
            meets[other].discard(variable)
        if met:
            _file(rest, by_variable, meets)
        else:
            total += float(rest.values)
        for other in met:
            entries[other] = prod(sizes[each] for each in meets[other])
    return total, _followed_back(steps, len(sizes))


def _file(table: Table, by_variable: list[list[Table]], meets: list[set[int]]) -> None:
    for variable in table.variables:
        by_variable[variable].append(table)
        meets[variable].update(table.variables)


def _sum(tables: Iterable[Table], variables: tuple[int, ...], sizes: Sequence[int]) -> Floats:
    """Some tables as one over these variables."""
    place = {variable: index for index, variable in enumerate(variables)}
    found: Floats = np.zeros([sizes[variable] for variable in variables])
    for table in tables:
        places = [place[variable] for variable in table.variables]
        shape = [1] * len(variables)
        for variable, index in zip(table.variables, places, strict=True):
            shape[index] = sizes[variable]
        found += table.values.transpose(sorted(range(len(places)), key=places.__getitem__)).reshape(shape)
    return found


def _followed_back(steps: Sequence[_Step], num_variables: int) -> tuple[int, ...]:
    values = [0] * num_variables
    for step in reversed(steps):
        values[step.variable] = int(step.best[tuple(values[other] for other in step.met)])
    return tuple(values)
