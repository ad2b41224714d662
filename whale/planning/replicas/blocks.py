"""The blocks of ``replicas:``: settings, scopes, pipeline, micro-batches, devices and stages of each replica, and cut axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from whale.config import Config, ReplicaBlock, did_you_mean
from whale.errors import ConfigError, WhaleError, raise_faults
from whale.estimate.prices.prices import Prices
from whale.ir.blocks import RepeatedBlocks, find_repeated_blocks
from whale.ir.cluster import Cluster
from whale.ir.division import divide_evenly
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import Annotations, read_scopes
from whale.planning.pipeline.placement import Placement, device_groups, placements
from whale.planning.pipeline.scheduling import PipelineShape, Split, shape_pipeline
from whale.planning.shard.space import matches
from whale.planning.structure.stages import Assignment, Wish, assign
from whale.planning.structure.structure import analyse, floating_ops


@dataclass(frozen=True)
class Shape:
    """A replica independent of its devices: settings with the block's own, scopes (None without), and pipeline."""

    config: Config
    annotations: Annotations | None
    pipeline: PipelineShape


def shape_of(graph: ModelGraph, config: Config, asked: ReplicaBlock, stated: int | None, num_free: int, name: str) -> Shape:
    """The shape of a block.

    Args:
        stated: devices that it states; None where it takes those of its stages.
        num_free: devices that it may take then.
        name: of the block in messages.

    Raises:
        ConfigError: the block does not fit the scopes, its devices or itself.
        AnnotationError: scopes that cannot be honoured on its devices.
    """
    own = config.with_values({f"pipeline.{key}": value for key, value in asked.pipeline})
    if asked.recompute is not None:
        own = own.with_values({"recompute.policy": asked.recompute})
    annotations = read_scopes(graph, own, stated or num_free)
    num_stages = own.pipeline.num_stages or 1
    if annotations is None and stated is None and num_stages > num_free:
        raise ConfigError(
            f"{name} has too few devices: num_stages is {num_stages}, devices left: {num_free}",
            where=asked.at("num_stages"),
            hint=f"devices: {num_free} lets consecutive stages share them" if num_free else None,
        )
    width = asked.split if annotations is None and asked.split is not None else 1
    pipeline = shape_pipeline(own, annotations, max((stated or num_free) // width, 1))
    if annotations is None and asked.split is not None:
        devices = (asked.split,) * pipeline.num_ranks
        pipeline = dataclasses.replace(pipeline, devices=devices, splits=(Split(asked.split),) * pipeline.num_stages)
    elif annotations is not None:
        _check_repeats(asked, annotations, name)
    if asked.axes is not None:
        if not pipeline.splits:
            raise ConfigError(f"axes of {name} are given, but no stage is split", where=asked.at("axes"), hint="split: 2, for instance")
        splits = (dataclasses.replace(split, axes=asked.axes, more_axes=asked.more_axes) for split in pipeline.splits)
        pipeline = dataclasses.replace(pipeline, splits=tuple(splits))
    _check_devices(asked, pipeline, stated, name)
    return Shape(own, annotations, pipeline)


def _check_repeats(asked: ReplicaBlock, annotations: Annotations, name: str) -> None:
    """Scopes say what is split; a block may only repeat it."""
    widths = sorted(set(annotations.widths))
    if asked.split is not None and asked.split not in widths:
        raise ConfigError(
            f"split: {asked.split} of {name} contradicts the scopes, which split into {', '.join(map(str, widths))}",
            where=annotations.scopes[0].where,
            hint="remove the key or the scopes",
        )


def _check_devices(asked: ReplicaBlock, pipeline: PipelineShape, stated: int | None, name: str) -> None:
    wanted = pipeline.num_devices
    if stated is not None and stated != wanted:
        each = " + ".join(map(str, pipeline.devices)) if pipeline.num_ranks > 1 else str(wanted)
        raise ConfigError(
            f"devices: {stated} of {name} contradicts its stages, which need {each}",
            where=asked.at("devices"),
            hint="num_stages and split of the block say how many its stages take",
        )
    widths = tuple(map(len, asked.placed or ()))
    if widths and widths != pipeline.devices:
        raise ConfigError(
            f"devices of {name} ({' + '.join(map(str, widths))}) contradict its stages, which need "
            f"{' + '.join(map(str, pipeline.devices))}",
            where=asked.at("devices"),
        )


def with_micro_batches(
    graph: ModelGraph, config: Config, asked: Sequence[ReplicaBlock], shapes: Sequence[Shape], num_rows: int
) -> tuple[Shape, ...]:
    """The shapes with micro-batch counts from weights of rows; without weights from equal rows, to be recounted after balancing.

    Raises:
        ConfigError: rows by weight that are not whole micro-batches.
    """
    total = sum(block.rows or 1 for block in asked)
    faults, counts = list[WhaleError](), []
    for block in asked:
        unit = block.micro_batch_rows or 1
        own, rest = divmod(num_rows * (block.rows or 1), total)
        if block.rows is not None and block.micro_batch_rows is not None and (rest or own % unit):
            faults.append(_not_whole(block, f"{num_rows * block.rows / total:g}", num_rows))
        counts.append(max(1, own // unit))
    raise_faults(faults)
    return _counted(graph, config, asked, shapes, counts)


def count_by_rows(
    graph: ModelGraph, config: Config, asked: Sequence[ReplicaBlock], shapes: Sequence[Shape], rows: Sequence[int]
) -> tuple[tuple[Shape, ...], tuple[int, ...]]:
    """The shapes with micro-batch counts from balanced `rows`, and those rows rounded to whole micro-batches.

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
    """Per part, a number of units (of `units[part]` rows, at least one) near its rows, with the same total; None where none is found."""
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
        f"micro_batch_rows: {block.micro_batch_rows} does not divide the rows of its replica ({share}, {num_rows} in all)",
        where=block.at("micro_batch_rows"),
    )


def _counted(
    graph: ModelGraph, config: Config, asked: Sequence[ReplicaBlock], shapes: Sequence[Shape], counts: Sequence[int]
) -> tuple[Shape, ...]:
    """The shapes with so many micro-batches where a block states their rows; equal blocks share one."""
    made: dict[tuple[ReplicaBlock, int], Shape] = {}
    for block, shape, count in zip(asked, shapes, counts, strict=True):
        if block.micro_batch_rows is not None and (block, count) not in made:
            counted = dataclasses.replace(block, pipeline=(*block.pipeline, ("num_micro_batch", count)), micro_batch_rows=None)
            made[block, count] = shape_of(graph, config, counted, shape.pipeline.num_devices, 0, "a replica")
    return tuple(made.get((block, count), shape) for block, shape, count in zip(asked, shapes, counts, strict=True))


@dataclass(frozen=True)
class Block:
    """One replica: a cluster of its devices only, what the user wrote, and its shape."""

    cluster: Cluster
    asked: ReplicaBlock
    shape: Shape

    def placements(self, memory: Sequence[float], work: Sequence[float] | None) -> tuple[Placement, ...]:
        """The placements worth pricing: the written one, else those for what its ranks hold and compute."""
        if self.asked.placed is not None:
            return (Placement("as written in the plan", (self.asked.placed,), ()),)
        prefers = self.shape.config.cluster.device_place_prefer_intra_node
        return placements(self.cluster, self.shape.pipeline, memory, work, prefer_intra_node=prefers)


def read_replicas(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks with their devices and pipelines, and the devices left over.

    Named devices are taken first; a count then takes the next free devices in the cluster's order, and its replicas divide
    these as ``cluster.device_place_prefer_intra_node`` says.

    Raises:
        ConfigError: blocks that do not fit the cluster, the scopes or themselves; all at once.
        AnnotationError: scopes that cannot be honoured on a block's devices.
    """
    free, faults = _free(cluster, config.replicas)
    found: list[tuple[ReplicaBlock, Shape, tuple[str, ...]]] = []
    for number, asked in enumerate(config.replicas):
        try:
            with asked.placed_here():
                for shape, names in _read(graph, cluster, config, asked, free, f"replica {number}"):
                    found.append((asked, shape, names))
                    free = free[len(names) :] if not asked.names else free
        except WhaleError as fault:
            faults.append(fault)
    raise_faults(faults)
    shapes = with_micro_batches(graph, config, [asked for asked, _, _ in found], [shape for _, shape, _ in found], num_rows)
    blocks = (Block(cluster.only(frozenset(names)), asked, shape) for (asked, _, names), shape in zip(found, shapes, strict=True))
    return tuple(blocks), tuple(free)


def _free(cluster: Cluster, blocks: Sequence[ReplicaBlock]) -> tuple[list[str], list[WhaleError]]:
    named = {name: block for block in blocks for name in block.names}
    faults: list[WhaleError] = [
        ConfigError(
            f"replicas.devices names {name}, which is not in cluster {cluster.name!r}",
            where=block.at("devices"),
            hint=did_you_mean(name, cluster.by_name),
        )
        for name, block in named.items()
        if name not in cluster.by_name
    ]
    return [device.name for device in cluster.devices if device.name not in named], faults


def _read(
    graph: ModelGraph, cluster: Cluster, config: Config, asked: ReplicaBlock, free: Sequence[str], name: str
) -> Iterator[tuple[Shape, tuple[str, ...]]]:
    """The replicas of a block, each with its devices."""
    stated = len(asked.names) if isinstance(asked.devices, tuple) else asked.devices
    shape = shape_of(graph, config, asked, stated, len(free), name)
    wanted = shape.pipeline.num_devices
    if asked.names:
        yield shape, asked.names
        return
    count = asked.count if asked.count is not None else max(1, len(free) // wanted)
    if len(free) < count * wanted:
        each = f"{name} takes" if count == 1 else f"{count} replicas as {name} take {wanted} each,"
        raise ConfigError(
            f"the cluster has too few devices for the replicas ({each} {count * wanted}, left: {len(free)})", where=asked.at("count")
        )
    taken = cluster.only(frozenset(free[: count * wanted]))
    groups, _ = device_groups(taken, wanted, prefer_intra_node=config.cluster.device_place_prefer_intra_node)
    for group in groups:
        yield shape, tuple(device.name for device in group)


def assign_by_blocks(graph: ModelGraph, asked: ReplicaBlock, num_stages: int, annotations: Annotations | None) -> Assignment:
    """Assigns ops to stages of so many blocks each; what precedes the blocks runs on the first stage, what follows on the last.

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
    return assignment


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
    """Raises ConfigError if the model lacks axes that a written plan cuts; all at once."""
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
