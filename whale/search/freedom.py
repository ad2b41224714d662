"""What the user leaves to the search, and what is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from whale.config import Config, ReplicaBlock
from whale.config.keys import Choice, Recomputation
from whale.ir.cluster import Device
from whale.ir.plan import Plan
from whale.planning.strategy import StateSpec
from whale.schedules import BUILDERS, ScheduleShape
from whale.units import counted

FOR_MEMORY = ("none", "blocks", "full")  # for the least memory, each of these is tried instead of recomputing as needed


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which the stages of a replica compute: the schedule's name, and stages per rank."""

    schedule: str
    num_chunks: int = 1
    as_needed: bool = False  # whether memory decides about recomputation under one that recomputes by itself, too

    def alive(self, num_ranks: int, num_micro_batch: int) -> float:
        """Micro-batches in flight on a rank, in the mean of the first and the last."""
        builder, shape = BUILDERS[self.schedule], ScheduleShape(num_ranks, num_micro_batch, self.num_chunks, num_ranks)
        return (builder.peak(shape, 0) + builder.peak(shape, num_ranks - 1)) / 2 / self.num_chunks

    @property
    def recomputes(self) -> bool:
        """Whether it recomputes whole stages regardless of memory."""
        return BUILDERS[self.schedule].recomputes

    def policy(self, policy: Recomputation) -> Recomputation:
        """The recomputation policy under this order: one that recomputes by itself turns "auto" into "full", unless both were set."""
        return "full" if policy == "auto" and self.recomputes and not self.as_needed else policy


ORDERS = tuple(Order(builder.name, chunks) for builder in BUILDERS.values() for chunks in builder.tried)
"""The orders that are tried where none is set."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose from."""

    orders: tuple[Order, ...]  # schedules with their chunks
    micro_batches: int | None  # their number; None for any power of two or divisor of the rows between
    num_ranks: int | None  # of each replica; None for any
    near: bool | None  # whether replicas stay on one host where possible (True), or identical devices are dealt out (False); None for both
    alike: bool  # whether replicas must be identical, because samples depend on one another: then they are joined
    fewer: bool  # whether replicas of one device type may leave out others, as the cheapest plan does
    policies: tuple[Recomputation, ...]  # of recomputation, each tried with every strategy
    config: Config  # the settings that plans are made with
    using: Device | None = None  # a device type that every plan must use; None for any


def pin_of(config: Config) -> str | None:
    """The setting that decides the whole plan, so that there is no search; None where nothing does."""
    pins = {
        "planning.search off": config.planning.search == "off",
        "the plan that is written down": any(block.stages for block in config.replicas),
    }
    return next((name for name, is_set in pins.items() if is_set), None)


def _counts(block: ReplicaBlock) -> bool:
    """Whether a block sets the number of micro-batches."""
    return block.micro_batch_rows is not None or "num_micro_batch" in dict(block.pipeline)


def _orders(block: ReplicaBlock) -> bool:
    """Whether a block sets the schedule."""
    return not dict(block.pipeline).keys().isdisjoint(("schedule", "num_chunks", "group_size"))


def freedom_of(config: Config, *, mixes_samples: bool) -> Freedom:
    """What a configuration leaves open: every key that was not set.

    `mixes_samples`: samples depend on one another, so that more than one micro-batch would change the result.
    """
    pipeline = config.pipeline
    is_order_set = not config.explicit.isdisjoint(("pipeline.schedule", "pipeline.num_chunks", "pipeline.group_size"))
    is_order_set |= bool(config.replicas) and all(map(_orders, config.replicas))
    is_counted = "pipeline.num_micro_batch" in config.explicit or (bool(config.replicas) and all(map(_counts, config.replicas)))
    num_micro_batch = pipeline.num_micro_batch if is_counted else 1 if mixes_samples else None
    is_policy_set = "recompute.policy" in config.explicit
    if not is_policy_set:
        config = config.with_values({"recompute.policy": "auto"})
    is_for_memory = config.planning.objective == "memory" and not is_policy_set
    return Freedom(
        orders=(Order(pipeline.schedule, pipeline.num_chunks, is_policy_set),) if is_order_set else ORDERS,
        micro_batches=num_micro_batch,
        num_ranks=pipeline.num_stages,
        near=config.cluster.device_place_prefer_intra_node if "cluster.device_place_prefer_intra_node" in config.explicit else None,
        alike=mixes_samples,
        fewer=config.planning.objective == "cost",
        policies=FOR_MEMORY if is_for_memory else (config.recompute.policy,),
        config=config,
    )


COMPARED = 0.1
"""Share of the effort that goes to plans which shard more state than fits demands: they rarely gain, and large ones take long. Halved or
doubled: 20 searches of examples/benchmarks/constants.py in short memory are the same.
"""


@dataclass(frozen=True)
class States:
    """What ``memory.zero`` and ``memory.offload`` leave open, from the state that needs most device memory to the least.

    zero 0  -->  nothing fits, or much is recomputed  -->  zero 2  -->  nothing fits  -->  zero 3
         -->  nothing fits  -->  offload as needed, of the optimizer or of activations, whichever is better:
                                 zero 0 or, where better, zero 2, where each host steps a part
                                 -->  nothing fits  -->  zero 3
         -->  nothing fits  -->  offload as needed, of the optimizer and of weights, in the same order
    """

    levels: tuple[Choice, ...]  # of ``memory.zero``
    homes: tuple[tuple[str, ...], ...]  # values of ``memory.offload``; those of a later group only where nothing fits with earlier ones
    as_needed: bool

    @staticmethod
    def of(config: Config, num_devices: int) -> States:
        """The states that settings leave open on so many devices."""
        zero, offload = config.memory.zero, config.memory.offload
        levels: tuple[Choice, ...] = ("0" if zero == "auto" else zero,)
        if zero == "auto" and num_devices > 1:
            levels = ("0", "2", "3")
        if offload != "auto":
            return States(levels, ((offload,),), config.memory.offload_as_needed)
        return States(levels, (("none",), ("optimizer", "activations"), ("optimizer+parameters",)), as_needed=True)

    @property
    def first(self) -> StateSpec:
        return StateSpec(self.levels[0], self.homes[0][0], self.as_needed)

    @property
    def last(self) -> StateSpec:
        return StateSpec(self.levels[-1], self.homes[-1][-1], self.as_needed)

    @property
    def are_open(self) -> bool:
        return self.first != self.last

    def in_turn(self, best: Callable[[str], Plan | None], gains: Callable[[Plan, Choice], bool]) -> Iterator[tuple[StateSpec, float]]:
        """The states to look at, each with its share of the effort.

        Args:
            best: the best plan so far with a value of ``memory.offload``.
            gains: whether a better plan than this may shard as much as this level of ``memory.zero``.
        """
        for homes in self.homes:
            for home in homes:
                for level in self.levels:
                    found = best(home)
                    halves = home == "optimizer" and level == "2" and len(self.homes) > 1  # the CPU of each host steps a part
                    if found is not None and not (halves or gains(found, level)):
                        break
                    yield StateSpec(level, home, self.as_needed), 1.0 if found is None else COMPARED
            if any(best(home) is not None for home in homes):
                return


def describe_state(state: StateSpec, plan: Plan) -> str:
    """The state of a plan in words, with how much of it is on hosts."""
    trained = [own for own in plan.parameter_states for _ in own.parameters if own.optimizer is not None]
    homes, reads = [own.kept.home for own in trained], [own.compute.home for own in trained]
    stages = [stage.offloads for replica in plan.replicas for stage in replica.stages]
    there = f"{homes.count('host')} of {counted(len(homes), 'parameter')} on hosts"
    part = {
        "optimizer": f" ({there})",
        "activations": f" (of {sum(stages)} of {counted(len(stages), 'stage')})",
        "optimizer+parameters": f" ({there}, {reads.count('host')} as ops read them)",
    }.get(state.offload, "")
    return f"{state}{part}"
