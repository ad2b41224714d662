"""The communicators that a plan needs: sets of ranks that sum together, and ordered pairs of ranks that send messages.

Equal sets share one, and so do all messages from one rank to another, in every mode: their launches are in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.sharding.crossings import DIRECTIONS, Crossings
from whale.sharding.parameters import ParameterShardings

MANY_FOR_A_RANK = 64
"""Above this, NCCL takes much memory of one device: some 10 MB of buffers for each communicator."""

MANY = 4096
"""Above this, setup takes long: every rank takes part in making each communicator."""


@dataclass(frozen=True)
class Communicators:
    """The communicators of a plan, by ranks of the plan."""

    groups: tuple[tuple[int, ...], ...]  # sorted sets of ranks that sum or share something, each once; all ranks are one of them
    channels: tuple[tuple[int, int], ...]  # (sender, receiver), sorted, each once

    def __len__(self) -> int:
        return len(self.groups) + len(self.channels)

    @cached_property
    def most_of_a_rank(self) -> int:
        """The most communicators that any one rank takes part in."""
        return max(Counter(rank for ranks in (*self.groups, *self.channels) for rank in ranks).values(), default=0)

    @property
    def warning(self) -> str | None:
        if self.most_of_a_rank <= MANY_FOR_A_RANK and len(self) <= MANY:
            return None
        return (
            f"{len(self)} communicators, {self.most_of_a_rank} of them on one device, take NCCL much time to create and much "
            f"memory (many: above {MANY} in all or {MANY_FOR_A_RANK} on a device); fewer stages, or more even shares of rows, need fewer"
        )

    def __str__(self) -> str:
        kinds = f"{len(self.groups)} collective, {len(self.channels)} point-to-point"
        return f"communicators: {kinds}; at most {self.most_of_a_rank} on one device"


def communicators_of(plan: Plan, model: ModelGraph, shardings: ParameterShardings) -> Communicators:
    """What a plan needs for training with its own batch; other modes and batches use the same."""
    channels = {(source, target) for source, target in channels_of(plan, model) if source != target}
    return Communicators(groups_of(plan, model, shardings), tuple(sorted(channels)))


def groups_of(plan: Plan, model: ModelGraph, shardings: ParameterShardings) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks that sum together: all ranks, the owners of a gradient, the devices of a split group."""
    everyone = tuple(range(len(plan.devices)))
    groups = {everyone, *_owner_sets(model, shardings), *_split_groups(plan)}
    return tuple(sorted(group for group in groups if len(group) > 1))


def _owner_sets(model: ModelGraph, shardings: ParameterShardings) -> Iterator[tuple[int, ...]]:
    for sharding in {shardings.gradient(name) for name in set(model.trained).intersection(shardings.parameters)}:
        yield from (piece.owners for piece in sharding.pieces if not piece.is_complete)
    for name in shardings.keeping:
        yield from (piece.owners for piece in shardings.gradient(name).pieces)


def _split_groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    for replica in plan.replicas:
        for stage in replica.stages:
            for group in stage.groups:
                yield tuple(sorted(plan.rank_of[device] for device in group))


def channels_of(plan: Plan, model: ModelGraph) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of each region that crosses stages for the plan's own batch, with repetitions and with sends to oneself."""
    batch_axes = dict(plan.batch_axes)
    for replica in plan.replicas:
        crossings = Crossings(replica, model, plan.rank_of, batch_axes)
        sizes = {stop - start for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows)}
        for edge in replica.edges:
            for num_rows in sizes:
                for direction in DIRECTIONS:
                    yield from ((move.source, move.target) for _, move in crossings.moves(edge, num_rows, direction))
