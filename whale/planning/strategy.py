"""What can be chosen of a plan: replicas, devices of their stages, schedule, micro-batches, recomputation; None means open.

2 x (V100-32GB -> T4), zb_h2, 4 micro-batches        two replicas of two ranks
1 x (A100-80GB, each split over 4), 1 micro-batch    one replica of one rank, whose stages are split over four devices
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from whale.config import Config, ReplicaBlock
from whale.config.keys import Choice, Recomputation, choice_text
from whale.ir.cluster import Cluster, Device
from whale.ir.plan import Plan, Replica
from whale.units import counted

Placed = tuple[tuple[str, ...], ...]
"""The device names of every rank of one replica."""


@dataclass(frozen=True)
class RankSpec:
    """The devices of a rank, over which its stages are split: `width` of one type, or of `unlike` types that begin with `kind`."""

    kind: Device
    width: int = 1
    unlike: tuple[Device, ...] = ()  # the types of all its devices, where they differ

    @staticmethod
    def of(devices: Sequence[Device]) -> RankSpec:
        """The rank on these devices."""
        kinds = tuple(device.kind for device in devices)
        return RankSpec(kinds[0], len(kinds), kinds if len(set(kinds)) > 1 else ())

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.width, self.unlike))

    def __hash__(self) -> int:  # ranks and replicas are keys of what was worked out about them, and long
        return self._hash


@dataclass(frozen=True)
class ReplicaSpec:
    """A replica, or several identical ones."""

    ranks: tuple[RankSpec, ...] | None = None  # the devices of each rank, in the order of the pipeline
    count: int = 1  # how many replicas
    names: Placed | None = None  # of the devices of each rank, of one replica
    schedule: str | None = None  # as in `BUILDERS`
    num_chunks: int | None = None  # stages per rank
    num_micro_batch: int | None = None  # of a step
    recompute: Recomputation | None = None  # as ``recompute.policy``

    @cached_property
    def _hash(self) -> int:
        return hash((self.ranks, self.count, self.names, self.schedule, self.num_chunks, self.num_micro_batch, self.recompute))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks, if known; else 1."""
        return len(self.ranks or self.names or (None,))

    @cached_property
    def num_devices(self) -> int:
        """Of all its replicas."""
        return self.count * sum(number * rank.width for rank, number in self.numbers.items())

    @cached_property
    def numbers(self) -> Mapping[RankSpec, int]:
        """Ranks of each type and width."""
        return Counter(self.ranks or ())

    @cached_property
    def taken(self) -> Mapping[Device, int]:
        """Devices of each type that all its replicas take."""
        taken: Counter[Device] = Counter()
        for rank, number in self.numbers.items():
            for kind in rank.unlike:
                taken[kind] += number * self.count
            if not rank.unlike:
                taken[rank.kind] += number * rank.width * self.count
        return taken

    @cached_property
    def is_split(self) -> bool:
        return any(rank.width > 1 for rank in self.numbers)

    def __str__(self) -> str:
        runs = [(rank, len(list(run))) for rank, run in groupby(self.ranks or ())]
        widths = {rank.width for rank, _ in runs}
        if len(widths) == 1 and not any(rank.unlike for rank, _ in runs):
            split = f", each split over {max(widths)}" if self.is_split else ""
            return f"{self.count} x ({' -> '.join(_counted_model(rank.kind, number) for rank, number in runs)}{split})"
        return f"{self.count} x ({' -> '.join(_split_model(rank, number) for rank, number in runs)})"


def _split_model(rank: RankSpec, number: int) -> str:
    if not rank.unlike:
        return _counted_model(rank.kind, number) + (f" split over {rank.width}" if rank.width > 1 else "")
    models = " + ".join(_counted_model(kind, count) for kind, count in Counter(rank.unlike).items())
    return f"{f'{number} x ' if number > 1 else ''}split over {models}"


def _counted_model(kind: Device, number: int) -> str:
    return f"{number} x {kind.told_from(())}" if number > 1 else kind.told_from(())


@dataclass(frozen=True)
class StateSpec:
    """What of parameter state is sharded, and what is kept on hosts."""

    zero: Choice  # as ``memory.zero``
    offload: str  # as ``memory.offload``, but not ``auto``
    as_needed: bool = False  # whether only what does not fit is offloaded

    def __str__(self) -> str:
        return f"memory.zero: {choice_text(self.zero)}, memory.offload: {self.offload}"

    def set_in(self, config: Config) -> Config:
        """The settings with this state."""
        return config.with_values({"memory.zero": self.zero, "memory.offload": self.offload, "memory.offload_as_needed": self.as_needed})


@dataclass(frozen=True)
class Strategy:
    """A plan up to its cuts, its rows and what follows from them."""

    replicas: tuple[ReplicaSpec, ...]  # where the ranks of one are open, scopes or written blocks define them
    devices: tuple[Device, ...] | None = None  # that open replicas may take; None for all
    near: bool | None = None  # placement of unnamed devices: replica after replica on few hosts (True), or rank after rank (False)
    state: StateSpec | None = None  # where settings leave it open

    @property
    def is_open(self) -> bool:
        """Whether scopes, or written blocks, define the replicas."""
        return any(replica.ranks is None for replica in self.replicas)

    @cached_property
    def taken(self) -> Mapping[Device, int]:
        """Devices of each type that it takes."""
        taken: Counter[Device] = Counter()
        for replica in self.replicas:
            taken.update(replica.taken)
        return taken

    @property
    def names(self) -> list[str]:
        """Of its devices, where they are named."""
        return [name for replica in self.replicas for names in replica.names or () for name in names]

    @property
    def num_replicas(self) -> int:
        return sum(replica.count for replica in self.replicas)

    @property
    def num_devices(self) -> int:
        return sum(replica.num_devices for replica in self.replicas) or len(self.devices or ())

    @property
    def is_split(self) -> bool:
        return any(replica.is_split for replica in self.replicas)

    @property
    def is_unlike(self) -> bool:
        """Whether a split group has devices of several types."""
        return any(rank.unlike for replica in self.replicas for rank in replica.numbers)

    @property
    def deepest(self) -> ReplicaSpec:
        """The replica with most ranks."""
        return max(self.replicas, key=lambda replica: replica.num_ranks)

    @property
    def num_micro_batch(self) -> int:
        """Of each replica, if equal."""
        return self.replicas[0].num_micro_batch or 1

    @cached_property
    def unnamed(self) -> Strategy:
        """The strategy without device names; identical replicas are merged."""
        if self.is_open:
            return replace(self, replicas=tuple(dict.fromkeys(replace(replica, names=None) for replica in self.replicas)), near=None)
        found: Counter[ReplicaSpec] = Counter()
        for replica in self.replicas:
            found[replace(replica, names=None, count=1)] += replica.count
        return Strategy(tuple(replace(replica, count=count) for replica, count in found.items()), state=self.state)

    def __str__(self) -> str:
        own = self.deepest
        if self.is_open:
            kinds = Counter(device.told_from(()) for device in self.devices or ())
            who = "divided as given, on " + " + ".join(f"{count} x {model}" for model, count in kinds.items())
        else:
            who = " + ".join(map(str, self.unnamed.replicas))
        order = own.schedule if own.num_ranks > 1 or (self.is_open and own.schedule) else None
        chunks = f" of {own.num_chunks} chunks" if order and (own.num_chunks or 1) > 1 else ""
        recompute = f", recompute {own.recompute}" if own.recompute in ("none", "blocks", "full") else ""
        state = f", {self.state}" if self.state is not None and (self.state.zero, self.state.offload) != ("0", "none") else ""
        return f"{who}{f', {order}{chunks}' if order else ''}, {counted(self.num_micro_batch, 'micro-batch')}{recompute}{state}"


def strategy_of(plan: Plan, cluster: Cluster) -> Strategy | None:
    """The strategy of a plan whose stages are on one device each, or split over all of theirs; None for others."""
    replicas = []
    for replica in plan.replicas:
        own = replica.pipeline
        if any(stage.split != len(stage.virtual_device.devices) for stage in replica.first_stages):
            return None
        names = tuple(stage.virtual_device.devices for stage in replica.first_stages)
        ranks = tuple(RankSpec.of([cluster.by_name[name] for name in each]) for each in names)
        replicas.append(ReplicaSpec(ranks, 1, names, own.schedule, own.num_chunks, own.num_micro_batch))
    return Strategy(tuple(replicas))


def block_of(replica: Replica, *, is_cut_by_scopes: bool = False) -> ReplicaBlock:
    """The settings of a replica, with its cuts and rows open.

    `is_cut_by_scopes`: whether scopes define its stages and which are split.
    """
    pipeline, widths = replica.pipeline, {stage.split for stage in replica.stages}
    return ReplicaBlock(
        devices=tuple(stage.virtual_device.devices for stage in replica.first_stages),
        split=max(widths) if len(widths) == 1 and max(widths) > 1 and not is_cut_by_scopes else None,
        pipeline=pipeline.settings if is_cut_by_scopes else (*pipeline.settings, ("num_stages", pipeline.num_ranks)),
    )
