"""Schedule, micro-batches and chunks of a pipeline, and from them what each stage holds in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from whale.config import Config
from whale.config.keys import Recomputation
from whale.errors import AnnotationError, ConfigError
from whale.estimate.prices.part import Alive
from whale.ir.plan import Choice, Pipeline
from whale.ir.schedule import Kind, Schedule
from whale.ir.scope import Scope
from whale.planning.annotations.scope_tree import Copies
from whale.planning.annotations.taskgraphs import Annotations, num_chunks
from whale.schedules import BUILDERS, build, count_recomputed, insert_recompute, most_held, placement
from whale.units import counted

_PLAIN = "1f1b"


@dataclass(frozen=True)
class Split:
    """How one stage is split."""

    width: int = 1  # devices of a split group; 1 for none
    scopes: tuple[Scope, ...] = ()  # its `split` scopes
    axes: tuple[str, ...] | None = None  # that a written plan cuts, by (ends of) names; None where it leaves them open
    more_axes: tuple[str, ...] = ()  # that may be cut too


@dataclass(frozen=True, kw_only=True)
class PipelineShape(Pipeline):
    """A pipeline with what planning needs. A rank is one virtual device of a replica."""

    devices: tuple[int, ...]  # per rank, its number of devices
    in_flight: tuple[int, ...]  # per stage, micro-batches whose activations it holds at once
    waiting: tuple[int, ...]  # per stage, of these between I and W; 0 where B computes weight gradients
    copies: Copies  # nesting of the ranks
    recomputed: tuple[int, ...]  # per stage that R actions recompute, its recomputed micro-batches alive at once; else 0
    splits: tuple[Split, ...] = ()  # per stage; empty where no stage is split
    num_asked: int = 1  # ranks in the configuration; there may be fewer devices
    asked: str = ""  # the schedule in the configuration, where memory has decided that what it adds is not needed

    @property
    def pipeline(self) -> Pipeline:
        """The part that the plan states."""
        return Pipeline(*(getattr(self, field.name) for field in fields(Pipeline)))

    @property
    def recomputes_by_itself(self) -> bool:
        """Whether the schedule decides which stages recompute as a whole."""
        return any(self.recomputed) and not self.recomputed_stages

    def recomputing(self, stages: Sequence[int]) -> PipelineShape:
        """The pipeline where exactly these stages recompute as a whole, of those that the schedule recomputes.

        Without any it is 1F1B, of which such orders differ in when they recompute.
        """
        if stages:
            alive = tuple(count if stage in stages else 0 for stage, count in enumerate(self.recomputed))
            return replace(self, recomputed=alive, recomputed_stages=tuple(stages))
        peaks, _ = most_held(_PLAIN, num_ranks=self.num_ranks, num_micro_batch=self.num_micro_batch)
        in_flight = tuple(peaks[rank] for rank in self.stage_rank)
        return replace(self, schedule=_PLAIN, recomputed=(0,) * self.num_stages, in_flight=in_flight, asked=self.schedule)

    @property
    def num_devices(self) -> int:
        """Devices of one model replica."""
        return sum(self.devices)

    def width(self, stage: int) -> int:
        """Devices of a split group; 1 where every device takes rows of its own."""
        return self.splits[stage].width if self.splits else 1

    def alive(self, stage: int) -> Alive:
        return Alive(self.in_flight[stage], self.waiting[stage], self.in_flight[stage] >= self.num_micro_batch)

    def num_groups(self, stage: int) -> int:
        """Number of parts that the rows of a micro-batch are divided into."""
        return self.devices[self.stage_rank[stage]] // self.width(stage)

    @property
    def num_keepers(self) -> int:
        """The least number of devices of a replica that shard the state of a parameter."""
        return min(self.num_groups(stage) for stage in range(len(self.stage_rank)))

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The stages that divide their rows together: those of one rank and one width; without splits, one per rank."""
        found: dict[tuple[int, int], list[int]] = {(rank, self.width(self.stages_of(rank)[0])): [] for rank in range(self.num_ranks)}
        for stage, rank in enumerate(self.stage_rank):
            found.setdefault((rank, self.width(stage)), []).append(stage)
        return tuple(tuple(stages) for stages in found.values())

    @cached_property
    def lane_copies(self) -> Copies:
        """`copies` with lanes instead of ranks."""

        def of(node: Copies) -> Copies:
            members: list[int | Copies] = []
            for member in node.members:
                if isinstance(member, int):
                    members += [lane for lane, stages in enumerate(self.lanes) if self.stage_rank[stages[0]] == member]
                else:
                    members.append(of(member))
            return Copies(node.count, tuple(members))

        return of(self.copies)

    def lane(self, stage: int) -> int:
        return next(index for index, stages in enumerate(self.lanes) if stage in stages)


def shape_pipeline(config: Config, annotations: Annotations | None, num_devices: int, group_size: int | None = None) -> PipelineShape:
    """The pipeline's shape, from the scopes, or else from ``pipeline.num_stages``.

    `group_size`: of interleaving, where the configuration leaves it open; None for the smallest.

    Raises:
        ConfigError: stages, chunks and schedule do not fit together.
        AnnotationError: TaskGraphs of one virtual device ask for different numbers of devices.
    """
    wanted = config.pipeline
    chunks = num_chunks(config)
    if annotations is None:
        num_ranks = _ranks_of_cuts(config, num_devices, chunks)
        devices, copies = (1,) * num_ranks, Copies(1, tuple(range(num_ranks)))
    else:
        num_ranks = _ranks_of_scopes(config, annotations, chunks)
        devices = annotations.sizes[:num_ranks]
        copies = annotations.copies if chunks == 1 else Copies(1, tuple(range(num_ranks)))
    group_size = smallest_group(config, num_ranks) if group_size is None else group_size
    stage_rank = placement(wanted.schedule, num_ranks=num_ranks, num_chunks=wanted.num_chunks)
    splits: tuple[Split, ...] = ()
    if annotations is not None:
        stage_rank = annotations.places if chunks == 1 else stage_rank
        splits = _splits(annotations)
        _check_chunks_alike(annotations, stage_rank, devices)
    numbers = {"num_micro_batch": wanted.num_micro_batch, "num_chunks": wanted.num_chunks}
    peaks, waiting = most_held(wanted.schedule, num_ranks=num_ranks, group_size=group_size, **numbers)
    in_flight = tuple(-(-peaks[rank] // chunks) for rank in stage_rank)
    recomputed, inserted = recomputed_stages(config, stage_rank)
    return PipelineShape(
        wanted.schedule,
        wanted.num_micro_batch,
        stage_rank,
        chunks,
        group_size,
        inserted,
        wanted.receive_early,
        devices=devices,
        in_flight=in_flight,
        waiting=tuple(waiting[rank] for rank in stage_rank),
        copies=copies,
        recomputed=recomputed,
        splits=splits,
        num_asked=num_ranks if annotations is not None else wanted.num_stages or 1,
    )


def _splits(annotations: Annotations) -> tuple[Split, ...]:
    if max(annotations.widths) == 1:
        return ()
    return tuple(Split(width, annotations.split_scopes(stage)) for stage, width in enumerate(annotations.widths))


def smallest_group(config: Config, num_ranks: int) -> int | None:
    """The configured group size, or the smallest that interleaving can use; None for other schedules."""
    if config.pipeline.group_size is not None or not BUILDERS[config.pipeline.schedule].takes_group:
        return config.pipeline.group_size
    return min(num_ranks, config.pipeline.num_micro_batch)


def recomputed_stages(config: Config, stage_rank: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Stages that R actions recompute: those whose policy is ``full``, else what the schedule itself recomputes.

    Args:
        stage_rank: per stage, its virtual device.

    Returns:
        Per stage, its recomputed micro-batches alive at once (0 for none); and the stages that exactly get R actions, empty
        where the schedule decides.
    """
    wanted, num_ranks = config.pipeline, max(stage_rank) + 1
    small = build(wanted.schedule, num_ranks=num_ranks, num_micro_batch=1, num_chunks=wanted.num_chunks)

    def by_stage(order: Schedule) -> tuple[int, ...]:
        found = count_recomputed(order)
        return found if order.num_stages == len(stage_rank) else tuple(found[rank] for rank in stage_rank)  # some share a place

    alive, full = by_stage(small), _full_stages(config.recompute.policy, len(stage_rank))
    if not full or (any(alive) and isinstance(config.recompute.policy, str)):
        return alive, ()
    if any(alive):
        alive = by_stage(insert_recompute(small))
    elif any(action.kind is Kind.BACKWARD_WEIGHT for actions in small.ranks for action in actions):
        order = build(wanted.schedule, num_ranks=num_ranks, num_micro_batch=wanted.num_micro_batch, num_chunks=wanted.num_chunks)
        alive = by_stage(insert_recompute(order))
    else:
        alive = (1,) * len(stage_rank)  # B follows R at once
    return tuple(count if stage in full else 0 for stage, count in enumerate(alive)), full


def _full_stages(policy: Recomputation, num_stages: int) -> tuple[int, ...]:
    if isinstance(policy, str):
        return tuple(range(num_stages)) if policy == "full" else ()
    return tuple(stage for stage, share in policy if share == "full" and isinstance(stage, int) and stage < num_stages)


def _ranks_of_cuts(config: Config, num_devices: int, chunks: int) -> int:
    """Stages of a model that the planner cuts: with fewer devices, consecutive stages share one and are merged."""
    asked = config.pipeline.num_stages or 1
    if chunks > 1 and asked > num_devices:
        raise ConfigError(
            f"pipeline.num_stages: {asked} with schedule {config.pipeline.schedule} needs {asked} devices of {chunks} stages each; "
            f"there are {num_devices}",
            hint=f"pipeline.num_stages: {num_devices}",
        )
    return min(asked, num_devices)


def _ranks_of_scopes(config: Config, annotations: Annotations, chunks: int) -> int:
    num_stages = annotations.num_stages
    if chunks == 1:
        num_stages = len(set(annotations.places))
    elif len(set(annotations.places)) < num_stages:
        raise ConfigError(
            f"colocated TaskGraphs make {num_stages} stages on {counted(len(set(annotations.places)), 'virtual device')}; schedule "
            f"{config.pipeline.schedule} with {chunks} chunks has one stage per chunk",
            where=annotations.scopes[0].where,
            hint="a schedule without chunks, or TaskGraphs on virtual devices of their own",
        )
    listing = ", ".join(annotations.names)
    if num_stages % chunks:
        raise ConfigError(
            f"the scopes make {counted(num_stages, 'stage')} ({listing}); schedule {config.pipeline.schedule} with {chunks} chunks needs a "
            f"multiple of {chunks}",
            where=annotations.scopes[0].where,
            hint="fewer chunks (pipeline.num_chunks), or more TaskGraphs and devices for them",
        )
    num_ranks = num_stages // chunks
    asked = config.pipeline.num_stages
    if asked is not None and asked != num_ranks:
        raise ConfigError(
            f"pipeline.num_stages: {asked} contradicts the scopes, which make a pipeline of {counted(num_ranks, 'virtual device')} "
            f"({listing})",
            where=annotations.scopes[0].where,
            hint="remove the key or the scopes",
        )
    return num_ranks


def _check_chunks_alike(annotations: Annotations, stage_rank: tuple[int, ...], devices: tuple[int, ...]) -> None:
    for stage, rank in enumerate(stage_rank):
        if annotations.devices[stage] != devices[rank]:
            task_graph = annotations.stages.index(stage)
            raise AnnotationError(
                f"stages {rank} and {stage} share a virtual device, but ask for {devices[rank]} and {annotations.devices[stage]} devices",
                where=annotations.scopes[task_graph].where,
            )


def explain_schedule(pipeline: PipelineShape) -> Choice:
    held = ", ".join(str(count) for count in pipeline.in_flight)
    shared = f" ({pipeline.num_asked} stages on {pipeline.num_ranks} devices: consecutive ones are merged)"
    shared = shared if pipeline.num_asked > pipeline.num_ranks else ""
    shared += f"; no stage recomputes as a whole, as under {pipeline.asked}" if pipeline.asked else ""
    other = "gpipe" if pipeline.schedule != "gpipe" else "1f1b"
    runner_up = ""
    if pipeline.num_chunks == 1 and pipeline.num_stages > 1:
        peaks, _ = most_held(other, num_ranks=pipeline.num_ranks, num_micro_batch=pipeline.num_micro_batch)
        runner_up = f"{other} would hold {', '.join(str(count) for count in peaks)}"
    return Choice(
        "scheduling",
        "schedule",
        f"{pipeline.schedule}, {counted(pipeline.num_micro_batch, 'micro-batch')}",
        cost=f"micro-batches in flight per stage: {held}",
        bound=f"pipeline.schedule and num_micro_batch, set, searched or by default{shared}",
        runner_up=runner_up,
    )
