"""The blocks of ``replicas:``: the devices of each replica, and its pipeline, one solver each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale.config import Config, ReplicaBlock, did_you_mean
from whale.errors import ConfigError, WhaleError, raise_faults
from whale.ir.cluster import Cluster, Host
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import Annotations, read_scopes
from whale.planning.pipeline.placement import Placement, placements
from whale.planning.pipeline.scheduling import AskedAxes, PipelineShape, Split, shape_pipeline


@dataclass(frozen=True)
class Block:
    """One replica as it is to be planned.

    Attributes:
        cluster: its devices alone.
        asked: what the user wrote.
        shape: what follows from that.
    """

    cluster: Cluster
    asked: ReplicaBlock
    shape: Shape

    def placements(self, memory: Sequence[float], work: Sequence[float] | None) -> tuple[Placement, ...]:
        """The ways to place it that are worth pricing: as it is written, else those for what its ranks hold and compute."""
        if self.asked.placed is not None:
            return (Placement("as it is written", (self.asked.placed,), ()),)
        return placements(self.cluster, self.shape.pipeline, memory, work, prefer_intra_node=True)


@dataclass(frozen=True)
class Shape:
    """What a replica is, wherever it lies.

    Attributes:
        config: the settings, with the block's own.
        annotations: the scopes on its devices; None without scopes.
        pipeline: its pipeline.
    """

    config: Config
    annotations: Annotations | None
    pipeline: PipelineShape


def read_replicas(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks with their devices and pipelines, and the devices that are left over.

    Names are taken first; a count then takes the next free devices in the cluster's order.

    Args:
        num_rows: of the global batch.

    Raises:
        ConfigError: blocks that do not fit the cluster, the scopes or themselves; those of all blocks at once.
        AnnotationError: scopes that cannot be honoured on a block's devices.
    """
    free, faults = _free(cluster, config.replicas)
    found: list[tuple[ReplicaBlock, Shape, tuple[str, ...]]] = []
    for number, asked in enumerate(config.replicas):
        try:
            for shape, names in _read(graph, config, asked, free, f"replica {number}"):
                found.append((asked, shape, names))
                free = free[len(names) :] if not asked.names else free
        except WhaleError as fault:
            faults.append(fault)
    raise_faults(faults)
    shapes = _with_micro_batches(graph, config, [(asked, shape) for asked, shape, _ in found], num_rows)
    hosts = {device.name: host for host in cluster.hosts for device in host.devices}
    blocks = (Block(_part_of(cluster, names, hosts), asked, shape) for (asked, _, names), shape in zip(found, shapes, strict=True))
    return tuple(blocks), tuple(free)


def _free(cluster: Cluster, blocks: Sequence[ReplicaBlock]) -> tuple[list[str], list[WhaleError]]:
    named = {name: block for block in blocks for name in block.names}
    faults: list[WhaleError] = [
        ConfigError(
            f"replicas.devices names devices of the cluster ({name} is not in {cluster.name})",
            where=block.at("devices"),
            hint=did_you_mean(name, cluster.by_name),
        )
        for name, block in named.items()
        if name not in cluster.by_name
    ]
    return [device.name for device in cluster.devices if device.name not in named], faults


def _read(
    graph: ModelGraph, config: Config, asked: ReplicaBlock, free: Sequence[str], name: str
) -> Iterator[tuple[Shape, tuple[str, ...]]]:
    """The replicas that a block stands for, each with its devices."""
    stated = len(asked.names) if isinstance(asked.devices, tuple) else asked.devices
    shape = _shape(graph, config, asked, stated, len(free), name)
    wanted = shape.pipeline.num_devices
    if asked.names:
        yield shape, asked.names
        return
    count = asked.count if asked.count is not None else max(1, len(free) // wanted)
    if len(free) < count * wanted:
        each = f"{name} takes" if count == 1 else f"{count} replicas as {name} take {wanted} each,"
        raise ConfigError(
            f"the cluster has the devices that replicas ask for ({each} {count * wanted}, left: {len(free)})", where=asked.at("count")
        )
    for start in range(0, count * wanted, wanted):
        yield shape, tuple(free[start : start + wanted])


def _shape(graph: ModelGraph, config: Config, asked: ReplicaBlock, stated: int | None, num_free: int, name: str) -> Shape:
    own = config.with_values({f"pipeline.{key}": value for key, value in asked.pipeline})
    if asked.recompute is not None:
        own = own.with_values({"recompute.policy": asked.recompute})
    annotations = read_scopes(graph, own, stated or num_free)
    num_stages = own.pipeline.num_stages or 1
    if annotations is None and num_stages > (stated or num_free):
        there = f"devices: {stated}" if stated else f"devices left: {num_free}"
        raise ConfigError(
            f"each stage of a replica takes a device ({name}, num_stages: {num_stages}, {there})", where=asked.at("num_stages")
        )
    pipeline = shape_pipeline(own, annotations, stated or num_free)
    if annotations is None and asked.split is not None:
        devices = (asked.split,) * pipeline.num_ranks
        pipeline = dataclasses.replace(pipeline, devices=devices, splits=(Split(asked.split),) * pipeline.num_stages)
    elif annotations is not None:
        _check_repeats(asked, annotations, name)
    if asked.axes is not None:
        if not pipeline.splits:
            raise ConfigError(
                f"axes are cut in stages that are split ({name} splits none)", where=asked.at("axes"), hint="split: 2, for instance"
            )
        axes = AskedAxes(asked.axes, asked.more_axes)
        pipeline = dataclasses.replace(pipeline, splits=tuple(dataclasses.replace(split, asked=axes) for split in pipeline.splits))
    _check_devices(asked, pipeline, stated, name)
    return Shape(own, annotations, pipeline)


def _with_micro_batches(graph: ModelGraph, config: Config, found: Sequence[tuple[ReplicaBlock, Shape]], num_rows: int) -> list[Shape]:
    """The shapes, with as many micro-batches as their rows make where a block states those."""
    total = sum(asked.rows or 1 for asked, _ in found)
    made: dict[int, Shape] = {}
    faults: dict[int, WhaleError] = {}
    shapes = []
    for asked, shape in found:
        if asked.micro_batch_rows is not None and id(asked) not in made:
            own, rest = divmod(num_rows * (asked.rows or 1), total)
            if rest or own % asked.micro_batch_rows:
                share = f"{num_rows * (asked.rows or 1) / total:g}"
                faults[id(asked)] = ConfigError(
                    f"micro_batch_rows divides the rows of its replica ({asked.micro_batch_rows} rows of {share}, {num_rows} in all)",
                    where=asked.at("micro_batch_rows"),
                )
                made[id(asked)] = shape
                continue
            again = dataclasses.replace(
                asked, pipeline=(*asked.pipeline, ("num_micro_batch", own // asked.micro_batch_rows)), micro_batch_rows=None
            )
            made[id(asked)] = _shape(graph, config, again, shape.pipeline.num_devices, 0, "a replica")
        shapes.append(made.get(id(asked), shape))
    raise_faults(list(faults.values()))
    return shapes


def _check_repeats(asked: ReplicaBlock, annotations: Annotations, name: str) -> None:
    """Scopes say what is split; a block may repeat it."""
    widths = sorted(set(annotations.widths))
    if asked.split is not None and asked.split not in widths:
        raise ConfigError(
            f"the scopes say what is split ({name}, split: {asked.split}, scopes: {', '.join(map(str, widths))})",
            where=annotations.scopes[0].where,
            hint="remove the key or the scopes",
        )


def _check_devices(asked: ReplicaBlock, pipeline: PipelineShape, stated: int | None, name: str) -> None:
    wanted = pipeline.num_devices
    if stated is not None and stated != wanted:
        each = " + ".join(map(str, pipeline.devices)) if pipeline.num_ranks > 1 else str(wanted)
        raise ConfigError(
            f"a replica has the devices that its stages take ({name}, devices: {stated}, stages: {each})",
            where=asked.at("devices"),
            hint="num_stages and split of the block say how many its stages take",
        )
    widths = tuple(map(len, asked.placed or ()))
    if widths and widths != pipeline.devices:
        raise ConfigError(
            f"a replica has the devices that its stages take ({name}, devices: {' + '.join(map(str, widths))}, "
            f"stages: {' + '.join(map(str, pipeline.devices))})",
            where=asked.at("devices"),
        )


def _part_of(cluster: Cluster, names: Sequence[str], host_of: Mapping[str, Host]) -> Cluster:
    """The cluster with these devices alone."""
    own = frozenset(names)
    hosts = {host_of[name].name: host_of[name] for name in names}
    order = {host.name: number for number, host in enumerate(cluster.hosts)} if len(hosts) > 1 else {}
    kept = (
        dataclasses.replace(host, devices=tuple(device for device in host.devices if device.name in own))
        for host in sorted(hosts.values(), key=lambda host: order.get(host.name, 0))
    )
    return dataclasses.replace(cluster, hosts=tuple(kept))
