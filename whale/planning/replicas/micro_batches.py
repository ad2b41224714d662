"""How many micro-batches a block has that states their rows: as many as make up the rows that its replica takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from whale.config import Config, ReplicaBlock
from whale.errors import ConfigError, WhaleError, raise_faults
from whale.ir.graph import ModelGraph
from whale.planning.replicas.shape import Shape, shape_of


def with_micro_batches(
    graph: ModelGraph, config: Config, asked: Sequence[ReplicaBlock], shapes: Sequence[Shape], num_rows: int
) -> tuple[Shape, ...]:
    """The shapes with the micro-batches of their weights in the rows; where blocks have none, of equal rows, to be counted again.

    Args:
        asked: the block of each replica.
        num_rows: of the global batch.

    Raises:
        ConfigError: rows by weight that are not whole micro-batches.
    """
    total = sum(block.rows or 1 for block in asked)
    faults: dict[ReplicaBlock, WhaleError] = {}
    counts = []
    for block in asked:
        unit = block.micro_batch_rows or 1
        own, rest = divmod(num_rows * (block.rows or 1), total)
        if block.rows is not None and block.micro_batch_rows is not None and (rest or own % unit):
            faults[block] = _not_whole(block, f"{num_rows * block.rows / total:g}", num_rows)
        counts.append(max(1, own // unit))
    raise_faults(list(faults.values()))
    return _counted(graph, config, asked, shapes, counts)


def count_by_rows(
    graph: ModelGraph, config: Config, asked: Sequence[ReplicaBlock], shapes: Sequence[Shape], rows: Sequence[int]
) -> tuple[tuple[Shape, ...], tuple[int, ...]]:
    """The shapes with the micro-batches of balanced rows, and those rows in whole micro-batches.

    Args:
        asked: the block of each replica.
        rows: of a step, per replica, as they are balanced.

    Raises:
        ConfigError: no whole micro-batches make the batch.
    """
    units = [block.micro_batch_rows or 1 for block in asked]
    counts = whole_units(rows, units)
    if counts is None:
        stated = next(block for block in asked if block.micro_batch_rows is not None)
        raise _not_whole(stated, f"about {rows[asked.index(stated)]}", sum(rows))
    found = tuple(count * unit for count, unit in zip(counts, units, strict=True))
    return _counted(graph, config, asked, shapes, counts), found


def whole_units(rows: Sequence[int], units: Sequence[int]) -> list[int] | None:
    """Per part, how many units come near its rows, at least one; together all rows. None where none are found.

    Args:
        rows: of each part.
        units: rows of a unit of each part.
    """
    counts = [max(1, own // unit) for own, unit in zip(rows, units, strict=True)]
    rest = sum(rows) - sum(count * unit for count, unit in zip(counts, units, strict=True))
    order = sorted(range(len(rows)), key=lambda index: counts[index] - rows[index] / units[index])
    while rest < 0:
        shrinking = [index for index in order if counts[index] > 1]
        if not shrinking:
            return None
        counts[shrinking[-1]] -= 1
        rest += units[shrinking[-1]]
    more = _sum_of(rest, sorted(set(units), reverse=True))
    if more is None:
        return None
    for unit in set(more):
        members = [index for index in order if units[index] == unit]
        for number in range(more.count(unit)):
            counts[members[number % len(members)]] += 1
    return counts


def _sum_of(total: int, units: Sequence[int]) -> list[int] | None:
    """Units that add up to a total; None where none do."""
    last = {0: 0}
    for amount in range(1, total + 1):
        unit = next((unit for unit in units if amount - unit in last), None)
        if unit is not None:
            last[amount] = unit
    found = []
    while total in last and total:
        found.append(last[total])
        total -= last[total]
    return None if total else found


def _not_whole(block: ReplicaBlock, share: str, num_rows: int) -> ConfigError:
    return ConfigError(
        f"micro_batch_rows divides the rows of its replica ({block.micro_batch_rows} rows of {share}, {num_rows} in all)",
        where=block.at("micro_batch_rows"),
    )


def _counted(
    graph: ModelGraph, config: Config, asked: Sequence[ReplicaBlock], shapes: Sequence[Shape], counts: Sequence[int]
) -> tuple[Shape, ...]:
    """The shapes, with so many micro-batches where a block states their rows; equal blocks share one."""
    made: dict[tuple[ReplicaBlock, int], Shape] = {}
    for block, shape, count in zip(asked, shapes, counts, strict=True):
        if block.micro_batch_rows is not None and (block, count) not in made:
            again = dataclasses.replace(block, pipeline=(*block.pipeline, ("num_micro_batch", count)), micro_batch_rows=None)
            made[block, count] = shape_of(graph, config, again, shape.pipeline.num_devices, 0, "a replica")
    return tuple(made.get((block, count), shape) for block, shape, count in zip(asked, shapes, counts, strict=True))
