"""Steps: what turns one sharding into another, each a collective or a message, with its adjoint and what it puts on every link.

    kind             its adjoint      received by a device that has n_i of N elements before, m_i after, t devices
    slice            pad              0
    all-gather       reduce-scatter   N - n_i               what it does not have
    all-to-all       all-to-all       m_i - what it has of it already
    send             send             m_i - what it has of it already
    reduce-scatter   all-gather       m_i (t - 1)           its part, from each of the others
    all-reduce       all-reduce       2 N (t - 1) / t       a reduce-scatter and an all-gather, in even pieces

A step is a linear map: each element of a target is the sum of those that are copied to it. Its adjoint copies back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from whale.sharding.index_space import IndexSpace
from whale.sharding.moves import Move
from whale.sharding.regions import Region

Kind = Literal["slice", "pad", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]

ADJOINT: Mapping[Kind, Kind] = {
    "slice": "pad",
    "pad": "slice",
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "send": "send",
}


@dataclass(frozen=True)
class Step:
    """One collective or message.

    Attributes:
        kind: which.
        before: per device that gives, what it holds; of an all-reduce, the elements that are summed in their place.
        after: per device that gets, what it holds then.
        moves: what is copied from whom to whom; from a device to itself costs nothing.
    """

    kind: Kind
    before: tuple[tuple[int, Region], ...]
    after: tuple[tuple[int, Region], ...]
    moves: tuple[Move, ...]

    @cached_property
    def participants(self) -> tuple[int, ...]:
        """The devices that take part, ascending."""
        return tuple(sorted({device for device, _ in (*self.before, *self.after)}))

    @property
    def adjoint(self) -> Step:
        """What gradients do on the way back: the transpose of the map."""
        return Step(ADJOINT[self.kind], self.after, self.before, tuple(move.adjoint for move in self.moves))

    def elements(self, space: IndexSpace) -> Mapping[tuple[int, int], float]:
        """Elements on each link that it uses, by sender and receiver; of an all-reduce, as many on all links.

        Args:
            space: of the tensor.
        """
        if self.kind == "all-reduce":
            each = 2 * space.num_elements(self.before[0][1]) / len(self.participants)
            return {(a, b): each for a in self.participants for b in self.participants if a != b}
        found: dict[tuple[int, int], float] = {}
        for move in self.moves:
            if move.source != move.target:
                link = move.source, move.target
                found[link] = found.get(link, 0) + space.num_elements(move.region)
        return found

    def __str__(self) -> str:
        return f"{self.kind} over {{{' '.join(map(str, self.participants))}}}: {', '.join(map(str, self.moves))}"
