"""The dry run of a plan: two steps of each distinct rank, without memory for its tensors; devices in alike replicas share one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from whale.config import Config
from whale.dry_run.rank import DryRank, Peak
from whale.errors import ConfigError
from whale.ir.plan import Plan, Replica
from whale.runtime.program.captured import Captured
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.schedules import schedules_of


@dataclass(frozen=True)
class DryRun:
    """What a dry run of a plan found.

    Attributes:
        peaks: per rank that was run, the devices that are like it, itself first, and its peak.
    """

    peaks: tuple[tuple[tuple[str, ...], Peak], ...]

    @cached_property
    def of(self) -> Mapping[str, Peak]:
        """The peak of each device."""
        return {name: peak for devices, peak in self.peaks for name in devices}

    @property
    def num_run(self) -> int:
        """Ranks that were run."""
        return len(self.peaks)


def dry_run(plan: Plan, captured: Captured, config: Config) -> DryRun:
    """Runs two steps of each distinct rank of a plan, and tells the memory of the second.

    Operators run for their shapes only, as on the CPU; a model of any size takes next to no memory. What an operator needs while it
    runs is not counted, nor is the batch.

    Args:
        plan: verified.
        captured: the model in training.
        config: settings.

    Raises:
        ConfigError: this process is a rank among others, no optimizer is known that keeps as many tensors as the plan says, or weights are
            shared out.
        OpFault: an op of the model depends on the values of tensors.
    """
    if any(state.is_gathered for state in plan.parameter_states):
        raise ConfigError(
            "a dry run counts memory until nobody has it any more (memory.zero: 3: weights that are let go keep their tensors)",
            hint="leave out the dry run, or take memory.zero: 2",
        )
    holdings = Holdings.of(plan, captured.graph, discover_if_sharded(plan, captured.graph))
    ranks = DryRank(plan, schedules_of(plan), holdings, captured, config)
    return DryRun(tuple((devices, ranks.peak(plan.rank_of[devices[0]])) for devices in alike_devices(plan)))


def alike_devices(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The devices of a plan, those together that have the same place in alike replicas; by their first ranks.

    Replicas are alike that have the same pipeline, stages and rows: each shares with the others what the others share with it.
    """
    found: dict[tuple[Hashable, int, int], list[str]] = {}
    for replica in plan.replicas:
        form = _form(plan, replica)
        if any(state.kept.sharding == "owners" for state in plan.parameter_states):  # each keeps something else
            form = form, replica.index
        for rank in range(replica.pipeline.num_ranks):
            stage = replica.stages[replica.pipeline.stage_rank.index(rank)]
            for position, device in enumerate(stage.virtual_device.devices):
                found.setdefault((form, rank, position), []).append(device)
    return tuple(tuple(devices) for devices in found.values())


def _form(plan: Plan, replica: Replica) -> Hashable:
    """All of a replica that its program depends on, without the names of its devices."""
    rows = tuple(stop - start for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows))
    stages = tuple(
        (stage.ops, len(stage.virtual_device.devices), stage.shares, stage.parameters, stage.split, stage.shards, stage.program)
        for stage in replica.stages
    )
    return rows, replica.pipeline, stages, replica.edges
