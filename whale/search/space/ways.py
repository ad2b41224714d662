"""What scopes, and replicas that are written down, leave open: devices, order, micro-batches, what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from whale.config import Config
from whale.config.keys import Shares
from whale.errors import AnnotationError
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import place_sizes
from whale.planning.pipeline.placement import Placed
from whale.search.arrangement import Order
from whale.search.space.freedom import Freedom
from whale.search.space.naming import host_looks
from whale.search.space.space import COMPLETE, micro_batch_counts
from whale.units import counted


@dataclass(frozen=True)
class Way:
    """One way to run a model that its user has divided.

    Attributes:
        kinds: how many devices of each kind it takes, or may take.
        devices: their names.
        num_micro_batch: of each replica in a step, where nothing else is said of it.
        policy: of recomputation, likewise.
        order: in which stages compute, likewise; None where there is nothing to order.
        placed: the devices of each rank of each replica; empty where the planner says.
    """

    kinds: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]
    num_micro_batch: int
    policy: str | Shares
    order: Order | None
    placed: tuple[Placed, ...] = ()

    def settings(self, config: Config) -> Config:
        """The settings with which it is planned."""
        order = {} if self.order is None else {"pipeline.schedule": self.order.schedule, "pipeline.num_chunks": self.order.num_chunks}
        return config.with_values({"pipeline.num_micro_batch": self.num_micro_batch, "recompute.policy": self.policy} | order)

    def __str__(self) -> str:
        devices = " + ".join(f"{count} x {model}" for model, count in self.kinds)
        order = "" if self.order is None else f", {self.order}"
        return f"as it is divided, on {devices}{order}, {counted(self.num_micro_batch, 'micro-batch')}"


@dataclass(frozen=True)
class Ways:
    """All of them.

    Attributes:
        cluster: the devices there are.
        freedom: what the settings leave open.
        num_rows: of the global batch.
        sizes: of the virtual devices that the scopes make of so many devices in an order: others than of all in the first order are no
            choice, for then TaskGraphs that stand apart share devices, or scopes without a count do not take all. None where replicas are
            written down.
        is_ordered: whether a replica that is written down may have several stages.
    """

    cluster: Cluster
    freedom: Freedom
    num_rows: int
    sizes: Callable[[int, Order], tuple[int, ...]] | None
    is_ordered: bool

    @property
    def first(self) -> Way:
        """With what is set, and else the defaults, on all devices."""
        order = self.freedom.orders[0] if self._has_order else None
        return self._way(self.cluster.devices, self.freedom.micro_batches or 1, self.freedom.policies[0], order)

    @cached_property
    def rows(self) -> tuple[tuple[Way, ...], ...]:
        """Ways that differ in the number of micro-batches alone, fewest first; those of all devices come first."""
        return tuple(row for row in self._rows() if row)

    @property
    def count(self) -> int:
        return sum(map(len, self.rows))

    def used(self, way: Way, devices: Sequence[str]) -> Way:
        """A way with the devices that its plan has taken, whatever their ranks."""
        own = [device for device in self.cluster.devices if device.name in devices]
        return self._way(own, way.num_micro_batch, way.policy, way.order)

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """The virtual devices of a replica, by the scopes; empty where replicas are written down."""
        return () if self.sizes is None else self.sizes(len(self.cluster.devices), self.freedom.orders[0])

    @property
    def _has_order(self) -> bool:
        return self.is_ordered if self.sizes is None else len(self.asked) > 1

    def _rows(self) -> Iterator[tuple[Way, ...]]:
        fixed = self.freedom.micro_batches
        numbers = micro_batch_counts(self.num_rows, self.num_rows) if fixed is None else (fixed,)
        using = self.freedom.using
        subsets = (own for own in self._subsets() if using is None or any(device.kind == using for device in own))
        for devices, policy in product(subsets, self.freedom.policies):
            for order in self._orders(len(devices)):
                own = numbers if order in (None, self.freedom.orders[0]) else [number for number in numbers if number > 1]
                yield tuple(self._way(devices, number, policy, order) for number in own)

    def _orders(self, num_devices: int) -> Iterator[Order | None]:
        """Those in which the same TaskGraphs stand apart: with chunks they do only where there are more of them than devices."""
        if not self._has_order:
            yield None
            return
        for order in self.freedom.orders:
            if self.sizes is None or self._sizes(num_devices, order) == self.asked:
                yield order

    def _way(self, devices: Sequence[Device], num_micro_batch: int, policy: str | Shares, order: Order | None) -> Way:
        kinds = Counter(device.model for device in devices)
        return Way(tuple(kinds.items()), tuple(device.name for device in devices), num_micro_batch, policy, order)

    def _subsets(self) -> Iterator[Sequence[Device]]:
        """All devices, then those without some: on few devices any of them are left out, on more all of a kind or none."""
        if self.sizes is None:
            yield self.cluster.devices
            return
        asked, is_small = self.asked, len(self.cluster.devices) <= COMPLETE
        groups = dict[Hashable, list[Device]]()
        for device in self.cluster.devices:
            groups.setdefault((device.kind, device.host, device.price_per_hour) if is_small else device.kind, []).append(device)
        numbers = (range(len(own), -1, -1) if is_small else (len(own), 0) for own in groups.values())
        seen = set[object]()
        for taken in product(*numbers):
            names = {device.name for own, count in zip(groups.values(), taken, strict=True) for device in own[:count]}
            found = tuple(device for device in self.cluster.devices if device.name in names)
            look = self._look(found)
            if len(names) >= max(1, sum(asked)) and look not in seen and self._sizes(len(names), self.freedom.orders[0]) == asked:
                seen.add(look)
                yield found

    def _sizes(self, num_devices: int, order: Order) -> tuple[int, ...] | None:
        """The virtual devices that the scopes make; None where they cannot be honoured."""
        assert self.sizes is not None
        with suppress(AnnotationError):
            return self.sizes(num_devices, order)
        return None

    def _look(self, devices: Sequence[Device]) -> object:
        """What is equal for devices that stand for one another: like ones on hosts that look alike."""
        looks, by_host = host_looks(self.cluster), dict[str, list[object]]()
        for device in devices:
            by_host.setdefault(device.host, []).append((device.kind, device.price_per_hour))
        return frozenset(Counter((looks[host], tuple(own)) for host, own in by_host.items()).items())


def ways_of(graph: ModelGraph, cluster: Cluster, config: Config, freedom: Freedom, num_rows: int) -> Ways:
    """The ways that the scopes of a model, or the replicas that are written down, leave open."""
    if config.replicas:
        settings = (dict(block.pipeline).get("num_stages", config.pipeline.num_stages) for block in config.replicas)
        is_ordered = any(op.scope for op in graph.ops) or any(number not in (None, 1) for number in settings)
        return Ways(cluster, freedom, num_rows, None, is_ordered)

    def sizes(num_devices: int, order: Order) -> tuple[int, ...]:
        own = config.with_values({"pipeline.schedule": order.schedule, "pipeline.num_chunks": order.num_chunks})
        return place_sizes(graph, own, num_devices)

    return Ways(cluster, freedom, num_rows, sizes, is_ordered=False)
