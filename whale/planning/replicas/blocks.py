"""The blocks of ``replicas:``: which devices each replica has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whale.config import Config, ReplicaBlock, did_you_mean
from whale.errors import ConfigError, WhaleError, raise_faults
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.placement import Placement, device_groups, placements
from whale.planning.replicas.micro_batches import with_micro_batches
from whale.planning.replicas.shape import Shape, shape_of


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
        prefers = self.shape.config.cluster.device_place_prefer_intra_node
        return placements(self.cluster, self.shape.pipeline, memory, work, prefer_intra_node=prefers)


def read_replicas(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks with their devices and pipelines, and the devices that are left over.

    Names are taken first; a count then takes the next free devices in the cluster's order, and its replicas divide these as
    ``cluster.device_place_prefer_intra_node`` says.

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
            with asked.placed_here():
                for shape, names in _read(graph, cluster, config, asked, free, f"replica {number}"):
                    found.append((asked, shape, names))
                    free = free[len(names) :] if not asked.names else free
        except WhaleError as fault:
            faults.append(fault)
    raise_faults(faults)
    shapes = with_micro_batches(graph, config, [asked for asked, _, _ in found], [shape for _, shape, _ in found], num_rows)
    blocks = (Block(_part_of(cluster, names), asked, shape) for (asked, _, names), shape in zip(found, shapes, strict=True))
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
    graph: ModelGraph, cluster: Cluster, config: Config, asked: ReplicaBlock, free: Sequence[str], name: str
) -> Iterator[tuple[Shape, tuple[str, ...]]]:
    """The replicas that a block stands for, each with its devices."""
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
            f"the cluster has the devices that replicas ask for ({each} {count * wanted}, left: {len(free)})", where=asked.at("count")
        )
    taken = _part_of(cluster, free[: count * wanted])
    groups, _ = device_groups(taken, wanted, prefer_intra_node=config.cluster.device_place_prefer_intra_node)
    for group in groups:
        yield shape, tuple(device.name for device in group)


def _part_of(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The cluster with these devices alone."""
    own = frozenset(names)
    hosts = {cluster.by_name[name].host for name in names}
    kept = (
        dataclasses.replace(host, devices=tuple(each for each in host.devices if each.name in own))
        for host in cluster.hosts
        if host.name in hosts
    )
    return dataclasses.replace(cluster, hosts=tuple(kept))
