"""What is decided of a plan before devices have names: how many replicas of which kinds of devices, and how they take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from whale.ir.cluster import Device


@dataclass(frozen=True)
class Team:
    """Replicas that are alike.

    Attributes:
        kinds: of the devices of each rank, in the order of the pipeline.
        width: devices of each rank: a split group, where there are several.
        count: how many replicas.
    """

    kinds: tuple[Device, ...]
    width: int
    count: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.kinds, self.width, self.count))

    def __hash__(self) -> int:  # teams are keys of what was worked out about them, and long
        return self._hash

    @cached_property
    def num_ranks(self) -> int:
        return len(self.kinds)

    @cached_property
    def num_devices(self) -> int:
        """Of all its replicas."""
        return self.count * self.num_ranks * self.width

    @cached_property
    def one(self) -> Team:
        """One of its replicas."""
        return self if self.count == 1 else Team(self.kinds, self.width, 1)

    @cached_property
    def runs(self) -> tuple[tuple[Device, int], ...]:
        """The kinds along the pipeline, each with how many ranks of it follow one another."""
        return tuple((kind, len(list(run))) for kind, run in groupby(self.kinds))

    @cached_property
    def taken(self) -> Mapping[Device, int]:
        """Devices of each kind that all its replicas take."""
        return {kind: number * self.width * self.count for kind, number in self.numbers.items()}

    @cached_property
    def numbers(self) -> Mapping[Device, int]:
        """Ranks of each kind."""
        numbers: Counter[Device] = Counter()
        for kind, number in self.runs:
            numbers[kind] += number
        return numbers

    def __str__(self) -> str:
        stages = " -> ".join(f"{number} x {kind.model}" if number > 1 else kind.model for kind, number in self.runs)
        split = f", each split over {self.width}" if self.width > 1 else ""
        return f"{self.count} x ({stages}{split})"


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the stages of a replica compute.

    Attributes:
        schedule: name of the schedule kind.
        num_chunks: stages per rank.
    """

    schedule: str
    num_chunks: int = 1

    @property
    def fills(self) -> bool:
        """Whether each rank stands still while those before it do a forward and a backward pass."""
        return self.num_chunks == 1 and self.schedule in ("1f1b", "eager_1f1b", "gpipe")

    @property
    def fills_forward(self) -> bool:
        """Whether each rank stands still while those before it do a forward pass, and weight gradients come last on each."""
        return self.num_chunks == 1 and self.schedule in ("zb_h1", "zb_h2")

    def __str__(self) -> str:
        return f"{self.schedule} of {self.num_chunks} chunks" if self.num_chunks > 1 else self.schedule


@dataclass(frozen=True)
class Arrangement:
    """A plan up to the names of its devices, its cuts and its rows.

    Attributes:
        teams: the replicas, alike ones together.
        order: of all of them; a replica of one rank has nothing to order.
        num_micro_batch: of each replica in a step.
    """

    teams: tuple[Team, ...]
    order: Order
    num_micro_batch: int

    @property
    def num_replicas(self) -> int:
        return sum(team.count for team in self.teams)

    @property
    def num_devices(self) -> int:
        return sum(team.num_devices for team in self.teams)

    @property
    def is_plain(self) -> bool:
        """Whether it is copies of the undivided model."""
        return all(team.num_ranks * team.width == 1 for team in self.teams)

    @property
    def num_tasks(self) -> int:
        """Stages times micro-batches, of one replica of each team."""
        return sum(team.num_ranks * self.order.num_chunks for team in self.teams) * self.num_micro_batch

    @property
    def is_split(self) -> bool:
        return any(team.width > 1 for team in self.teams)

    def __str__(self) -> str:
        order = f", {self.order}" if any(team.num_ranks > 1 for team in self.teams) else ""
        return f"{' + '.join(map(str, self.teams))}{order}, {self.num_micro_batch} micro-batch(es)"


def sums_in_backward(teams: Sequence[Team]) -> bool:
    """Whether replicas may sum gradients while they compute: unlike pipelines have them at unlike places, and sum when all is done."""
    return len({team.num_ranks for team in teams}) == 1
