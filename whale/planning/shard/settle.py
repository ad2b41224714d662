"""Labels by elimination: the optimum, where it is found and proven without an integer program.

The program is a sum of tables, one per node and one per tensor, but for two things. Something has to be divided, and a runner-up has to
use other kinds: of some marks one at least, which a chain of yes-or-no variables sees to. And devices wait for the slowest of them
along each kind. What one device takes is a lower bound of that; where the labels that are best by it have the same slowest
device, they are best.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from whale.planning.shard.elimination import Table, minimise
from whale.planning.shard.program import LabelFigures, Program, Selection, TensorFigures, bridge_seconds

MAX_ENTRIES = 2**16
"""Of a table on the way."""

MAX_MEETINGS = 2**10
"""Of the form and the uses of one tensor."""

MAX_ROUNDS = 4
"""So often the slowest devices are corrected."""

CLOSE = 1e-9
"""Seconds that differ by this share are equal."""

Marks = tuple[NDArray[np.bool_], ...]
"""Per node, for each of its labels."""


class Unsettled(Exception):
    """The optimum is not found so: tables are too large, memory is short, or the slowest devices change from label to label."""


def settle(program: Program, other_than: Collection[int] | None = None) -> Selection | None:
    """The best labels; None where there are none.

    Args:
        program: the problem.
        other_than: a set of kinds that is not to be found again, for the runner-up.

    Raises:
        Unsettled: it takes more to tell.
    """
    search = _Search(program)
    if other_than is None:
        return search.best()
    found = []
    for kind in sorted({kind for node in program.nodes for label in node for kind in label.kinds}):
        using = search.marks(lambda label, kind=kind: kind in label.kinds)  # type: ignore[misc]
        found.append(search.best(without=using) if kind in other_than else search.best(one_of=(using,)))
    return min(filter(None, found), key=lambda selection: selection.seconds, default=None)


@dataclass(frozen=True)
class _Search:
    program: Program

    def marks(self, holds: Callable[[LabelFigures], bool]) -> Marks:
        """Which labels something holds for."""
        return tuple(np.array([holds(label) for label in node]) for node in self.program.nodes)

    @cached_property
    def _dividing(self) -> Marks:
        return self.marks(lambda label: label.divides)

    @cached_property
    def _bridges(self) -> tuple[Table, ...]:
        return tuple(self._bridges_of(tensor) for tensor in self.program.tensors)

    def _bridges_of(self, tensor: TensorFigures) -> Table:
        """Seconds of the bridges of a tensor by the labels of the nodes that make and read it."""
        forms, uses = tuple(dict.fromkeys(tensor.forms)), [tuple(dict.fromkeys(user.uses)) for user in tensor.users]
        shape = len(forms), *map(len, uses)
        if prod(shape) > MAX_MEETINGS:
            raise Unsettled
        met = np.array([bridge_seconds(tensor, form, own) for form in forms for own in product(*uses)]).reshape(shape)
        ways = [(tensor.node, [forms.index(form) for form in tensor.forms])]
        ways += [(user.node, [own.index(use) for use in user.uses]) for user, own in zip(tensor.users, uses, strict=True)]
        variables = tuple(dict.fromkeys(node for node, _ in ways if node >= 0))
        return Table(variables, met[tuple(_along(variables, node, index) for node, index in ways)])

    def best(self, without: Marks | None = None, one_of: Sequence[Marks] = ()) -> Selection | None:
        """The best labels; None where there are none.

        Args:
            without: labels that are left out.
            one_of: of each of these, one label at least is among them.
        """
        sizes = [len(node) for node in self.program.nodes]
        chains = [*self._bridges]
        for marks in one_of:
            if not any(own.any() for own in marks):
                return None
            chains += _chain(marks, sizes)
        slowest: Mapping[int, int] = {}
        found: Selection | None = None
        bound = 0.0
        for _ in range(MAX_ROUNDS):
            least = minimise(sizes, [*self._own(slowest, without), *chains], MAX_ENTRIES)
            if least is None:
                raise Unsettled
            if least[0] == inf:
                return None
            labels = least[1][: len(self.program.nodes)]
            if not any(marks[label] for marks, label in zip(self._dividing, labels, strict=True)):
                return self.best(without, (*one_of, self._dividing))
            selection = self.program.evaluate(labels)
            assert selection is not None, "tables forbid what is not allowed"
            if selection.excess > 0:
                raise Unsettled
            bound = max(bound, least[0])
            found = selection if found is None or selection.seconds < found.seconds else found
            if found.seconds <= bound * (1 + CLOSE):
                return found
            slowest = self._slowest(labels)
        raise Unsettled

    def _own(self, slowest: Mapping[int, int], without: Marks | None) -> Iterator[Table]:
        """Seconds of each node by its labels, on one device per kind of work."""
        insisted: dict[int, list[int]] = {}
        for number, kind in self.program.insisted:
            insisted.setdefault(number, []).append(kind)
        for number, node in enumerate(self.program.nodes):
            values = np.array([label.fixed + label.seconds[slowest.get(label.lane, 0)] for label in node])
            for kind in insisted.get(number, ()):
                values[[label.lane != kind for label in node]] = inf
            if without is not None:
                values[without[number]] = inf
            yield Table((number,), values)

    def _slowest(self, labels: Sequence[int]) -> dict[int, int]:
        """Per kind of work, the device that takes longest for it."""
        chosen = [node[label] for node, label in zip(self.program.nodes, labels, strict=True)]
        lanes = dict.fromkeys(label.lane for label in chosen)
        return {lane: int(np.sum([own.seconds for own in chosen if own.lane == lane], axis=0).argmax()) for lane in lanes}


def _along(variables: Sequence[int], variable: int, values: Sequence[int]) -> NDArray[np.intp]:
    """Values along the dimension of a variable."""
    shape = [1] * len(variables)
    if variable >= 0:
        shape[variables.index(variable)] = len(values)
    return np.array(values).reshape(shape)


def _chain(marks: Marks, sizes: list[int]) -> Iterator[Table]:
    """Tables that are finite where one label at least has a mark: each of some new variables tells of a mark so far."""
    marked = [(node, own) for node, own in enumerate(marks) if own.any()]
    before: tuple[int, ...] = ()
    for node, own in marked:
        seen = own if not before else own[:, None] | np.array([False, True])
        if node == marked[-1][0]:
            yield Table((node, *before), np.where(seen, 0.0, inf))
            return
        sizes.append(2)
        told = len(sizes) - 1
        yield Table((node, *before, told), np.where(seen[..., None] | np.array([True, False]), 0.0, inf))
        before = (told,)
