"""What a block of a written plan says of the model itself: the stages in repeated blocks, and the axes that are cut."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from whale.config import ReplicaBlock, did_you_mean
from whale.errors import ConfigError, WhaleError, raise_faults
from whale.estimate.prices.prices import Prices
from whale.ir.blocks import RepeatedBlocks, find_repeated_blocks
from whale.ir.division import divide_evenly
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import Annotations
from whale.planning.shard.space import matches
from whale.planning.structure.stages import Assignment, Wish, assign
from whale.planning.structure.structure import Structure, analyse, floating_ops


def assign_by_blocks(
    graph: ModelGraph, asked: ReplicaBlock, num_stages: int, annotations: Annotations | None
) -> tuple[Assignment, Structure]:
    """Assigns ops to stages of so many blocks each; what is before the blocks runs on the first stage, what is behind them on the last.

    Raises:
        ConfigError: the model has no blocks, or other numbers of blocks or stages.
    """
    run = find_repeated_blocks(graph)
    raise_faults(list(_faults(run, asked, num_stages, annotations)))
    assert run is not None and asked.blocks is not None
    counts = divide_evenly(run.count, num_stages) if isinstance(asked.blocks, str) else asked.blocks
    ends = run.start + run.length * np.cumsum(counts)
    ends[-1] = len(run.calls)
    stages = np.searchsorted(ends, np.arange(len(run.calls)), side="right")
    structure = analyse(graph)
    floating = floating_ops(graph, structure)
    wishes = {
        op.name: Wish((int(stage),), firm=True)
        for op, stage in zip(run.calls, stages, strict=True)
        if op.name in structure.atom_of and op.name not in floating
    }
    assignment, late = assign(graph, structure, wishes, num_stages)
    raise_faults(
        [
            ConfigError(
                f"{each.op} of stage {each.stage} needs {each.needs} of the later stage {each.needed_stage}",
                where=asked.at("blocks"),
            )
            for each in late
        ]
    )
    return assignment, structure


def _faults(run: RepeatedBlocks | None, asked: ReplicaBlock, num_stages: int, annotations: Annotations | None) -> Iterator[WhaleError]:
    if annotations is not None:
        yield ConfigError(
            f"stages are given twice: by blocks ({_shown(asked)}) and by scopes (the first at {annotations.scopes[0].where})",
            where=asked.at("blocks"),
            hint="remove the key or the scopes",
        )
    elif run is None:
        yield ConfigError("stages are given in blocks, but no blocks repeat in the model", where=asked.at("blocks"))
    elif isinstance(asked.blocks, tuple) and (len(asked.blocks), sum(asked.blocks)) != (num_stages, run.count):
        yield ConfigError(
            f"blocks of the stages do not match the model (stages: {num_stages}, in blocks: {len(asked.blocks)}; "
            f"blocks of the model: {run.count}, of the stages: {sum(asked.blocks)})",
            where=asked.at("blocks"),
        )


def _shown(asked: ReplicaBlock) -> str:
    return asked.blocks if isinstance(asked.blocks, str) else str(list(asked.blocks or ()))


def check_written_axes(asked: ReplicaBlock, prices: Prices) -> None:
    """Checks that the model has the axes that a written plan cuts.

    Raises:
        ConfigError: it has not; all of them at once.
    """
    wanted = (*(asked.axes or ()), *asked.more_axes)
    if not wanted:
        return
    axes = prices.axes
    names = [axis.name for axis in axes.axes]
    places = {holder for axis in names for holder in axes.held_by[axis]}
    last = {name.rpartition(".")[2]: None for name in names}
    raise_faults(
        [
            ConfigError(
                f"the plan cuts axis {name!r}, which the model does not have",
                where=asked.at("axes" if name in (asked.axes or ()) else "more_axes"),
                hint=did_you_mean(name, last),
            )
            for name in wanted
            if not matches(name, names) and name not in places
        ]
    )
