"""The blocks of ``replicas:``: the devices of each replica, and its pipeline, one solver each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from whale.config import Config, ReplicaBlock, did_you_mean
from whale.errors import ConfigError, WhaleError, raise_faults
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import Annotations, read_scopes
from whale.planning.pipeline.scheduling import PipelineShape, Split, shape_pipeline


@dataclass(frozen=True)
class Block:
    """One replica as it is to be planned.

    Attributes:
        cluster: its devices alone.
        config: the settings, with the block's own.
        annotations: the scopes on these devices; None without scopes.
        pipeline: its shape.
    """

    cluster: Cluster
    config: Config
    annotations: Annotations | None
    pipeline: PipelineShape


def read_replicas(graph: ModelGraph, cluster: Cluster, config: Config) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks with their devices and pipelines, and the devices that are left over.

    Names are taken first; a count then takes the next free devices in the cluster's order.

    Raises:
        ConfigError: blocks that do not fit the cluster, the scopes or themselves; those of all blocks at once.
        AnnotationError: scopes that cannot be honoured on a block's devices.
    """
    free, faults = _free(cluster, config.replicas)
    blocks = []
    for number, asked in enumerate(config.replicas):
        try:
            block, names = _read(graph, cluster, config, asked, free, f"replica {number}")
            free = [name for name in free if name not in names]
            blocks.append(block)
        except WhaleError as fault:
            faults.append(fault)
    raise_faults(faults)
    return tuple(blocks), tuple(free)


def _free(cluster: Cluster, blocks: Sequence[ReplicaBlock]) -> tuple[list[str], list[WhaleError]]:
    named = [name for block in blocks if isinstance(block.devices, tuple) for name in block.devices]
    faults: list[WhaleError] = [
        ConfigError(
            f"replicas.devices names devices of the cluster ({name} is not in {cluster.name})", hint=did_you_mean(name, cluster.by_name)
        )
        for name in named
        if name not in cluster.by_name
    ]
    return [device.name for device in cluster.devices if device.name not in named], faults


def _read(
    graph: ModelGraph, cluster: Cluster, config: Config, asked: ReplicaBlock, free: Sequence[str], name: str
) -> tuple[Block, tuple[str, ...]]:
    own = config.with_values({f"pipeline.{key}": value for key, value in asked.pipeline})
    stated = len(asked.devices) if isinstance(asked.devices, tuple) else asked.devices
    annotations = read_scopes(graph, own, stated or len(free))
    if annotations is None and (own.pipeline.num_stages or 1) > (stated or len(free)):
        there = f"devices: {stated}" if stated else f"devices left: {len(free)}"
        raise ConfigError(f"each stage of a replica takes a device ({name}, num_stages: {own.pipeline.num_stages or 1}, {there})")
    pipeline = shape_pipeline(own, annotations, stated or len(free))
    if annotations is None and asked.split is not None:
        devices = (asked.split,) * pipeline.num_ranks
        pipeline = dataclasses.replace(pipeline, devices=devices, splits=(Split(asked.split),) * pipeline.num_stages)
    elif annotations is not None:
        _check_repeats(asked, annotations, name)
    _check_devices(asked, pipeline, stated, free, name)
    names = asked.devices if isinstance(asked.devices, tuple) else tuple(free[: pipeline.num_devices])
    return Block(_part_of(cluster, names), own, annotations, pipeline), names


def _check_repeats(asked: ReplicaBlock, annotations: Annotations, name: str) -> None:
    """Scopes say what is split; a block may repeat it."""
    widths = sorted(set(annotations.widths))
    if asked.split is not None and asked.split not in widths:
        raise ConfigError(
            f"the scopes say what is split ({name}, split: {asked.split}, scopes: {', '.join(map(str, widths))})",
            where=annotations.scopes[0].where,
            hint="remove the key or the scopes",
        )


def _check_devices(asked: ReplicaBlock, pipeline: PipelineShape, stated: int | None, free: Sequence[str], name: str) -> None:
    wanted = pipeline.num_devices
    if stated is not None and stated != wanted:
        each = " + ".join(map(str, pipeline.devices)) if pipeline.num_ranks > 1 else str(wanted)
        raise ConfigError(
            f"a replica has the devices that its stages take ({name}, devices: {stated}, stages: {each})",
            hint="num_stages and split of the block say how many its stages take",
        )
    if not isinstance(asked.devices, tuple) and len(free) < wanted:
        raise ConfigError(f"the cluster has the devices that replicas ask for ({name} takes {wanted}, left: {len(free)})")


def _part_of(cluster: Cluster, names: Collection[str]) -> Cluster:
    """The cluster with these devices alone."""
    hosts = (dataclasses.replace(host, devices=tuple(d for d in host.devices if d.name in names)) for host in cluster.hosts)
    return dataclasses.replace(cluster, hosts=tuple(host for host in hosts if host.devices))
