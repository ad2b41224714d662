"""Forward only: evaluation and prediction, micro-batch after micro-batch through all stages."""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.schedule import Action, Kind, Schedule

# rank 0  F0 F1 F2
# rank 1  .  F0 F1 F2


def forward_only(num_ranks: int, num_micro_batch: int, stage_rank: Sequence[int]) -> Schedule:
    """Forwards alone, without SYNC or STEP.

    Args:
        num_ranks: pipeline ranks.
        num_micro_batch: micro-batches.
        stage_rank: per stage, its rank; any placement will do.
    """
    order = [(micro_batch, stage, rank) for micro_batch in range(num_micro_batch) for stage, rank in enumerate(stage_rank)]
    ranks = tuple(tuple(Action(Kind.FORWARD, stage, i) for i, stage, owner in order if owner == rank) for rank in range(num_ranks))
    return Schedule("forward_only", num_micro_batch, tuple(stage_rank), ranks)
