"""The plan: which devices run which ops of the model, on how many rows, in which schedule, and why.

Each model replica has its share of the rows, its stages, and their pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from whale.errors import first_few
from whale.ir.division import divide, divide_evenly, intervals
from whale.ir.plan.parameter_state import Form, ParameterState
from whale.ir.plan.stage import Stage, describe_shards
from whale.ir.precision import HALF
from whale.units import counted, each_counted, format_bytes, format_seconds, listed


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a planner pass, for `whale plan --explain`."""

    pass_name: str  # the pass that decided (``balance``)
    subject: str  # what was decided (``rows of replica 0``)
    decision: str
    cost: str = ""  # in words with units
    bound: str = ""  # the constraint (``memory of host1/0``, ``the slowest device``); "" if there was none
    runner_up: str = ""  # the next best and its cost; "" if there was no other


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The ops of the model under one scope."""

    index: int  # position in the plan's order
    name: str  # the scope's name, or one made from its line
    strategy: str  # ``replicate`` or ``split``
    ops: tuple[str, ...]  # names, in graph order


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The order of a replica's stages; replicas may differ."""

    schedule: str  # name of the schedule kind
    num_micro_batch: int  # micro-batches of a step
    stage_rank: tuple[int, ...]  # per stage, its position among the virtual devices of the replica
    num_chunks: int = 1  # stages per virtual device of an interleaved schedule
    group_size: int | None = None  # of an interleaved schedule; None for others
    recomputed_stages: tuple[int, ...] = ()  # stages recomputed as a whole, by R actions; empty if that is left to the schedule
    receive_early: bool = True  # whether a POST stands one computation before what needs the message; else right before its RECV

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @property
    def num_ranks(self) -> int:
        """Virtual devices of the replica."""
        return max(self.stage_rank) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a virtual device, in order."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)

    @property
    def settings(self) -> tuple[tuple[str, str | int], ...]:
        """Its keys of the configuration, without stages."""
        names = ("schedule", "num_micro_batch", "num_chunks", "group_size", *(() if self.receive_early else ("receive_early",)))
        return tuple((name, getattr(self, name)) for name in names if getattr(self, name) is not None)

    @property
    def order(self) -> str:
        """The schedule and its micro-batches in words: ``1f1b, 4 micro-batches``."""
        recomputed, every = self.recomputed_stages, range(self.num_stages)
        of_some = f" of stage {', '.join(map(str, recomputed))}" if recomputed != tuple(every) else ""
        return f"{self.schedule}{f' with recomputation{of_some}' if recomputed else ''}, {counted(self.num_micro_batch, 'micro-batch')}"


@dataclass(frozen=True, slots=True)
class Edge:
    """What one stage sends to a later one for each micro-batch."""

    source: int  # stage index, as `target`
    target: int
    tensors: tuple[str, ...]  # names of the ops whose outputs are sent
    num_bytes: int  # of one micro-batch of the planned size, forward; the gradients of the float tensors return


@dataclass(frozen=True, slots=True)
class Replica:
    """One complete set of TaskGraphs."""

    index: int  # position; replicas take consecutive rows of the batch in this order
    share: int  # its weight in the rows of the batch
    pipeline: Pipeline
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]  # between its stages, sorted by (source, target)

    @property
    def least_rows(self) -> int:
        """Rows of a micro-batch with which every device that takes rows of its own has one."""
        return max(len(stage.shares) * (stage.split if stage.row_shard is not None else 1) for stage in self.stages)

    @property
    def first_stages(self) -> tuple[Stage, ...]:
        """Per rank of the pipeline, the first stage that it runs."""
        return tuple(self.stages[self.pipeline.stages_of(rank)[0]] for rank in range(self.pipeline.num_ranks))

    def is_local(self, edge: Edge) -> bool:
        """Whether both stages of an edge run on one virtual device, so that the schedule has no SEND or RECV."""
        return self.pipeline.stage_rank[edge.source] == self.pipeline.stage_rank[edge.target]


def devices_of(replicas: Iterable[Replica]) -> tuple[str, ...]:
    """The devices in use, replica by replica and virtual device by virtual device: the ranks of a plan."""
    return tuple(device for replica in replicas for stage in replica.first_stages for device in stage.virtual_device.devices)


def describe_shape(replicas: Sequence[Replica]) -> str:
    """Replicas and stages: ``2 replicas x 4 stages``, or ``3 replicas of 2, 1, 1 stages``."""
    counts = [replica.pipeline.num_stages for replica in replicas]
    if len(set(counts)) == 1:
        return f"{counted(len(counts), 'replica')} x {counted(counts[0], 'stage')}"
    return f"{counted(len(counts), 'replica')} of {each_counted(counts, 'stage')}"


def describe_degrees(replicas: Sequence[Replica]) -> str:
    """World size and degrees of parallelism: ``world size 4 = DP 2 x PP 2 x TP 1``; by replica if they differ.

    DP counts the parts into which the rows are divided, PP the devices (or split groups) that a micro-batch passes, TP the devices of a
    split
    group.
    """
    world = f"world size {len(set(devices_of(replicas)))}"
    found: dict[str, list[int]] = {}
    for replica in replicas:
        found.setdefault(_degrees_text(replica), []).append(replica.index)
    widths = {_widths(stage) for replica in replicas for stage in replica.stages}
    if len(found) == 1 and len(widths) == 1:
        (groups, split), pipeline = widths.pop(), replicas[0].pipeline
        return f"{world} = DP {len(replicas) * groups} x PP {pipeline.num_ranks} x TP {split}"
    return f"{world}: " + "; ".join(f"{listed('replica', members)} = {text}" for text, members in found.items())


def _widths(stage: Stage) -> tuple[int, int]:
    """The parts into which a stage divides its rows, and the devices of a split group."""
    return len(stage.shares), stage.split


def _degrees_text(replica: Replica) -> str:
    widths = [_widths(stage) for stage in replica.stages]
    if len(set(widths)) == 1:
        return f"DP {widths[0][0]} x PP {replica.pipeline.num_ranks} x TP {widths[0][1]}"
    return f"PP {replica.pipeline.num_ranks}, DP x TP of its stages {', '.join(f'{groups} x {split}' for groups, split in widths)}"


def describe_order(replicas: Sequence[Replica]) -> str:
    """The schedules, each once: ``1f1b, 4 micro-batches``, or ``1f1b, 4 micro-batches / gpipe, 2 micro-batches``."""
    return " / ".join(dict.fromkeys(replica.pipeline.order for replica in replicas))


def describe_replica(replica: Replica, micro_batch: tuple[int, int]) -> Iterator[str]:
    """The stages and edges of a replica, with each device's rows of a micro-batch of these rows."""
    for stage in replica.stages:
        yield from _describe_stage(stage, micro_batch)
    for edge in replica.edges:
        yield f"    edge {edge.source} -> {edge.target}: {', '.join(edge.tensors)} ({format_bytes(edge.num_bytes)})"


def _describe_stage(stage: Stage, micro_batch: tuple[int, int]) -> Iterator[str]:
    yield (
        f"    stage {stage.index} [{', '.join(stage.task_graphs)}]: {counted(len(stage.ops), 'op')} "
        f"{stage.ops[0] if stage.ops else '-'} .. {stage.ops[-1] if stage.ops else '-'}, {counted(len(stage.parameters), 'tensor')} held"
    )
    if stage.shards:
        halves = ", in two alternating halves" if stage.overlap else ""
        yield f"      groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
    if stage.offloads:
        yield "      activations are offloaded to the host"
    if stage.recomputed:
        yield f"      recomputes {counted(sum(map(len, stage.recomputed)), 'op')} in {counted(len(stage.recomputed), 'segment')}"
    rows = stage.rows(micro_batch[1] - micro_batch[0])
    for position, device in enumerate(stage.virtual_device.devices):
        line = f"      {device}: {counted(rows[position], 'row')}"
        if stage.estimates:
            e = stage.estimates[position]
            line += (
                f", F {format_seconds(e.forward)}, B {format_seconds(e.backward)}, "
                f"{format_bytes(e.parameter_bytes + e.activation_bytes)} of {format_bytes(e.capacity)}"
            )
        yield line


def members_of(groups: Sequence[int]) -> list[list[int]]:
    """The ranks of each group, by number, from a number per rank."""
    found: dict[int, list[int]] = {}
    for rank, group in enumerate(groups):
        found.setdefault(group, []).append(rank)
    return [found[group] for group in sorted(found)]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Groups of ranks that take some steps on their own; then weights and optimizer state become averages over all groups.

    An outer optimizer may let weights go on from those before the round (`whale.runtime.state.local_steps`).
    """

    groups: tuple[int, ...]  # per rank, the number of its group
    num_steps: int  # of a round
    rate: float = 1.0  # learning rate of the outer optimizer
    momentum: float = 0.0  # its Nesterov momentum

    @property
    def is_average(self) -> bool:
        """Whether weights become the average itself."""
        return self.rate == 1 and not self.momentum

    def __str__(self) -> str:
        how = "" if self.is_average else f", by an outer optimizer at rate {self.rate:g} with Nesterov momentum {self.momentum:g}"
        return f"weights are averaged every {self.num_steps} steps{how}"


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The place of the batch in a tensor dimension: the dimension is ``outer x rows x inner``."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class Plan:
    """The whole decision. Rank numbers are positions in `devices`."""

    model: str  # fingerprint of the ModelGraph it was made for
    cluster: str  # name of the cluster
    devices: tuple[str, ...]  # the devices in use, by rank; replica by replica, stage by stage
    idle_devices: tuple[str, ...]  # the other devices of the cluster
    task_graphs: tuple[TaskGraph, ...]
    replicas: tuple[Replica, ...]  # the outer data parallelism, each with its own pipeline
    batch_axes: tuple[tuple[str, BatchAxis], ...]  # per tensor that crosses stages, the place of its batch; tensors without one are whole
    planned_rows: int  # rows of the global batch that shares and estimates were made for
    step_seconds: float = 0.0  # predicted
    choices: tuple[Choice, ...] = ()  # why
    parameter_states: tuple[ParameterState, ...] = ()  # the forms of parameters and buffers, each named once
    device_models: tuple[str, ...] = ()  # catalogue names of the devices in use (``V100-32GB``), by rank; empty in old plans
    keeper_shares: tuple[int, ...] = ()  # per rank, its weight where state is sharded over owners; empty if all are equal
    half_types: tuple[str, ...] = ()  # per rank, its half-precision dtype; empty where the model's types are those of all devices
    # per rank, a number of the group of ranks, such as those of a host, that keeps a copy of its own of what is sharded over owners;
    # empty where all ranks keep one together
    keeper_groups: tuple[int, ...] = ()
    rounds: Rounds | None = None  # of groups of ranks that step on their own; None where gradients are summed over all ranks in each step

    @property
    def sync_groups(self) -> tuple[int, ...]:
        """Per rank, the number of the group that sums gradients in each step; empty where all do."""
        return () if self.rounds is None else self.rounds.groups

    def is_alike(self, stage: Stage) -> bool:
        """Whether the devices of each split group of a stage are of one model, so that from equal values they compute equal bits."""
        names, models = stage.virtual_device.devices, dict(zip(self.devices, self.device_models, strict=False))
        groups = (names[start : start + stage.split] for start in range(0, len(names), stage.split))
        return all(len({models.get(name) for name in own}) == 1 for own in groups)

    def type_on(self, rank: int, dtype: str) -> str:
        """The dtype that a rank has where the model's graph has `dtype`."""
        return self.half_types[rank] if dtype == HALF and self.half_types else dtype

    def are_unlike(self, ranks: Iterable[int]) -> bool:
        """Whether some of these ranks have another half-precision dtype than others: what they exchange in it is in float32."""
        return bool(self.half_types) and len({self.half_types[rank] for rank in ranks}) > 1

    @cached_property
    def rank_of(self) -> dict[str, int]:
        return {device: rank for rank, device in enumerate(self.devices)}

    @cached_property
    def sync_members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each sync group, ascending; one group of all where there are none."""
        return tuple(map(tuple, members_of(self.sync_groups or (0,) * len(self.devices))))

    def together(self, rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those of some ranks, a rank among them, that sum gradients with it in each step."""
        if not self.sync_groups:
            return tuple(ranks)
        return tuple(other for other in ranks if self.sync_groups[other] == self.sync_groups[rank])

    @cached_property
    def sync_numbers(self) -> tuple[int, ...]:
        """Per rank, the number of its sync group among `sync_members`."""
        found = {rank: number for number, ranks in enumerate(self.sync_members) for rank in ranks}
        return tuple(found[rank] for rank in range(len(self.devices)))

    def sync_group_of(self, replica: int) -> int:
        """The number of a replica's sync group among `sync_members`."""
        return self.sync_numbers[self.rank_of[self.replicas[replica].first_stages[0].virtual_device.devices[0]]]

    def sync_rows(self, num_rows: int) -> tuple[int, ...]:
        """Rows of a global batch that each sync group takes."""
        found = [0] * len(self.sync_members)
        for replica, (start, stop) in enumerate(self.replica_rows(num_rows)):
            found[self.sync_group_of(replica)] += stop - start
        return tuple(found)

    def state_of(self, name: str) -> ParameterState:
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
        return tuple(replica.pipeline for replica in self.replicas)

    @property
    def is_sharded(self) -> bool:
        """Whether some stage divides tensors over its devices, so that what a device holds depends on the axes of the model."""
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
        """The rows of each replica: by shares, but enough for all its devices if they suffice. Raises ValueError: too few for
        micro-batches.
        """
        shares, wanted = [replica.share for replica in self.replicas], self._rows_of_all
        least = wanted if num_rows >= sum(wanted) else [pipeline.num_micro_batch for pipeline in self.pipelines]
        return intervals(divide(num_rows, shares, least))

    @cached_property
    def _rows_of_all(self) -> tuple[int, ...]:
        """Per replica, the rows with which each of its devices has one of each micro-batch."""
        return tuple(replica.pipeline.num_micro_batch * replica.least_rows for replica in self.replicas)

    def micro_batch_rows(self, replica: int, num_rows: int) -> tuple[tuple[int, int], ...]:
        """The intervals of the global batch's rows of a replica's micro-batches."""
        return self._cut(replica, *self.replica_rows(num_rows)[replica])

    def all_micro_batch_rows(self, num_rows: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """`micro_batch_rows` of every replica."""
        return tuple(self._cut(replica, start, stop) for replica, (start, stop) in enumerate(self.replica_rows(num_rows)))

    def _cut(self, replica: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        count = self.replicas[replica].pipeline.num_micro_batch
        return intervals(divide_evenly(stop - start, count), start) if count else ()

    def with_micro_batches_for(self, num_rows: int) -> Plan:
        """The plan with no more micro-batches than a batch of this size has rows for on every device, but at least one."""
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

    def fitting(self, num_rows: int) -> Plan:
        """The plan for a batch of this size: with fewer micro-batches, and then fewer replicas, where it has too few rows for all."""
        return self.with_micro_batches_for(num_rows).with_idle_replicas_for(num_rows)

    @property
    def gathers_weights(self) -> bool:
        """Whether ranks gather weights, bucket by bucket, while they compute."""
        return any(state.is_gathered for state in self.parameter_states)

    @property
    def has_idle_replicas(self) -> bool:
        """Whether some replica has no part in a batch (`with_idle_replicas_for`)."""
        return not all(pipeline.num_micro_batch for pipeline in self.pipelines)

    def with_idle_replicas_for(self, num_rows: int) -> Plan:
        """The plan, if a batch has fewer rows than all replicas need, with only as many of the first as it has rows for.

        The others have no share and no micro-batch. Unchanged if the first needs more rows, or if weights are gathered in each pass: then
        all replicas take part in it.
        """
        needed = list(accumulate(replica.least_rows for replica in self.replicas))
        count = bisect_right(needed, num_rows)
        if count in (0, len(needed)) or self.gathers_weights:
            return self
        replicas = tuple(
            replace(
                replica,
                share=replica.share if index < count else 0,
                pipeline=replace(replica.pipeline, num_micro_batch=1 if index < count else 0),
            )
            for index, replica in enumerate(self.replicas)
        )
        return replace(self, replicas=replicas)

    def _describe_states(self) -> Iterator[str]:
        """Forms that are sharded over owners or on hosts, who keeps copies of the former, and dtypes of gradients."""
        found: dict[Form, dict[str, None]] = {}
        for name, form in (each for state in self.parameter_states for each in state.forms):
            if not form.is_plain:
                found.setdefault(form, {})[name] = None
        yield from (f"  {' and '.join(names)} form: {form}" for form, names in found.items())
        if self.keeper_groups:
            yield f"  what is sharded over owners has {self._describe_groups(self.keeper_groups, 'copies')}"
        if sparse := [name for state in self.parameter_states if state.gradient and state.gradient.is_sparse for name in state.parameters]:
            yield f"  sparse gradients: {first_few(sparse)}"
        for own in dict.fromkeys(state.gradient.dtype for state in self.parameter_states if state.casts_gradient and state.gradient):
            yield f"  gradients are accumulated in {own}"
        for dtype, feeds_back in dict.fromkeys((state.sum_dtype, state.feeds_back) for state in self.parameter_states):
            if dtype is not None:
                yield f"  gradients are summed in {dtype}" + (", with error feedback" if feeds_back else "")

    def describe_sync(self) -> str:
        """``weights are averaged every 32 steps; 2 groups that step on their own: big/0, big/1; small/0, small/1``; "" without rounds."""
        return "" if self.rounds is None else f"{self.rounds}; {self._describe_groups(self.sync_groups, 'groups that step on their own')}"

    def _describe_groups(self, groups: Sequence[int], what: str) -> str:
        members = [[self.devices[rank] for rank in ranks] for ranks in members_of(groups[: len(self.devices)])]
        return f"{len(members)} {what}: {first_few([*map(first_few, members)], separator='; ')}"

    def describe_half_types(self) -> str:
        """``bfloat16 on A100-80GB; float16 on V100-32GB and T4``."""
        models: dict[str, dict[str, None]] = {}
        for dtype, model in zip(self.half_types, self.device_models, strict=True):
            models.setdefault(dtype, {})[model] = None
        return "; ".join(f"{dtype} on {', '.join(own)}" for dtype, own in models.items())

    def __str__(self) -> str:
        lines = [
            f"plan: {describe_shape(self.replicas)} on {self.where}",
            f"  {describe_degrees(self.replicas)}",
            f"  {describe_order(self.replicas)}, {counted(self.planned_rows, 'row')}",
            f"  predicted: {format_seconds(self.step_seconds)} per step",
            "  of each device: rows, forward (F) and backward (B) per micro-batch, memory",
        ]
        are_equal = len(set(self.pipelines)) == 1
        for replica, micro_batches in zip(self.replicas, self.all_micro_batch_rows(self.planned_rows), strict=True):
            start, stop = micro_batches[0][0], micro_batches[-1][1]
            shape = "" if are_equal else f", {counted(replica.pipeline.num_stages, 'stage')}, {replica.pipeline.order}"
            lines.append(f"  replica {replica.index}: rows {start}:{stop}{shape}")
            lines += describe_replica(replica, micro_batches[0])
        if self.half_types:
            lines.append(f"  half precision: {self.describe_half_types()}")
        lines += self._describe_states()
        if self.sync_groups:
            lines.append(f"  {self.describe_sync()}")
        if self.idle_devices:
            lines.append(f"  idle: {', '.join(self.idle_devices)}")
        return "\n".join(lines)
