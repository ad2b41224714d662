"""Which label each class of ops gets, as abstract figures: what a choice of labels costs.

seconds of a choice     per kind, of the work along it on its slowest device, + sums + bridges
bytes of a choice       per position, what its labels hold more or less than if everything were whole, + copies by bridges, + what
                        the op works on that works on most
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from whale.estimate.costs.op_table import Floats
from whale.planning.shard.classes import WHOLE, Use

LEAST_BYTES = 1.0
"""Overflow of memory is settled to about so many bytes."""


@dataclass(frozen=True, slots=True)
class LabelFigures:
    """One label of one node, all members together.

    Attributes:
        seconds: per worker.
        lane: the kind along which it works; `WHOLE` for none.
        fixed: seconds of combining its results.
        num_bytes: per position, what it holds more than if it were whole; negative where it holds less.
        kinds: the kinds that it makes use of.
        divides: whether it divides arithmetic or parameters.
        kept: the same as `num_bytes`, for each micro-batch in flight; empty for nothing.
        working: per position, bytes that one member works on; empty for nothing.
    """

    seconds: tuple[float, ...]
    lane: int
    fixed: float
    num_bytes: tuple[float, ...]
    kinds: frozenset[int]
    divides: bool
    kept: tuple[float, ...] = ()
    working: tuple[float, ...] = ()

    def held(self, in_flight: int) -> tuple[float, ...]:
        """Per position, what it holds more with so many micro-batches in flight."""
        return tuple(own + in_flight * kept for own, kept in zip(self.num_bytes, self.kept, strict=True)) if self.kept else self.num_bytes


@dataclass(frozen=True, slots=True)
class Pair:
    """A bridge from one form to another.

    Attributes:
        forward, backward: seconds.
        copy: per position, bytes of the new form, for each micro-batch in flight.
        moves: whether it makes another tensor.
    """

    forward: float
    backward: float
    copy: tuple[float, ...]
    moves: bool


@dataclass(frozen=True, slots=True)
class UserFigures:
    """A node that reads a tensor; see `whale.planning.shard.classes.User`."""

    node: int
    uses: tuple[Use, ...]
    has_gradient: bool
    keeps: bool
    is_rigid: bool


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Some alike tensors.

    Attributes:
        node: that makes them.
        forms: per label of it, the kind along which they lie.
        users: that read them.
        pairs: per form and use that differ, the bridge.
        once: seconds of summing a parameter's gradient at the end of the step, instead of the bridges backward, where only work
            on parts uses a whole one.
    """

    node: int
    forms: tuple[int, ...]
    users: tuple[UserFigures, ...]
    pairs: Mapping[tuple[int, Use], Pair]
    once: float = 0.0


@dataclass(frozen=True)
class Selection:
    """A label for each node.

    Attributes:
        labels: per node, the index of its label.
        kinds: in use.
        seconds: of the stage for one micro-batch.
        excess: bytes by which it overflows the memory of the tightest device.
        gap: how far it may be from the optimum at most, as a share; 0 unless the search ran out of nodes.
    """

    labels: tuple[int, ...]
    kinds: frozenset[int]
    seconds: float
    excess: float
    gap: float = 0.0


@dataclass(frozen=True)
class Program:
    """The whole problem.

    Attributes:
        nodes: per node its labels; the first is to be whole.
        tensors: between them.
        num_kinds: how many kinds of axes there are.
        num_bytes: that a device holds if everything is whole, but for what ops work on.
        capacity: bytes, per position.
        insisted: nodes and kinds: the node works along the kind.
        in_flight: micro-batches whose activations are held.
        working_share: of what ops work on, how much falls to these nodes: others share it, of which one works at a time.
    """

    nodes: tuple[tuple[LabelFigures, ...], ...]
    tensors: tuple[TensorFigures, ...]
    num_kinds: int
    num_bytes: float
    capacity: tuple[int, ...]
    insisted: tuple[tuple[int, int], ...] = ()
    in_flight: int = 1
    working_share: float = 1.0

    def has_room_of(self, other: Program) -> bool:
        """Whether all labels that fit in another program, which differs in its memory alone, surely fit in this one.

        Of a micro-batch in flight labels keep at least what the least of each node do.
        """
        if other.working_share != self.working_share or other.in_flight < self.in_flight:
            return False
        nothing = (0.0,) * len(self.capacity)
        least = np.sum([np.min([label.kept or nothing for label in node], axis=0) for node in self.nodes], axis=0)
        less = other.num_bytes - self.num_bytes + (other.in_flight - self.in_flight) * least
        return bool((less >= np.subtract(other.capacity, self.capacity)).all())

    def evaluate(self, labels: Sequence[int]) -> Selection | None:
        """The value of some labels; None where they are not allowed."""
        chosen = [node[index] for node, index in zip(self.nodes, labels, strict=True)]
        if not any(each.divides for each in chosen) or any(chosen[node].lane != kind for node, kind in self.insisted):
            return None
        seconds = sum(each.fixed for each in chosen)
        for lane in {each.lane for each in chosen}:
            seconds += float(np.sum([each.seconds for each in chosen if each.lane == lane], axis=0).max())
        seconds += sum(bridge_seconds(tensor, *_met(tensor, labels)) for tensor in self.tensors)
        if seconds == inf:
            return None
        kinds = frozenset(kind for each in chosen for kind in each.kinds)
        return Selection(tuple(labels), kinds, seconds, max(0.0, float((self.held(labels) - np.array(self.capacity)).max())))

    def held(self, labels: Sequence[int]) -> Floats:
        """Per position, the bytes that a device holds at some labels."""
        chosen = [node[index] for node, index in zip(self.nodes, labels, strict=True)]
        found: Floats = self.num_bytes + np.sum([each.held(self.in_flight) for each in chosen], axis=0)
        works = [(0.0,) * len(self.capacity), *(each.working for each in chosen if each.working)]
        found = found + self.working_share * np.max(works, axis=0)
        for tensor in self.tensors:
            for copy in copies_of(tensor, *_met(tensor, labels)):
                found = found + self.in_flight * np.array(copy)
        return found


def bridge_seconds(tensor: TensorFigures, form: int, uses: Sequence[Use]) -> float:
    """Seconds of the bridges of one tensor; infinite where one must not be.

    Args:
        form: in which it lies.
        uses: of each of its users.
    """
    is_partial = bool(tensor.once) and form == WHOLE and (WHOLE, False) not in uses
    seconds = tensor.once if is_partial else 0.0
    for use in dict.fromkeys(uses):
        pair = tensor.pairs.get((form, use))
        if pair is None:
            continue
        users = [user for user, own in zip(tensor.users, uses, strict=True) if own == use]
        if pair.moves and any(user.is_rigid for user in users):
            return inf
        seconds += pair.forward
        if not is_partial and any(user.has_gradient for user in users):
            seconds += pair.backward
    return seconds


def _met(tensor: TensorFigures, labels: Sequence[int]) -> tuple[int, list[Use]]:
    """The form in which a tensor lies at some labels, and the use of each of its users."""
    return tensor.forms[labels[tensor.node]], [user.uses[labels[user.node] if user.node >= 0 else 0] for user in tensor.users]


def copies_of(tensor: TensorFigures, form: int, uses: Sequence[Use]) -> Iterator[tuple[float, ...]]:
    """Per position, the bytes of each copy of a tensor that some user keeps."""
    for use in dict.fromkeys(own for user, own in zip(tensor.users, uses, strict=True) if user.keeps):
        pair = tensor.pairs.get((form, use))
        if pair is not None:
            yield pair.copy
