"""What is decided of a plan before devices have names: how many replicas of which kinds of devices, and how they take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from whale.ir.cluster import Device
from whale.units import counted


@dataclass(frozen=True)
class Group:
    """The devices of a rank: one, or several that its stages are split over.

    Attributes:
        kind: of all of them.
        width: how many.
    """

    kind: Device
    width: int = 1

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.width))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Team:
    """Replicas that are alike.

    Attributes:
        ranks: the devices of each rank, in the order of the pipeline.
        count: how many replicas.
    """

    ranks: tuple[Group, ...]
    count: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.ranks, self.count))

    def __hash__(self) -> int:  # teams are keys of what was worked out about them, and long
        return self._hash

    @cached_property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_devices(self) -> int:
        """Of all its replicas."""
        return self.count * sum(rank.width for rank in self.ranks)

    @cached_property
    def narrowest(self) -> int:
        """Devices of the rank that has fewest."""
        return min(rank.width for rank in self.numbers)

    @cached_property
    def is_split(self) -> bool:
        return any(rank.width > 1 for rank in self.numbers)

    @cached_property
    def one(self) -> Team:
        """One of its replicas."""
        return self if self.count == 1 else Team(self.ranks, 1)

    @cached_property
    def runs(self) -> tuple[tuple[Group, int], ...]:
        """The groups along the pipeline, each with how many alike ones follow one another."""
        return tuple((rank, len(list(run))) for rank, run in groupby(self.ranks))

    @cached_property
    def taken(self) -> Mapping[Device, int]:
        """Devices of each kind that all its replicas take."""
        taken: Counter[Device] = Counter()
        for rank, number in self.numbers.items():
            taken[rank.kind] += number * rank.width * self.count
        return taken

    @cached_property
    def numbers(self) -> Mapping[Group, int]:
        """Ranks of each kind and width."""
        numbers: Counter[Group] = Counter()
        for rank, number in self.runs:
            numbers[rank] += number
        return numbers

    def __str__(self) -> str:
        widths = {rank.width for rank in self.numbers}
        if len(widths) == 1:
            stages = " -> ".join(f"{number} x {rank.kind.model}" if number > 1 else rank.kind.model for rank, number in self.runs)
            split = f", each split over {max(widths)}" if self.is_split else ""
            return f"{self.count} x ({stages}{split})"
        return f"{self.count} x ({' -> '.join(_one_of_many(rank, number) for rank, number in self.runs)})"


def _one_of_many(rank: Group, number: int) -> str:
    """Of ranks with unlike widths."""
    devices = f"{number} x {rank.kind.model}" if number > 1 else rank.kind.model
    return f"{devices} split over {rank.width}" if rank.width > 1 else devices


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
        return all(team.one.num_devices == 1 for team in self.teams)

    @property
    def num_tasks(self) -> int:
        """Stages times micro-batches, of one replica of each team."""
        return sum(team.num_ranks * self.order.num_chunks for team in self.teams) * self.num_micro_batch

    @property
    def is_split(self) -> bool:
        return any(team.is_split for team in self.teams)

    def __str__(self) -> str:
        order = f", {self.order}" if any(team.num_ranks > 1 for team in self.teams) else ""
        return f"{' + '.join(map(str, self.teams))}{order}, {counted(self.num_micro_batch, 'micro-batch')}"


def sums_in_backward(teams: Sequence[Team]) -> bool:
    """Whether replicas may sum gradients while they compute: unlike pipelines have them at unlike places, and sum when all is done."""
    return len({team.num_ranks for team in teams}) == 1
