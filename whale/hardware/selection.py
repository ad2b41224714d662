"""Some devices of a cluster, by words such as ``V100:2,host1/*``: the rest of it is as if it were not there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from whale.config import did_you_mean
from whale.errors import ClusterError, WhaleError, raise_faults
from whale.ir.cluster import Cluster, Device

_COUNTED = re.compile(r"(.*):(\d+)")


def select(cluster: Cluster, text: str) -> Cluster:
    """A cluster of some devices of another, in its order, under their names.

    Args:
        cluster: to select from.
        text: names with commas between. A name is that of a device, a host or a device model, in full or up to a ``-`` of it, or a
            pattern of such with ``*`` and ``?``; ``NAME:N`` takes the first N of them that no name before it has taken.

    Raises:
        ClusterError: names of nothing, and numbers of more than there are; all at once.
    """
    faults: list[WhaleError] = []
    taken: dict[str, str] = {}  # by which word
    for word in (part.strip() for part in text.split(",")):
        counted = _COUNTED.fullmatch(word)
        name = counted[1] if counted else word
        found = [device.name for device in cluster.devices if _is_called(device, name)]
        if not found:
            faults.append(ClusterError(f"there is no device {name!r} in cluster {cluster.name}", hint=did_you_mean(name, _names(cluster))))
            continue
        free = [each for each in found if each not in taken]
        number = int(counted[2]) if counted else len(free)
        if counted and not 1 <= number <= len(free):
            takers = dict.fromkeys(taken[each] for each in found if each in taken)
            faults.append(_not_left(cluster, word, number, f"{len(free)} of {len(found)} left", list(takers), name if free else ""))
        taken |= dict.fromkeys(free[:number], word)
    raise_faults(faults)
    return cluster.only(taken)


def _not_left(cluster: Cluster, word: str, number: int, left: str, takers: Sequence[str], name: str) -> ClusterError:
    """The fault of a word that asks for none, or for more devices than the words before it have left."""
    others = f"; {' and '.join(takers)} took the others" if takers else ""
    fewer = f"{name} takes all that are left" if name and number else f"leave {word} out"
    return ClusterError(
        f"{word} asks for {number} devices, from 1 to as many as are left (cluster {cluster.name}: {left}{others})", hint=fewer
    )


def _is_called(device: Device, pattern: str) -> bool:
    parts = device.model.split("-")
    models = ("-".join(parts[: stop + 1]) for stop in range(len(parts)))
    return any(fnmatchcase(name, pattern) for name in (device.name, device.host, *models))


def _names(cluster: Cluster) -> Iterator[str]:
    """What a device may be called by, those of many devices first."""
    yield from Counter(device.model for device in cluster.devices)
    yield from (host.name for host in cluster.hosts)
