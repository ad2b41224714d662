"""Labels by elimination: the optimum, where it is found and proven without an integer program.

The program is a sum of tables, one per node and one per tensor, but for three things. Something has to be divided, and a runner-up has to
use other kinds: of some marks one at least, which a chain of yes-or-no variables sees to. Devices wait for the slowest of them
along each kind. What one device takes is a lower bound of that; where the labels that are best by it have the same slowest
device, they are best. And where memory is short, bytes are a second sum, which has to leave room for what the op works on that works on
most: for each size that this may have the labels up to it are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.op_table import Floats
from whale.planning.shard.classes import Use
from whale.planning.shard.elimination import Order, Table, order_of
from whale.planning.shard.program import LEAST_BYTES, LabelFigures, Program, Selection, TensorFigures, bridge_seconds, copies_of
from whale.planning.shard.within import CLOSE, TooMany, Within

MAX_ENTRIES = 2**16
"""Of a table on the way."""

MAX_MEETINGS = 2**10
"""Of the form and the uses of one tensor."""

MAX_ROUNDS = 4
"""So often the slowest devices are corrected."""

Marks = tuple[NDArray[np.bool_], ...]
"""Per node, for each of its labels."""


class Unsettled(Exception):
    """The optimum is not found so: tables are too large, the slowest devices change from label to label, or
    the fullest where memory is short."""


class _Undivided(Exception):
    """Labels were found that divide nothing."""


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
    best: Selection | None = None
    for kind in sorted({kind for node in program.nodes for label in node for kind in label.kinds}):
        using = search.marks(partial(_uses, kind))
        most = inf if best is None or best.excess > 0 else best.seconds
        found = search.best(without=using, most=most) if kind in other_than else search.best(one_of=(using,), most=most)
        best = min(filter(None, (best, found)), key=lambda selection: (selection.excess, selection.seconds), default=None)
    return best


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
        """Seconds of the bridges of each tensor."""
        return tuple(_by_labels(tensor, lambda *met, tensor=tensor: bridge_seconds(tensor, *met)) for tensor in self.program.tensors)

    def best(self, without: Marks | None = None, one_of: Sequence[Marks] = (), most: float = inf) -> Selection | None:
        """The best labels; None where there are none, or none that may fit and take less than `most`.

        Args:
            without: labels that are left out.
            one_of: of each of these, one label at least is among them.
            most: seconds of labels that fit.
        """
        if not all(any(own.any() for own in marks) for marks in one_of):
            return None
        nodes = range(len(self.program.nodes))
        sizes = [len(node) for node in self.program.nodes]
        others = [*self._bridges, *(table for marks in one_of for table in _chain(marks, sizes))]
        order = order_of(sizes, [*((node,) for node in nodes), *(table.variables for table in others)], MAX_ENTRIES)
        if order is None:
            raise Unsettled
        shared = [table.values for table in others]
        try:
            return self._fastest(order, lambda slowest: [*self._own(slowest, without), *shared], most)
        except _Undivided:
            return self.best(without, (*one_of, self._dividing), most)

    def _fastest(self, order: Order, tables: Callable[[Mapping[int, int]], list[Floats]], most: float) -> Selection | None:
        """The fastest labels that fit; where none do, of those that overflow least. None where all take as much as `most`.

        Args:
            tables: seconds, if these devices are the slowest along their kinds.

        Raises:
            _Undivided: some that come close divide nothing.
        """
        slowest: Mapping[int, int] = {}
        found: Selection | None = None
        bound = 0.0
        for _ in range(MAX_ROUNDS):
            seconds = tables(slowest)
            least, labels = order.least(seconds)
            if least == inf or least >= most:
                return None
            selection = self._evaluated(labels)
            if selection.excess > 0:
                return self._within_memory(order, tables(self._always_slowest), most)
            bound = max(bound, least)
            found = selection if found is None or selection.seconds < found.seconds else found
            if found.seconds <= bound * (1 + CLOSE):
                return found
            slowest = self._slowest(selection.labels)
        raise Unsettled

    def _evaluated(self, values: Sequence[int]) -> Selection:
        """What labels come to, which stand before other variables."""
        labels = values[: len(self.program.nodes)]
        if not any(marks[label] for marks, label in zip(self._dividing, labels, strict=True)):
            raise _Undivided
        selection = self.program.evaluate(labels)
        assert selection is not None, "tables forbid what is not allowed"
        return selection

    def _within_memory(self, order: Order, seconds: Sequence[Floats], most: float) -> Selection | None:
        """`_fastest` where the fastest labels of all do not fit."""
        program, position = self.program, self._fullest
        room = program.capacity[position] - program.num_bytes
        judged = partial(self._seconds_within, allowed=0.0)
        held = [*self._held(position), *(np.zeros(table.shape) for table in seconds[len(program.nodes) + len(program.tensors) :])]
        questions = []
        for limit, allowed in self._up_to(position):
            cost = [np.where(marks, own, inf) for marks, own in zip(allowed, seconds, strict=False)] + [*seconds[len(allowed) :]]
            weight = [np.where(np.isinf(own), inf, table) for own, table in zip(cost, held, strict=True)]
            question = Within(order, cost, weight, room - program.working_share * limit, judged)
            if question.least_weight < inf:
                questions.append(question)
        excess = min(question.least_weight - question.room for question in questions)
        if excess > 0:
            if most < inf:  # there are labels that fit
                return None
            for question in questions:
                question.room += excess * (1 + CLOSE) + LEAST_BYTES
                question.judge = partial(self._seconds_within, allowed=excess * (1 + CLOSE) + LEAST_BYTES)
        try:
            best = _first_of(sorted(questions, key=lambda question: order.total(question.costs)), most)
        except TooMany:
            raise Unsettled from None
        return self._evaluated(best) if best else None

    def _seconds_within(self, values: Sequence[int], allowed: float) -> float | None:
        """Seconds of labels that overflow memory by no more than is allowed."""
        selection = self._evaluated(values)
        return selection.seconds if selection.excess <= allowed else None

    @cached_property
    def _fullest(self) -> int:
        """The position that is fuller than any other whatever the labels."""
        program = self.program
        labels = [label for node in program.nodes for label in node]
        held = [label.held(program.in_flight) for label in labels]
        working = [label.working for label in labels if label.working]
        copies = [pair.copy for tensor in program.tensors for pair in tensor.pairs.values()]
        figures = np.array([*held, *working, *copies, [-float(capacity) for capacity in program.capacity]])
        fullest = int(figures.sum(axis=0).argmax())
        if (figures > figures[:, [fullest]]).any():
            raise Unsettled
        return fullest

    def _held(self, position: int) -> Iterator[Floats]:
        """Bytes by the labels of each node, and of the copies of each tensor."""
        program = self.program
        for node in program.nodes:
            yield np.array([label.held(program.in_flight)[position] for label in node])
        for tensor in program.tensors:

            def copied(form: int, uses: Sequence[Use], tensor: TensorFigures = tensor) -> float:
                return sum((copy[position] for copy in copies_of(tensor, form, uses)), 0.0)

            yield program.in_flight * _by_labels(tensor, copied).values

    def _up_to(self, position: int) -> Iterator[tuple[float, Marks]]:
        """What the op works on that works on most, and the labels that work on no more."""
        working = [np.array([label.working[position] if label.working else 0.0 for label in node]) for node in self.program.nodes]
        floor = max(own.min() for own in working)
        for limit in sorted({float(size) for own in working for size in own if size >= floor}):
            yield limit, tuple(own <= limit for own in working)

    def _own(self, slowest: Mapping[int, int], without: Marks | None) -> Iterator[Floats]:
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
            yield values

    @cached_property
    def _always_slowest(self) -> Mapping[int, int]:
        """Per kind of work, the device that takes longest for it whatever the labels."""
        lanes: dict[int, list[tuple[float, ...]]] = {}
        for node in self.program.nodes:
            for label in node:
                lanes.setdefault(label.lane, []).append(label.seconds)
        found = {lane: int(np.sum(seconds, axis=0).argmax()) for lane, seconds in lanes.items()}
        if any(max(own) > own[found[lane]] for lane, seconds in lanes.items() for own in seconds):
            raise Unsettled
        return found

    def _slowest(self, labels: Sequence[int]) -> dict[int, int]:
        """Per kind of work, the device that takes longest for it."""
        chosen = [node[label] for node, label in zip(self.program.nodes, labels, strict=True)]
        lanes = dict.fromkeys(label.lane for label in chosen)
        return {lane: int(np.sum([own.seconds for own in chosen if own.lane == lane], axis=0).argmax()) for lane in lanes}


def _first_of(questions: Sequence[Within], most: float) -> tuple[int, ...] | None:
    """The cheapest values of any question; None where there are none that cost less than `most`."""
    best: tuple[int, ...] | None = None
    for question in questions:
        question.most = most
        found = question.found()
        if found is not None:
            best, most = found.values, found.cost
    return best


def _by_labels(tensor: TensorFigures, value: Callable[[int, Sequence[Use]], float]) -> Table:
    """A value of the form in which a tensor lies and the uses of its users, by the labels of the nodes that make and read it."""
    forms, uses = tuple(dict.fromkeys(tensor.forms)), [tuple(dict.fromkeys(user.uses)) for user in tensor.users]
    shape = len(forms), *map(len, uses)
    if prod(shape) > MAX_MEETINGS:
        raise Unsettled
    met = np.array([value(form, own) for form in forms for own in product(*uses)]).reshape(shape)
    ways = [(tensor.node, [forms.index(form) for form in tensor.forms])]
    ways += [(user.node, [own.index(use) for use in user.uses]) for user, own in zip(tensor.users, uses, strict=True)]
    variables = tuple(dict.fromkeys(node for node, _ in ways if node >= 0))
    return Table(variables, met[tuple(_along(variables, node, index) for node, index in ways)])


def _uses(kind: int, label: LabelFigures) -> bool:
    return kind in label.kinds


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
