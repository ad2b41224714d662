"""The group size of interleaving: the smallest that hides the gradient synchronisation and fits in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from whale.config import Config
from whale.estimate import exposed_sync
from whale.ir.plan import Choice
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.replicas.end_of_step import shortest_backward
from whale.planning.replicas.solve import PricedPlacement, Solver
from whale.units import format_seconds


@dataclass(frozen=True)
class ChosenPlacement:
    """The chosen placement."""

    solver: Solver  # that priced it
    best: PricedPlacement  # the placement
    others: dict[str, str]  # the other placements, each with its price or the reason against it
    group: Choice | None = None  # the choice of the group size, if any


def choose_group(pipeline: PipelineShape, config: Config, search: Callable[[int | None], ChosenPlacement]) -> ChosenPlacement:
    """Searches with the smallest group, then with the one that exposes least, and if it does not fit with smaller ones.

    Raises:
        MemoryShortage: not even the smallest fits.
    """
    first = search(pipeline.group_size)
    if pipeline.group_size is None or config.pipeline.group_size is not None:
        return first
    exposed = {size: _exposed(pipeline, first.best, size) for size in group_sizes(pipeline.num_ranks, pipeline.num_micro_batch)}
    least = min(exposed.values())
    wanted = min(size for size, seconds in exposed.items() if seconds <= least * (1 + 1e-9))
    remarks: list[str] = []
    for size in sorted((size for size in exposed if pipeline.group_size < size <= wanted), reverse=True):
        try:
            found = search(size)
        except MemoryShortage as error:
            remarks.append(f"{size}: {error.message}")
            continue
        if found.best.step_seconds < first.best.step_seconds:
            return dataclasses.replace(found, group=_explain(size, wanted, exposed, found.best, remarks))
        remarks.append(f"{size}: step {format_seconds(found.best.step_seconds)}")
    return dataclasses.replace(first, group=_explain(pipeline.group_size, wanted, exposed, first.best, remarks))


def group_sizes(num_ranks: int, num_micro_batch: int) -> list[int]:
    """The smallest group size that can run, and those that divide the micro-batches."""
    smallest = min(num_ranks, num_micro_batch)
    return [size for size in range(smallest, num_micro_batch + 1) if size == smallest or num_micro_batch % size == 0]


def _exposed(pipeline: PipelineShape, best: PricedPlacement, size: int) -> float:
    backward = shortest_backward(best.replicas, best.rows)
    return exposed_sync(pipeline.schedule, best.end.sync, backward, pipeline.num_micro_batch, pipeline.num_chunks, size)


def _explain(size: int, wanted: int, exposed: dict[int, float], best: PricedPlacement, remarks: list[str]) -> Choice:
    if size == wanted:
        bound = "gradient synchronisation" if size > min(exposed) else "the pipeline's depth"
    else:
        bound = "memory" if any("out of memory" in remark for remark in remarks) else "the step's time"
    others = remarks or [f"{other}: {format_seconds(exposed[other])} exposed" for other in exposed if other != size][:1]
    return Choice(
        "scheduling",
        "group size",
        f"{size} micro-batches per chunk in turn",
        cost=f"{format_seconds(best.end.exposed)} of {format_seconds(best.end.sync)} of gradient synchronisation exposed",
        bound=bound,
        runner_up="; ".join(others),
    )
