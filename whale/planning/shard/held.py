"""What the classes of a split stage hold at each label, where some runs of its ops are computed again.

outside of runs    what ops keep lies there for every micro-batch in flight
in the largest     what its ops keep is there once, of the micro-batch that is computed again
in other runs      nothing: only what a run reads from outside is kept
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.op_table import Floats
from whale.estimate.memory.kept import keeps_parameter, kept_for_weights
from whale.estimate.memory.memory import kept_names, size_line
from whale.estimate.prices.part import Recompute, Segment
from whale.estimate.prices.prices import Prices
from whale.planning.shard.classes import WHOLE, Classes, Label, Tensors


@dataclass(frozen=True, slots=True)
class Repeated:
    """What a stage computes again, whatever its ops are called.

    Attributes:
        runs: of its ops, by their places among them (start, stop).
        num_alive: where R actions recompute the whole stage, how many recomputed micro-batches are alive at once; else 0.
        waiting: micro-batches whose weight gradients wait, where these hold more than others in flight; else 0.
    """

    runs: tuple[tuple[int, int], ...] = ()
    num_alive: int = 0
    waiting: int = 0

    def __bool__(self) -> bool:
        return bool(self.runs or self.num_alive or self.waiting)


NOTHING_REPEATED = Repeated()


@dataclass(frozen=True, slots=True)
class Divisible:
    """Bytes of a node that lie in parts, each with the kind along which.

    Attributes:
        held: at all times.
        kept: for each micro-batch in flight.
        again: of the micro-batch that is computed again.
        waiting: of one whose weight gradients wait, beyond `kept`.
    """

    held: tuple[tuple[int, float], ...] = ()
    kept: tuple[tuple[int, float], ...] = ()
    again: tuple[tuple[int, float], ...] = ()
    waiting: tuple[tuple[int, float], ...] = ()


class Held:
    """Bytes of the classes of a stage.

    Args:
        classes: of the stage.
        prices: of the graph.
        num_rows: of a micro-batch.
        repeated: what is computed again.
    """

    def __init__(self, classes: Classes, prices: Prices, num_rows: float, repeated: Repeated = NOTHING_REPEATED) -> None:
        self._classes, self._prices, self._num_rows, self._repeated = classes, prices, num_rows, repeated
        ops = classes.scene.ops
        self._runs: tuple[Segment, ...] = (ops,) if repeated.num_alive else tuple(ops[start:stop] for start, stop in repeated.runs)
        self._inside = frozenset(name for run in self._runs for name in run)
        self._firsts = frozenset(run[0] for run in self._runs)

    @cached_property
    def divisible(self) -> tuple[tuple[Divisible, ...], ...]:
        """Per node, per label, what lies in parts."""
        return tuple(tuple(self._divisible(number, label) for label in node.labels) for number, node in enumerate(self._classes.nodes))

    def working(self, number: int, label: Label, shares: NDArray[np.float64]) -> Floats:
        """What the largest member of a node works on: its result and the gradient of that (`working_line`).

        Args:
            shares: per kind of axes, per position, what devices have of them.
        """
        found = np.zeros(shares.shape[1])
        for member in self._classes.members[self._classes.nodes[number].first.name]:
            kind = self._classes.form(member, label)
            found = np.maximum(found, 2 * self.num_bytes(member) * (shares[kind] if kind != WHOLE else 1.0))
        return found

    def num_bytes(self, name: str) -> float:
        """Of what an op makes, for one micro-batch."""
        return self._prices.outputs[name].at(self._num_rows)

    def kept_copies(self, tensors: Tensors, in_flight: int, *, is_gathered: bool) -> float:
        """The share of some alike tensors of which a form that a bridge makes is kept for each micro-batch in flight.

        What is gathered is not, where segments are computed again: its part is kept, and gathered again (`whale.estimate.prices.again`).
        """
        if not self._runs:
            return 1.0
        if self._repeated.num_alive:
            return self._repeated.num_alive / in_flight
        is_value = tensors.first.kind == "call"
        kept = (self._enters(op.name) or (not (is_gathered and is_value) and self._is_kept(op.name)) for op in tensors.ops)
        return sum(kept) / len(tensors.ops)

    def is_entered(self, tensors: Tensors) -> bool:
        """Whether a form of some of these tensors is made outside of a run that reads it."""
        return any(self._enters(op.name) for op in tensors.ops)

    def _enters(self, tensor: str) -> bool:
        readers = self._classes.readers.get(tensor, ())
        is_inside = bool(readers) and readers[0] in self._inside and readers[0] not in self._firsts
        return not is_inside and not self._inside.isdisjoint(readers)

    def _is_kept(self, tensor: str) -> bool:
        """Whether an op outside of runs keeps it."""
        graph = self._prices.graph
        outside = [name for name in self._classes.readers.get(tensor, ()) if name not in self._inside]
        if graph.by_name[tensor].kind == "call":
            return any(graph.storage[tensor] in self._prices.kept.get(name, ()) for name in outside)
        return any(keeps_parameter(graph, graph.by_name[name], tensor) for name in outside)

    def _divisible(self, number: int, label: Label) -> Divisible:
        node, graph = self._classes.nodes[number], self._prices.graph
        if node.first.kind in ("parameter", "buffer"):
            held = sum(self._prices.parameter_bytes(graph.parameter_by_name[op.target].name) for op in node.ops)
            return Divisible(held=((label.work, float(held)),)) if label.work != WHOLE else Divisible()
        in_flight, again, times = self._names, self._again, max(1, self._repeated.num_alive)
        kept = tuple(self._in_parts(number, label, in_flight))
        waiting, count = list[tuple[int, float]](), self._repeated.waiting
        there = () if count else tuple((kind, times * num_bytes) for kind, num_bytes in self._in_parts(number, label, again))
        if count:  # W needs more than what is computed again
            waiting += ((kind, count * num_bytes) for kind, num_bytes in self._in_parts(number, label, self._apart))
            waiting += ((kind, -count * num_bytes) for kind, num_bytes in kept)
        return Divisible(kept=kept, again=there, waiting=tuple(waiting))

    def _in_parts(self, number: int, label: Label, names: Collection[str]) -> Iterator[tuple[int, float]]:
        """Of the results of a node that are among some names the bytes that lie in parts."""
        node, members = self._classes.nodes[number], self._classes.members
        for place, member in enumerate(members[node.first.name]):
            kind = self._classes.form(member, label)
            count = sum(members[op.name][place] in names for op in node.ops) if kind != WHOLE else 0
            if count:
                yield kind, count * self.num_bytes(member)

    @cached_property
    def _kept_names(self) -> tuple[dict[str, None], tuple[frozenset[str], ...]]:
        return kept_names(self._prices.graph, self._classes.scene.ops, self._prices.kept, self._runs)

    @property
    def _names(self) -> Collection[str]:
        """What is kept for each micro-batch in flight."""
        return () if self._repeated.num_alive else self._kept_names[0]

    @cached_property
    def _again(self) -> Collection[str]:
        """What is there once more where the largest run is computed again."""
        left, inside = self._kept_names
        return inside[0] | left.keys() if self._repeated.num_alive else max(inside, key=self._size, default=frozenset[str]())

    @cached_property
    def _apart(self) -> Collection[str]:
        """What is kept for weight gradients."""
        return kept_for_weights(self._prices.graph, self._classes.scene.ops)

    def _size(self, names: Collection[str]) -> float:
        return size_line(self._prices.outputs, names).at(self._num_rows)


def repeated_of(ops: Sequence[str], again: Recompute, waiting: int) -> Repeated:
    """What a stage computes again, by the places of its ops."""
    position = {name: place for place, name in enumerate(ops)}
    return Repeated(tuple((position[segment[0]], position[segment[-1]] + 1) for segment in again.segments), again.num_alive, waiting)
