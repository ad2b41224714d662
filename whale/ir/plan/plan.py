"""The decision: which devices run which ops of the model, on how many rows, in which schedule, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from whale.ir.division import divide, divide_evenly, intervals
from whale.ir.plan.choice import Choice
from whale.ir.plan.parameter_state import Form, ParameterState
from whale.ir.plan.replica import Pipeline, Replica
from whale.ir.plan.task_graph import TaskGraph
from whale.ir.plan.text import describe_order, describe_replica, describe_shape
from whale.units import counted, format_seconds


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Which part of a tensor dimension is the batch: the dimension is ``outer x rows x inner``."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class Plan:
    """The whole decision. Rank numbers are positions in `devices`.

    Attributes:
        model: fingerprint of the ModelGraph it was made for.
        cluster: name of the cluster.
        devices: the devices in use, by rank; replica by replica, stage by stage.
        idle_devices: devices of the cluster left over.
        device_models: what each device in use is (``V100-32GB``), by rank; empty in plans that were made before this was written down.
        task_graphs: the TaskGraphs of the model.
        replicas: the outer data parallelism, each with a pipeline of its own.
        batch_axes: per tensor that crosses stages, where its batch is; tensors without one are whole.
        planned_rows: rows of the global batch that shares and estimates were made for.
        step_seconds: predicted.
        choices: why.
        parameter_states: in which forms parameters and buffers live, each named once.
        keeper_shares: per rank, its weight where state is shared out among owners; empty where all have the same.
    """

    model: str
    cluster: str
    devices: tuple[str, ...]
    idle_devices: tuple[str, ...]
    task_graphs: tuple[TaskGraph, ...]
    replicas: tuple[Replica, ...]
    batch_axes: tuple[tuple[str, BatchAxis], ...]
    planned_rows: int
    step_seconds: float = 0.0
    choices: tuple[Choice, ...] = ()
    parameter_states: tuple[ParameterState, ...] = ()
    device_models: tuple[str, ...] = ()
    keeper_shares: tuple[int, ...] = ()

    @cached_property
    def rank_of(self) -> dict[str, int]:
        """Rank of each device in use."""
        return {device: rank for rank, device in enumerate(self.devices)}

    def state_of(self, name: str) -> ParameterState:
        """In which forms a parameter or buffer lives."""
        return self._state_of[name]

    @cached_property
    def _state_of(self) -> dict[str, ParameterState]:
        return {name: state for state in self.parameter_states for name in state.parameters}

    @property
    def where(self) -> str:
        """The devices in use, in words: ``4 devices of v100-t4``."""
        return f"{counted(len(self.devices), 'device')} of {self.cluster}"

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipeline of each replica."""
        return tuple(replica.pipeline for replica in self.replicas)

    @property
    def is_sharded(self) -> bool:
        """Whether some stage divides tensors over its devices: what a device then holds depends on the axes of the model."""
        return any(stage.shards for replica in self.replicas for stage in replica.stages)

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Per parameter or buffer, the ranks that hold it, ascending."""
        found: dict[str, set[int]] = {}
        for replica in self.replicas:
            for stage in replica.stages:
                ranks = {self.rank_of[device] for device in stage.virtual_device.devices}
                for name in stage.parameters:
                    found.setdefault(name, set()).update(ranks)
        return {name: tuple(sorted(ranks)) for name, ranks in found.items()}

    def replica_rows(self, num_rows: int) -> tuple[tuple[int, int], ...]:
        """The interval of the global batch's rows that each replica takes: by shares, but enough for all its devices if the rows suffice.

        Raises:
            ValueError: there are fewer rows than micro-batches of all replicas.
        """
        shares, wanted = [replica.share for replica in self.replicas], self._rows_of_all
        least = wanted if num_rows >= sum(wanted) else [pipeline.num_micro_batch for pipeline in self.pipelines]
        return intervals(divide(num_rows, shares, least))

    @cached_property
    def _rows_of_all(self) -> tuple[int, ...]:
        """Per replica, the rows with which each of its devices has one of each micro-batch."""
        return tuple(replica.pipeline.num_micro_batch * replica.least_rows for replica in self.replicas)

    def micro_batch_rows(self, replica: int, num_rows: int) -> tuple[tuple[int, int], ...]:
        """The intervals of the global batch's rows that a replica's micro-batches take."""
        return self._cut(replica, *self.replica_rows(num_rows)[replica])

    def all_micro_batch_rows(self, num_rows: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """`micro_batch_rows` of every replica."""
        return tuple(self._cut(replica, start, stop) for replica, (start, stop) in enumerate(self.replica_rows(num_rows)))

    def _cut(self, replica: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        return intervals(divide_evenly(stop - start, self.replicas[replica].pipeline.num_micro_batch), start)

    def with_micro_batches_for(self, num_rows: int) -> Plan:
        """The plan with as many micro-batches as a batch of this size has rows for, on every device: at least one, and no more than now."""
        if num_rows >= sum(self._rows_of_all):
            return self
        shares, least = [replica.share for replica in self.replicas], [replica.least_rows for replica in self.replicas]
        if num_rows < sum(least):
            least = [1] * len(least)  # some device gets no row in any case
        sizes = divide(max(num_rows, len(least)), shares, least)
        counts = [
            min(replica.pipeline.num_micro_batch, size // rows) for replica, size, rows in zip(self.replicas, sizes, least, strict=True)
        ]
        if counts == [pipeline.num_micro_batch for pipeline in self.pipelines]:
            return self
        replicas = tuple(
            replace(replica, pipeline=replace(replica.pipeline, num_micro_batch=count))
            for replica, count in zip(self.replicas, counts, strict=True)
        )
        return replace(self, replicas=replicas)

    def _describe_states(self) -> Iterator[str]:
        """What is shared out among owners, and what is kept on hosts."""
        found: dict[Form, dict[str, None]] = {}
        for name, form in (each for state in self.parameter_states for each in state.forms[1:]):
            if not form.is_plain:
                found.setdefault(form, {})[name] = None
        yield from (f"  {' and '.join(names)} form: {form}" for form, names in found.items())
        for dtype, feeds_back in dict.fromkeys((state.sum_dtype, state.feeds_back) for state in self.parameter_states):
            if dtype is not None:
                yield f"  gradients are summed in {dtype}" + (", with error feedback" if feeds_back else "")

    def __str__(self) -> str:
        lines = [
            f"plan: {describe_shape(self.replicas)} on {self.where}, {describe_order(self.replicas)}, "
            f"{counted(self.planned_rows, 'row')}, predicted {format_seconds(self.step_seconds)} per step"
        ]
        are_alike = len(set(self.pipelines)) == 1
        for replica, (start, stop) in zip(self.replicas, self.replica_rows(self.planned_rows), strict=True):
            shape = "" if are_alike else f", {counted(replica.pipeline.num_stages, 'stage')}, {replica.pipeline.order}"
            lines.append(f"  replica {replica.index}: rows {start}:{stop}{shape}")
            lines += describe_replica(replica, self.micro_batch_rows(replica.index, self.planned_rows)[0])
        lines += self._describe_states()
        if self.idle_devices:
            lines.append(f"  idle: {', '.join(self.idle_devices)}")
        return "\n".join(lines)
