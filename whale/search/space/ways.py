"""What scopes, and replicas that are written down, leave open: which devices, how many micro-batches, what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from whale.config import Config
from whale.config.keys import Shares
from whale.errors import AnnotationError
from whale.ir.cluster import Cluster, Device
from whale.search.space.freedom import Freedom
from whale.search.space.space import COMPLETE, powers_of_two


@dataclass(frozen=True)
class Way:
    """One way to run a model that its user has divided.

    Attributes:
        kinds: how many devices of each kind it takes, or may take.
        devices: their names.
        num_micro_batch: of each replica in a step, where nothing else is said of it.
        policy: of recomputation, likewise.
    """

    kinds: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]
    num_micro_batch: int
    policy: str | Shares

    def settings(self, config: Config) -> Config:
        """The settings with which it is planned."""
        return config.with_values({"pipeline.num_micro_batch": self.num_micro_batch, "recompute.policy": self.policy})

    def __str__(self) -> str:
        devices = " + ".join(f"{count} x {model}" for model, count in self.kinds)
        return f"as it is divided, on {devices}, {self.num_micro_batch} micro-batch(es)"


@dataclass(frozen=True)
class Ways:
    """All of them.

    Attributes:
        cluster: the devices there are.
        freedom: what the settings leave open.
        num_rows: of the global batch.
        sizes: of the virtual devices that the scopes make of so many devices: others than of all are no choice, for then TaskGraphs that
            stand apart share devices, or scopes without a count do not take all. None where replicas are written down.
    """

    cluster: Cluster
    freedom: Freedom
    num_rows: int
    sizes: Callable[[int], tuple[int, ...]] | None

    @property
    def first(self) -> Way:
        """With what is set, and else the defaults, on all devices."""
        return self._way(self.cluster.devices, self.freedom.micro_batches or 1, self.freedom.policies[0])

    def rows(self) -> Iterator[tuple[Way, ...]]:
        """Ways that differ in the number of micro-batches alone, fewest first; those of all devices come first."""
        fixed = self.freedom.micro_batches
        for devices, policy in product(self._subsets(), self.freedom.policies):
            numbers = powers_of_two(self.num_rows) if fixed is None else (fixed,)
            yield tuple(self._way(devices, number, policy) for number in numbers)

    @property
    def count(self) -> int:
        return sum(map(len, self.rows()))

    def used(self, way: Way, devices: Sequence[str]) -> Way:
        """A way with the devices that its plan has taken."""
        own = [device for device in self.cluster.devices if device.name in devices]
        return self._way(own, way.num_micro_batch, way.policy)

    def _way(self, devices: Sequence[Device], num_micro_batch: int, policy: str | Shares) -> Way:
        kinds = Counter(device.model for device in devices)
        return Way(tuple(kinds.items()), tuple(device.name for device in devices), num_micro_batch, policy)

    def _subsets(self) -> Iterator[Sequence[Device]]:
        """All devices, then those without some: on few devices any number of each kind is left out, on more all of it or none."""
        if self.sizes is None:
            yield self.cluster.devices
            return
        asked, by_kind = self.sizes(len(self.cluster.devices)), dict[Device, list[Device]]()
        for device in self.cluster.devices:
            by_kind.setdefault(device.kind, []).append(device)
        is_small = len(self.cluster.devices) <= COMPLETE
        numbers = (range(len(own), -1, -1) if is_small else (len(own), 0) for own in by_kind.values())
        for taken in product(*numbers):
            names = {device.name for own, count in zip(by_kind.values(), taken, strict=True) for device in own[:count]}
            with suppress(AnnotationError):  # scopes that so few devices cannot honour
                if names and self.sizes(len(names)) == asked:
                    yield tuple(device for device in self.cluster.devices if device.name in names)
