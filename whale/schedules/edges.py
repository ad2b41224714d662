"""Which stages hand tensors to which, as a schedule's passes need to know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whale.errors import ScheduleError, raise_faults
from whale.ir.schedule import Kind, Schedule


@dataclass(frozen=True)
class Edges:
    """The edges between the stages of one schedule.

    Attributes:
        pairs: (source, target), sorted, without repetition.
        stage_rank: per stage, its rank.
    """

    pairs: tuple[tuple[int, int], ...]
    stage_rank: tuple[int, ...]

    @staticmethod
    def of(schedule: Schedule, pairs: Iterable[tuple[int, int]] | None) -> Edges:
        """Edges of a schedule; None stands for the chain in which every stage feeds the next.

        Raises:
            ScheduleError: an edge leads backwards, or from or to a stage that is not there.
        """
        if pairs is None:
            pairs = ((stage, stage + 1) for stage in range(schedule.num_stages - 1))
        known = tuple(sorted(set(pairs)))
        raise_faults(
            [
                ScheduleError(f"an edge leads from a stage to a later one of {schedule.num_stages} (edge: {source} to {target})")
                for source, target in known
                if not 0 <= source < target < schedule.num_stages
            ]
        )
        return Edges(known, schedule.stage_rank)

    def crossing(self) -> tuple[tuple[int, int], ...]:
        """Edges between stages on different ranks: those that need communication."""
        return tuple((source, target) for source, target in self.pairs if self.stage_rank[source] != self.stage_rank[target])

    def messages(self) -> Iterator[tuple[Kind, int, int]]:
        """What the edges between ranks carry: the kind of POST it is received by, the sending stage, the receiving stage."""
        for source, target in self.crossing():
            yield Kind.POST_FORWARD, source, target
            yield Kind.POST_BACKWARD, target, source

    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that it takes tensors from."""
        found: list[list[int]] = [[] for _ in self.stage_rank]
        for source, target in self.pairs:
            found[target].append(source)
        return tuple(map(tuple, found))

    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that it hands tensors to."""
        found: list[list[int]] = [[] for _ in self.stage_rank]
        for source, target in self.pairs:
            found[source].append(target)
        return tuple(map(tuple, found))
