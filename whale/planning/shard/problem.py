"""Which label each class of ops of a stage gets, as abstract figures: what a choice of labels costs, and what it holds.

seconds of a choice     per kind, of the work along it on its slowest device, + sums + bridges
bytes of a choice       per position, what its labels hold more or less than if everything were whole, + copies by bridges, + what
                        the op works on that works on most
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from whale.estimate.costs.line import Floats
from whale.planning.shard.classes import WHOLE, Use, User


@dataclass(frozen=True, slots=True)
class LabelCost:
    """One label of one node, all members together.

    Attributes:
        seconds: per worker.
        along: the kind along which it works; `WHOLE` for none.
        fixed: seconds of combining its results, or of the optimizer.
        kinds: the kinds that it makes use of.
        divides: whether it divides arithmetic or parameters.
    """

    seconds: tuple[float, ...]
    along: int = WHOLE
    fixed: float = 0.0
    kinds: frozenset[int] = frozenset()
    divides: bool = False


@dataclass(frozen=True, slots=True)
class BridgeCost:
    """A bridge from one form to another.

    Attributes:
        forward, backward: seconds.
        moves: whether it makes another tensor.
    """

    forward: float
    backward: float
    moves: bool


@dataclass(frozen=True, slots=True)
class TensorCost:
    """Some identical tensors.

    Attributes:
        node: that makes them.
        forms: per label of it, the kind along which they lie.
        users: that read them.
        bridges: per form and use that differ, what stands between.
        once: seconds of summing a parameter's gradient at the end of the step, instead of the bridges backward, where only work
            on parts uses a whole one.
    """

    node: int
    forms: tuple[int, ...]
    users: tuple[User, ...]
    bridges: Mapping[tuple[int, Use], BridgeCost]
    once: float = 0.0

    def met(self, labels: Sequence[int]) -> tuple[int, list[Use]]:
        """The form in which it lies at some labels, and the use of each of its users."""
        return self.forms[labels[self.node]], [user.uses[labels[user.node] if user.node >= 0 else 0] for user in self.users]

    def seconds(self, labels: Sequence[int]) -> float:
        """Of its bridges at some labels; infinite where one must not be."""
        form, uses = self.met(labels)
        is_partial = bool(self.once) and form == WHOLE and (WHOLE, False) not in uses
        seconds = self.once if is_partial else 0.0
        for use in dict.fromkeys(uses):
            bridge = self.bridges.get((form, use))
            if bridge is not None:
                users = [user for user, own in zip(self.users, uses, strict=True) if own == use]
                if bridge.moves and any(user.is_rigid for user in users):
                    return inf
                seconds += bridge.forward + bridge.backward * (not is_partial and any(user.has_gradient for user in users))
        return seconds


@dataclass(frozen=True)
class BridgeCopies:
    """What bridges of some identical tensors hold.

    Attributes:
        tensor: what they are.
        keeps: per user, whether it keeps the form that it needs.
        num_bytes: per form and use, of a copy at each position.
    """

    tensor: TensorCost
    keeps: tuple[bool, ...]
    num_bytes: Mapping[tuple[int, Use], Floats]

    def at(self, labels: Sequence[int]) -> Iterator[Floats]:
        """Of each copy that some user keeps at some labels."""
        form, uses = self.tensor.met(labels)
        for use in dict.fromkeys(use for use, keeps in zip(uses, self.keeps, strict=True) if keeps):
            if (form, use) in self.num_bytes:
                yield self.num_bytes[form, use]


@dataclass(frozen=True, eq=False)
class LabelMemory:
    """The memory that labels need, and what there is; bytes, the last dimension is that of positions.

    Attributes:
        free: what there is beside what a device holds if everything is whole.
        held: per node, what each label holds more than that; negative where it holds less.
        working: per node, what one member works on at each label.
        copies: per tensor.
    """

    free: Floats
    held: tuple[Floats, ...]
    working: tuple[Floats, ...]
    copies: tuple[BridgeCopies, ...]

    def lacking(self, labels: Sequence[int]) -> Floats:
        """Per position, the bytes that some labels need beyond those that are free; below 0 what they leave."""
        found: Floats = np.max([node[index] for node, index in zip(self.working, labels, strict=True)], axis=0) - self.free
        found = found + np.sum([node[index] for node, index in zip(self.held, labels, strict=True)], axis=0)
        for copies in self.copies:
            for num_bytes in copies.at(labels):
                found = found + num_bytes
        return found

    @property
    def may_suffice(self) -> bool:
        """Whether it suffices for the labels of each node that need least, copies apart."""
        least = np.sum([own.min(axis=0) for own in self.held], axis=0) + np.max([own.min(axis=0) for own in self.working], axis=0)
        return bool((least <= self.free).all())

    def fits_where(self, other: LabelMemory) -> bool:
        """Whether all labels that fit in another memory surely fit in this one."""
        pairs = [(own, theirs) for own, theirs in zip(self.held, other.held, strict=True)]
        more = np.sum([(own - theirs).max(axis=0) for own, theirs in pairs], axis=0)
        more += np.max([(own - theirs).max(axis=0) for own, theirs in zip(self.working, other.working, strict=True)], axis=0)
        for own, theirs in zip(self.copies, other.copies, strict=True):
            if own.keeps != theirs.keeps:
                return False
            more += sum(np.maximum(num_bytes - theirs.num_bytes[place], 0.0) for place, num_bytes in own.num_bytes.items())
        return bool((more - self.free + other.free <= 0).all())


@dataclass(frozen=True)
class LabelProblem:
    """The whole problem.

    Attributes:
        nodes: per node its labels; the first is to be whole.
        tensors: between them.
        num_kinds: how many kinds of axes there are.
        insisted: nodes and kinds: the node works along the kind.
        memory: None where it is boundless.
    """

    nodes: tuple[tuple[LabelCost, ...], ...]
    tensors: tuple[TensorCost, ...]
    num_kinds: int
    insisted: tuple[tuple[int, int], ...] = ()
    memory: LabelMemory | None = None

    def evaluate(self, labels: Sequence[int]) -> ChosenLabels | None:
        """The value of some labels; None where they are not allowed."""
        chosen = [node[index] for node, index in zip(self.nodes, labels, strict=True)]
        if not any(each.divides for each in chosen) or any(chosen[node].along != kind for node, kind in self.insisted):
            return None
        seconds = sum(each.fixed for each in chosen) + sum(tensor.seconds(labels) for tensor in self.tensors)
        for along in {each.along for each in chosen}:
            seconds += float(np.sum([each.seconds for each in chosen if each.along == along], axis=0).max())
        if seconds == inf:
            return None
        excess = 0.0 if self.memory is None else max(0.0, float(self.memory.lacking(labels).max()))
        return ChosenLabels(tuple(labels), frozenset(kind for each in chosen for kind in each.kinds), seconds, excess)


@dataclass(frozen=True)
class ChosenLabels:
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
