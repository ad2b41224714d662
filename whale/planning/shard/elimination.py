"""The least sum of tables over some variables, exactly: one variable after another is eliminated from the tables that it is in.

    a(x, y) + b(y, z) + c(z)        x goes: a'(y) = min over x of a(x, y)        then y: b'(z) = min over y of a'(y) + b(y, z)

Along chains of ops, with branches that join again, tables stay small (dynamic programming over a tree decomposition). The order in
which variables go depends on which of them meet, not on what tables hold: it is found once for several sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Step:
    """One variable gone.

    Attributes:
        variable: that goes.
        met: the others of the tables that it was in.
        terms: of what is left of these tables, the given ones by their numbers, then what earlier steps left.
    """

    variable: int
    met: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """In which variables go.

    Attributes:
        sizes: per variable, how many values it may have.
        scopes: per given table, the variables that it depends on.
        steps: until none is left.
    """

    sizes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]

    def joined(self, tables: Sequence[Floats]) -> list[Floats]:
        """Per step, the least sum of what has gone by then, by the values of its variable, then of those that it met.

        Args:
            tables: the values of the given ones.
        """
        terms, scopes = list(tables), list(self.scopes)
        found = []
        for step in self.steps:
            own = (step.variable, *step.met)
            found.append(_sum([(scopes[term], terms[term]) for term in step.terms], own, self.sizes))
            terms.append(found[-1].min(axis=0))
            scopes.append(step.met)
        return found

    def least(self, tables: Sequence[Floats]) -> tuple[float, tuple[int, ...]]:
        """The least sum, and the values of the variables that make it; of equal ones those that come first."""
        joined = self.joined(tables)
        return self.total(joined), self.followed_back(joined)

    def total(self, joined: Sequence[Floats]) -> float:
        """The least sum of tables that were joined."""
        return sum(float(table.min()) for step, table in zip(self.steps, joined, strict=True) if not step.met)

    def followed_back(self, joined: Sequence[Floats]) -> tuple[int, ...]:
        """The values that make it."""
        values = [0] * len(self.sizes)
        for step, table in zip(self.steps[::-1], joined[::-1], strict=True):
            own = np.moveaxis(table, 0, -1)[tuple(values[other] for other in step.met)]
            values[step.variable] = int(own.argmin())
        return tuple(values)

    def at(self, tables: Sequence[Floats], values: Sequence[int]) -> float:
        """The sum at some values."""
        return sum(float(table[tuple(values[variable] for variable in scope)]) for scope, table in zip(self.scopes, tables, strict=True))


def order_of(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], max_entries: int) -> Order | None:
    """The order in which each variable that goes leaves the smallest table.

    Args:
        sizes: per variable, how many values it may have.
        scopes: per table, the variables that it depends on.
        max_entries: of a table on the way.

    Returns:
        None where a table would have more entries.
    """
    terms, filed = [frozenset(scope) for scope in scopes], [list[int]() for _ in sizes]
    meets: list[set[int]] = [{variable} for variable in range(len(sizes))]

    def file(term: int) -> None:
        for variable in terms[term]:
            filed[variable].append(term)
            meets[variable].update(terms[term])

    for term in range(len(terms)):
        file(term)
    steps = list[Step]()
    left = dict.fromkeys(range(len(sizes)))
    entries = [prod(sizes[other] for other in own) for own in meets]
    while left:
        variable = min(left, key=entries.__getitem__)
        if entries[variable] > max_entries:
            return None
        del left[variable]
        met = tuple(sorted(meets[variable] - {variable}))
        steps.append(Step(variable, met, tuple(filed[variable])))
        for other in met:
            filed[other] = [term for term in filed[other] if variable not in terms[term]]
            meets[other].discard(variable)
        terms.append(frozenset(met))
        file(len(terms) - 1)
        for other in met:
            entries[other] = prod(sizes[each] for each in meets[other])
    return Order(tuple(sizes), tuple(scopes), tuple(steps))


def minimise(sizes: Sequence[int], tables: Iterable[Table], max_entries: int) -> tuple[float, tuple[int, ...]] | None:
    """The least sum, and the values of the variables that make it; of equal ones those that come first.

    Args:
        sizes: per variable, how many values it may have.
        tables: the terms.
        max_entries: of a table on the way.

    Returns:
        None where a table would have more entries; infinity where no values go together.
    """
    given = list(tables)
    order = order_of(sizes, [table.variables for table in given], max_entries)
    return None if order is None else order.least([table.values for table in given])


def _sum(tables: Iterable[tuple[tuple[int, ...], Floats]], variables: tuple[int, ...], sizes: Sequence[int]) -> Floats:
    """Some tables, each with its variables, as one over these variables."""
    place = {variable: index for index, variable in enumerate(variables)}
    found: Floats = np.zeros([sizes[variable] for variable in variables])
    for scope, values in tables:
        places = [place[variable] for variable in scope]
        shape = [1] * len(variables)
        for variable, index in zip(scope, places, strict=True):
            shape[index] = sizes[variable]
        found += values.transpose(sorted(range(len(places)), key=places.__getitem__)).reshape(shape)
    return found
