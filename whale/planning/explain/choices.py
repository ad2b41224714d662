"""What the planner decided, with cost, bound and runner-up, for `whale explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from whale.ir.division import divide_evenly
from whale.ir.plan import Choice, Pipeline, Replica
from whale.planning.annotations.taskgraphs import Annotations
from whale.planning.explain.bridges import explain_bridges
from whale.planning.explain.recompute import explain_recompute
from whale.planning.explain.sharding import explain_sharding
from whale.planning.pipeline.placement import SEARCHED
from whale.planning.pipeline.scheduling import explain_schedule
from whale.planning.replicas.group_size import Outcome
from whale.planning.replicas.solve import Solution
from whale.planning.shard.overlapping import explain_overlap
from whale.units import counted, each_counted, format_seconds

_CLOSED_FORM = "a closed form without sums of gradients and the optimizer"
"""By which rows are divided; the estimate has both, and is told by itself."""


def explain_choices(annotations: Annotations | None, found: Outcome, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """The choices of all passes, in order."""
    best = found.best
    yield from _schedules(best)
    if found.group is not None:
        yield found.group
    yield _placement(best, found.others)
    if best.placement.idle:
        yield _idle(best)
    yield from _cuts(best)
    if annotations is not None:
        yield Choice(
            "task graphs",
            "stages",
            "; ".join(f"stage {stage}: {', '.join(annotations.names_of(stage))}" for stage in range(annotations.num_stages)),
            bound="the scopes",
        )
    yield from explain_sharding(best, replicas)
    yield from explain_bridges(found.solver, best, replicas)
    yield from explain_overlap([model.overlappings for model in best.replicas])
    if len(replicas) > 1:  # one takes all
        yield _rows(best)
    for replica in replicas:
        if any(len(stage.shares) > 1 and stage.estimates for stage in replica.stages):  # of joined replicas, joining tells
            yield _inner_rows(replica)
    yield from explain_recompute(found.solver, best, replicas)


def _schedules(best: Solution) -> Iterator[Choice]:
    """One choice per pipeline, with the replicas that have it where they are unlike."""
    found: dict[Pipeline, list[int]] = {}
    for index, model in enumerate(best.replicas):
        found.setdefault(model.pipeline.pipeline, []).append(index)
    for members in found.values():
        choice = explain_schedule(best.replicas[members[0]].pipeline)
        copies = f" of replica {', '.join(map(str, members))}" if len(found) > 1 else ""
        yield replace(choice, subject=choice.subject + copies)


def _placement(best: Solution, others: Mapping[str, str]) -> Choice:
    counts = [model.pipeline.num_devices for model in best.replicas]
    used, sizes = sum(counts), each_counted(counts if len(set(counts)) > 1 else counts[:1], "device")
    return Choice(
        "placement",
        "devices of the stages",
        f"{counted(len(best.replicas), 'replica')} of {sizes}, {best.placement.rule}",
        cost=f"ranked at {format_seconds(best.step_seconds)} per step, by a closed form that hides no sums" if others else "",
        bound=f"{used} of {used + len(best.placement.idle)} devices",
        runner_up="; ".join(f"{rule}: {price}" for rule, price in others.items()),
    )


def _idle(best: Solution) -> Choice:
    counts = {model.pipeline.num_devices for model in best.replicas}
    why = f"a replica takes {counted(counts.pop(), 'device')}" if len(counts) == 1 else "the blocks of replicas leave them out"
    return Choice(
        "placement",
        "idle devices",
        ", ".join(best.placement.idle),
        cost=f"{counted(len(best.placement.idle), 'device')} without work",
        bound="the search found no better plan with them" if best.placement.rule == SEARCHED else why,
    )


def _cuts(best: Solution) -> Iterator[Choice]:
    seen: dict[tuple[int, ...], list[int]] = {}
    for index, partition in enumerate(best.partitions):
        if partition is not None and len(partition.bounds) > 2:
            seen.setdefault(partition.bounds, []).append(index)
    for bounds, members in seen.items():
        partition = best.partitions[members[0]]
        assert partition is not None
        yield Choice(
            "partition",
            f"stages of replica {', '.join(str(index) for index in members)}",
            "ops " + " | ".join(f"{start}:{stop}" for start, stop in pairwise(bounds)),
            cost=f"slowest stage {format_seconds(partition.slowest)} per micro-batch",
            bound="the slowest stage",
            runner_up=f"equally many ops per stage: {format_seconds(partition.even)}",
        )


def _rows(best: Solution) -> Choice:
    times = [float(model.curve.seconds[share]) for model, share in zip(best.replicas, best.rows, strict=True)]
    slowest = max(range(len(times)), key=lambda index: times[index])
    model = best.replicas[slowest]
    names = [device for rank in model.placed for device in rank]
    bound = "memory" if model.curve.most == best.rows[slowest] < sum(best.rows) else "time"
    even = divide_evenly(sum(best.rows), len(best.rows))
    runner_up = ""
    if even != best.rows:
        fits = all(model.curve.most >= share for model, share in zip(best.replicas, even, strict=True))
        seconds = max(float(model.curve.seconds[share]) for model, share in zip(best.replicas, even, strict=True))
        runner_up = f"even {_sizes(even)}: {format_seconds(seconds) + ' by it' if fits else 'does not fit in memory'}"
    return Choice(
        "balance",
        "rows of the replicas",
        _sizes(best.rows),
        cost=f"{format_seconds(times[slowest])} of the slowest, {format_seconds(min(times))} of the fastest, by {_CLOSED_FORM}",
        bound=f"{bound} of replica {slowest} ({names[0]}{', ...' if len(names) > 1 else ''})",
        runner_up=runner_up,
    )


def _inner_rows(replica: Replica) -> Choice:
    wide = [stage for stage in replica.stages if len(stage.shares) > 1]
    times = {
        device: estimate.forward + estimate.backward
        for stage in wide
        for device, estimate in zip(stage.virtual_device.devices, stage.estimates, strict=True)
    }
    slowest = max(times, key=lambda device: times[device])
    return Choice(
        "balance",
        f"rows of a micro-batch in replica {replica.index}",
        "; ".join(f"stage {stage.index}: {_sizes(stage.shares)}" for stage in wide),
        cost=f"slowest device {format_seconds(times[slowest])} per micro-batch",
        bound=slowest,
    )


def _sizes(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1 and len(sizes) > 2:
        return f"{len(sizes)} x {sizes[0]}"
    return ":".join(str(size) for size in sizes)
