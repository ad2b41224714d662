"""The choice of labels of a stage as an abstract problem: seconds and bytes of a choice.

seconds of a choice     per kind, the work along it on its slowest device, + sums + bridges
bytes of a choice       per position, bytes of its labels relative to everything whole, + copies by bridges, + the largest
                        working set of an op
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
    """One label of one node, all members together."""

    seconds: tuple[float, ...]  # per worker
    along: int = WHOLE  # the kind along which it works; `WHOLE` for none
    fixed: float = 0.0  # seconds of combining its results, or of the optimizer
    kinds: frozenset[int] = frozenset()  # the kinds that it uses
    divides: bool = False  # whether it divides arithmetic or parameters


@dataclass(frozen=True, slots=True)
class BridgeCost:
    """A bridge from one form to another: seconds of both directions, and whether it makes another tensor."""

    forward: float
    backward: float
    moves: bool


@dataclass(frozen=True, slots=True)
class TensorCost:
    """Some identical tensors."""

    node: int  # that makes them
    forms: tuple[int, ...]  # per label of it, the kind along which they lie
    users: tuple[User, ...]  # that read them
    bridges: Mapping[tuple[int, Use], BridgeCost]  # per form and use that differ
    once: float = 0.0  # seconds of a parameter's gradient sum per step, instead of backward bridges, if only work on parts uses it

    def met(self, labels: Sequence[int]) -> tuple[int, list[Use]]:
        """Its form under some labels, and the use of each of its users."""
        return self.forms[labels[self.node]], [user.uses[labels[user.node] if user.node >= 0 else 0] for user in self.users]

    def seconds(self, labels: Sequence[int]) -> float:
        """Of its bridges under some labels; infinite where one is not allowed."""
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
    """Bytes of the bridges of some identical tensors."""

    tensor: TensorCost
    keeps: tuple[bool, ...]  # per user, whether it keeps its form
    num_bytes: Mapping[tuple[int, Use], Floats]  # per form and use, of a copy at each position

    def at(self, labels: Sequence[int]) -> Iterator[Floats]:
        """Each copy that some user keeps under some labels."""
        form, uses = self.tensor.met(labels)
        for use in dict.fromkeys(use for use, keeps in zip(uses, self.keeps, strict=True) if keeps):
            if (form, use) in self.num_bytes:
                yield self.num_bytes[form, use]


@dataclass(frozen=True, eq=False)
class LabelMemory:
    """The memory of labels in bytes; the last dimension is the position."""

    free: Floats  # beyond what a device holds if everything is whole
    held: tuple[Floats, ...]  # per node, each label's difference from that
    working: tuple[Floats, ...]  # per node, the working set of one member under each label
    copies: tuple[BridgeCopies, ...]  # per tensor

    def lacking(self, labels: Sequence[int]) -> Floats:
        """Per position, the bytes that some labels need beyond the free ones; negative: left over."""
        found: Floats = np.max([node[index] for node, index in zip(self.working, labels, strict=True)], axis=0) - self.free
        found = found + np.sum([node[index] for node, index in zip(self.held, labels, strict=True)], axis=0)
        for copies in self.copies:
            for num_bytes in copies.at(labels):
                found = found + num_bytes
        return found

    @property
    def may_suffice(self) -> bool:
        """Whether it suffices for the smallest label of each node, without copies."""
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
    """The whole problem."""

    nodes: tuple[tuple[LabelCost, ...], ...]  # per node its labels; the first is whole
    tensors: tuple[TensorCost, ...]  # between them
    num_kinds: int  # of axes
    insisted: tuple[tuple[int, int], ...] = ()  # (node, kind): the node must work along the kind
    memory: LabelMemory | None = None  # None for unlimited

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
        return ChosenLabels(tuple(labels), seconds, excess)


@dataclass(frozen=True)
class ChosenLabels:
    """A label for each node."""

    labels: tuple[int, ...]  # per node, the index of its label
    seconds: float  # of the stage for one micro-batch
    excess: float  # bytes by which it overflows the tightest device
    gap: float = 0.0  # bound of the distance from the optimum, as a share; 0 unless the search ran out of nodes
