"""The device that delays the step, and why, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from whale.estimate import DeviceEstimate, StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Stage
from whale.ir.schedule import RECEIVES, Kind
from whale.ir.timeline import DeviceTimeline
from whale.report.drawing import Track
from whale.units import format_seconds, format_share

_NEARLY = 0.05  # shares closer than this are called equal
MOST_WAITS = 3  # the longest waits of a measured device that are named
_WORDS = {
    Kind.FORWARD: "forward passes",
    Kind.RECOMPUTE: "recomputation",
    Kind.BACKWARD: "backward passes",
    Kind.BACKWARD_INPUT: "the input part of backward passes",
    Kind.BACKWARD_WEIGHT: "their weight part",
    Kind.STEP: "the optimizer",
}


def straggler_words(plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate, tracks: Sequence[Track]) -> Iterator[str]:
    """Sentences about the device that computes longest: measured before predicted."""
    slow = step.straggler
    found = tuple(_measured(step, tracks))
    yield from found
    share = slow.busy / step.step_seconds if step.step_seconds else 0.0
    who = f"{slow.name} ({cluster.by_name[slow.devices[0]].model}, stage {', '.join(map(str, slow.stages))})"
    idle = format_seconds(step.idle(slow))
    waits = f"{slow.does('waits')} {format_seconds(slow.exposed)} for communication and {idle} for other devices"
    prefix = "Predicted: " if found else ""
    yield f"{prefix}{who} {slow.does('computes')} longest: {format_seconds(slow.busy)}, {format_share(share)} of the step, and {waits}."
    yield f"Its time goes to {_where_it_goes(slow)}."
    yield from _why(plan, graph, cluster, step)
    for choice in plan.choices:
        if choice.pass_name == "balance" and choice.bound and len(plan.replicas) > 1:
            yield f"The {choice.subject} are {choice.decision}, bound by {choice.bound}."


def _where_it_goes(slow: DeviceEstimate) -> str:
    seconds: dict[Kind, float] = {}
    for span in slow.compute:
        seconds[span.action.kind] = seconds.get(span.action.kind, 0.0) + span.end - span.start
    return ", ".join(f"{words} ({format_seconds(seconds[kind])})" for kind, words in _WORDS.items() if seconds.get(kind))


def _why(plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate) -> Iterator[str]:
    """Time is work / speed: which of the two differs from that of the mean device."""
    slow, num_devices = step.straggler, len(plan.devices)
    mean = sum(each.busy * len(each.devices) for each in step.devices) / num_devices
    if mean == 0 or slow.busy < (1 + _NEARLY) * mean:
        yield "All devices compute about equally long: the rest is waiting, not imbalance."
        if slow.exposed_sync > _NEARLY * step.step_seconds:
            yield f"Of the waiting, {format_seconds(slow.exposed_sync)} is gradient synchronisation that no computation hides."
        return
    work = _work(plan, graph, step)
    if not sum(work.values()):
        return
    ratio = slow.busy / mean
    more = work[slow.devices[0]] * num_devices / sum(work.values())
    does = f"it has {more:.2f} times the mean work at {more / ratio:.2f} times the mean speed"
    yield f"That is {ratio:.2f} times the mean of all devices: {does}."
    if more / ratio < 1 - _NEARLY:
        models = dict.fromkeys(cluster.by_name[name].model for name in plan.devices)
        own = cluster.by_name[slow.devices[0]].model
        others = [model for model in models if model != own]
        yield (
            f"It is of the slower device type, {own} (the others: {', '.join(others)})."
            if others
            else "Its work runs slower than that of the others."
        )
    if more > 1 + _NEARLY:
        is_written = any(choice.pass_name == "plan" for choice in plan.choices)
        reason = "as the plan is written: another cut, or other rows, would take some of it" if is_written else "for the reasons at the end"
        yield f"It has the larger part of the work, {reason}."


def _work(plan: Plan, graph: ModelGraph, step: StepEstimate) -> dict[str, float]:
    """FLOPs of each device in a step, with recomputation; a split stage's are divided as its first shard is."""
    found = dict.fromkeys(plan.devices, 0.0)
    known: dict[tuple[object, ...], float] = {}
    for replica, micro_batches in zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True):
        pieces = Counter(stop - start for start, stop in micro_batches)
        for stage in replica.stages:
            repeated = _repeated(step.of(stage.virtual_device.devices[0]), stage.index) / replica.pipeline.num_micro_batch
            key = stage.ops, stage.program, repeated
            if key not in known:
                known[key] = _flops(graph, stage, repeated)
            sizes = stage.shards[0].sizes if stage.shards else (1,) * stage.split
            for num_rows, count in pieces.items():
                for position, (device, own) in enumerate(zip(stage.virtual_device.devices, stage.rows(num_rows), strict=True)):
                    found[device] += known[key] * count * own * sizes[position % stage.split] / sum(sizes)
    return found


def _repeated(device: DeviceEstimate, stage: int) -> int:
    """For how many micro-batches a device runs the forward pass of a whole stage again."""
    return sum(span.action.kind is Kind.RECOMPUTE and span.action.stage == stage for span in device.compute)


def _flops(graph: ModelGraph, stage: Stage, repeated: float) -> float:
    """FLOPs per row of a stage: its passes, recomputed segments, and the `repeated` share of its forward pass."""
    ops = [graph.by_name[name] for name in stage.ops]
    again = sum(graph.by_name[name].forward_flops for segment in stage.recomputed for name in segment)
    return (sum(op.backward_flops + (1 + repeated) * op.forward_flops for op in ops) + again) / graph.num_rows


def _measured(step: StepEstimate, tracks: Sequence[Track]) -> Iterator[str]:
    """The measured straggler, if there is one."""
    if not any(track.measured for track in tracks):
        return
    slow = max(tracks, key=lambda track: track.slowest)
    assert slow.measured is not None
    predicted = slow.estimate.busy
    times = f", {slow.slowest / predicted:.2f} times the {format_seconds(predicted)} predicted" if predicted else ""
    same = "as predicted" if slow.estimate is step.straggler else f"and not {step.straggler.devices[0]} as predicted"
    yield f"Measured: {slow.measured.device} computes longest, {same}: {format_seconds(slow.slowest)}{times}."
    yield _measured_waits(slow.measured)
    ratios = [each / track.estimate.busy for track in tracks for each in track.measured_busy if track.estimate.busy]
    if len(ratios) > 1 and predicted:
        yield f"The mean device computed {sum(ratios) / len(ratios):.2f} times as long as predicted."


def _measured_waits(timeline: DeviceTimeline) -> str:
    """The waits of a device, the longest first."""
    seconds: dict[str, float] = {}
    for name, start, end in (
        *(("messages", span.start, span.end) for span in timeline.actions if span.action.kind in RECEIVES),
        *((wait.name, wait.start, wait.end) for wait in timeline.waits),
    ):
        seconds[name] = seconds.get(name, 0.0) + end - start
    longest = sorted((name for name in seconds if seconds[name] > 0), key=lambda name: -seconds[name])[:MOST_WAITS]
    if not longest:
        return "It waited for nothing."
    return f"It waited {', '.join(f'{format_seconds(seconds[name])} for {name}' for name in longest)}."
