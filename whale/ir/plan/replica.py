"""One model replica: its share of the rows, its stages, and the pipeline in which they take turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.ir.plan.stage import Stage
from whale.units import counted


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages of a replica take turns; replicas need not agree.

    Attributes:
        schedule: name of the schedule kind.
        num_micro_batch: micro-batches of a step.
        stage_rank: per stage, its position among the virtual devices of the replica.
        num_chunks: stages per virtual device that an interleaved schedule runs in turn.
        group_size: of an interleaved schedule; None for others.
        recomputed_stages: those that are computed again as a whole, by R actions; empty where that is left to the schedule.
    """

    schedule: str
    num_micro_batch: int
    stage_rank: tuple[int, ...]
    num_chunks: int = 1
    group_size: int | None = None
    recomputed_stages: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @property
    def num_ranks(self) -> int:
        """Virtual devices of the replica."""
        return max(self.stage_rank) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a virtual device runs, in order."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)

    @property
    def order(self) -> str:
        """The schedule and its micro-batches in words: ``1f1b, 4 micro-batches``."""
        again, every = self.recomputed_stages, range(self.num_stages)
        of_some = f" of stage {', '.join(map(str, again))}" if again != tuple(every) else ""
        return f"{self.schedule}{f' with recomputation{of_some}' if again else ''}, {counted(self.num_micro_batch, 'micro-batch')}"


@dataclass(frozen=True, slots=True)
class Edge:
    """What one stage hands to a later one for each micro-batch.

    Attributes:
        source, target: stage indices.
        tensors: names of the ops whose outputs travel.
        num_bytes: of one micro-batch of the planned size, forward; the gradients of the float tensors return.
    """

    source: int
    target: int
    tensors: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One complete set of TaskGraphs.

    Attributes:
        index: position; replicas take consecutive rows of the batch in this order.
        share: its weight in the rows of the batch.
        pipeline: how its stages take turns.
        stages: what each of them runs, and where.
        edges: between its stages, sorted by (source, target).
    """

    index: int
    share: int
    pipeline: Pipeline
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]

    @property
    def least_rows(self) -> int:
        """Rows that a micro-batch needs so that every device that takes rows of its own has one."""
        return max(len(stage.shares) * (stage.split if stage.row_shard is not None else 1) for stage in self.stages)

    def is_local(self, edge: Edge) -> bool:
        """Whether both stages of an edge run on one virtual device, so that no SEND or RECV stands in the schedule."""
        return self.pipeline.stage_rank[edge.source] == self.pipeline.stage_rank[edge.target]


def devices_of(replicas: Iterable[Replica]) -> tuple[str, ...]:
    """The devices in use, replica by replica and virtual device by virtual device: the ranks of a plan."""
    stages = (replica.stages[replica.pipeline.stage_rank.index(rank)] for replica in replicas for rank in range(replica.pipeline.num_ranks))
    return tuple(device for stage in stages for device in stage.virtual_device.devices)
