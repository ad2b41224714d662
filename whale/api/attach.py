"""Which rank of the world stands for which device of the cluster: decided from what the ranks are, never from their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whale.comm import World, together
from whale.errors import ClusterError, warn
from whale.hardware import DeviceProfile, load_cluster, make_cluster, select
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.measure import local_profile
from whale.runtime.execute.roster import Roster


@dataclass(frozen=True)
class Attachment:
    """A cluster with the rank of each of its devices.

    Attributes:
        cluster: to plan for.
        rank_of: world rank by device name.
    """

    cluster: Cluster
    rank_of: dict[str, int]

    def roster(self, plan: Plan, world: World) -> Roster:
        """The ranks of a plan for this cluster."""
        return Roster(plan, world, tuple(self.rank_of[device] for device in plan.devices))


def attach(cluster: Cluster | str | Path | None, world: World, devices: str | None = None) -> Attachment:
    """Finds the ranks that stand for a cluster's devices; with no cluster, the devices at hand are the cluster.

    Of the cluster it is the part that `devices` names, as `select` reads them; None for the whole.

    Ranks whose hardware is what the cluster file says take those devices first; the others follow in order, so a plan
    for other hardware can be tried on CPU ranks.

    Raises:
        ClusterError: the cluster has more devices than the world has ranks, or not those that are named.
    """
    described = together(world, lambda: _described(cluster, devices))
    own = local_profile(world.local_rank, world.local_size)
    profiles = [profile for profile in world.gather_objects(own) if isinstance(profile, DeviceProfile)]
    if described is None:
        found, names = make_cluster(profiles)
        part = found if devices is None else together(world, lambda: select(found, devices))
        return Attachment(part, {name: rank for rank, name in enumerate(names)})
    for warning in described.warnings if world.rank == 0 else ():
        warn(warning)
    if len(described.devices) > world.size:
        raise ClusterError(
            f"every device of the cluster needs a rank (cluster {described.name}: {len(described.devices)} devices, {world.size} ranks)",
            hint=f"start {len(described.devices)} ranks (whale run --ranks {len(described.devices)} ...), or name fewer (cluster.devices)",
        )
    return Attachment(described, _match(described, profiles))


def _described(cluster: Cluster | str | Path | None, devices: str | None) -> Cluster | None:
    whole = load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    return whole if whole is None or devices is None else select(whole, devices)


def _match(cluster: Cluster, profiles: Sequence[DeviceProfile]) -> dict[str, int]:
    free = list(range(len(profiles)))
    rank_of: dict[str, int] = {}
    for device in cluster.devices:
        rank = next((rank for rank in free if profiles[rank].model == device.model), None)
        if rank is not None:
            rank_of[device.name] = rank
            free.remove(rank)
    for device in cluster.devices:
        if device.name not in rank_of:
            rank_of[device.name] = free.pop(0)
    return rank_of
