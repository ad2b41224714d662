"""`dry_run`: the memory of every device of a plan, from the runtime's own program on tensors without contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from whale.config import Config
from whale.dry_run.alike import alike_devices
from whale.dry_run.rank import DryRank, Peak
from whale.ir.plan import Plan
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
        ConfigError: this process is a rank among others, or no optimizer is known that keeps as many tensors as the plan says.
        OpFault: an op of the model depends on the values of tensors.
    """
    holdings = Holdings.of(plan, captured.graph, discover_if_sharded(plan, captured.graph))
    ranks = DryRank(plan, schedules_of(plan), holdings, captured, config)
    return DryRun(tuple((devices, ranks.peak(plan.rank_of[devices[0]])) for devices in alike_devices(plan)))
