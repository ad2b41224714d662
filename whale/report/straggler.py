"""Who holds up the step, and why, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from whale.estimate import DeviceEstimate, StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Kind
from whale.report.tracks import Track
from whale.units import format_seconds

_NEARLY = 0.05
"""Shares closer than this are called equal."""
_WORDS = {
    Kind.FORWARD: "forward passes",
    Kind.RECOMPUTE: "computing again",
    Kind.BACKWARD: "backward passes",
    Kind.BACKWARD_INPUT: "the input part of backward passes",
    Kind.BACKWARD_WEIGHT: "their weight part",
    Kind.STEP: "the optimizer",
}


def straggler_words(plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate, tracks: Sequence[Track]) -> Iterator[str]:
    """Sentences about the device that computes longest."""
    slow = step.straggler
    share = slow.busy / step.step_seconds if step.step_seconds else 0.0
    who = f"{slow.name} ({cluster.by_name[slow.devices[0]].model}, stage {', '.join(map(str, slow.stages))})"
    waits = f"{format_seconds(slow.exposed)} for what is on its way and {format_seconds(slow.idle(step.step_seconds))} for others"
    yield f"{who} computes longest: {format_seconds(slow.busy)}, {share:.0%} of the step. It waits {waits}."
    yield f"Its time goes to {_where_it_goes(slow)}."
    yield from _why(plan, graph, cluster, step)
    for choice in plan.choices:
        if choice.pass_name == "balance" and choice.bound and len(plan.replicas) > 1:
            yield f"The {choice.subject} are {choice.decision}, bound by {choice.bound}."
    yield from _measured(step, tracks)


def _where_it_goes(slow: DeviceEstimate) -> str:
    seconds: dict[Kind, float] = {}
    for span in slow.compute:
        seconds[span.action.kind] = seconds.get(span.action.kind, 0.0) + span.end - span.start
    return ", ".join(f"{words} ({format_seconds(seconds[kind])})" for kind, words in _WORDS.items() if seconds.get(kind))


def _why(plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate) -> Iterator[str]:
    """Time is work by speed: which of the two is unlike that of the mean device."""
    slow, num_devices = step.straggler, len(plan.devices)
    mean = sum(each.busy * len(each.devices) for each in step.devices) / num_devices
    if mean == 0 or slow.busy < (1 + _NEARLY) * mean:
        yield "All devices compute about equally long: what is left to win lies in waiting, not in balance."
        if slow.exposed_sync > _NEARLY * step.step_seconds:
            yield f"Of the waiting {format_seconds(slow.exposed_sync)} go to sums of gradients that no computation hides."
        return
    work = _work(plan, graph)
    if not sum(work.values()):
        return
    ratio = slow.busy / mean
    more = work[slow.devices[0]] * num_devices / sum(work.values())
    does = f"it does {more:.2f} times the mean's work at {more / ratio:.2f} times its speed"
    yield f"That is {ratio:.2f} times the mean of all devices: {does}."
    if more / ratio < 1 - _NEARLY:
        models = dict.fromkeys(cluster.by_name[name].model for name in plan.devices)
        own = cluster.by_name[slow.devices[0]].model
        others = [model for model in models if model != own]
        yield f"It is the slower kind, {own} beside {', '.join(others)}." if others else "What it does runs slower than what others do."
    if more > 1 + _NEARLY:
        yield "It has the larger part of the work: another cut, or other rows, would take some of it."


def _work(plan: Plan, graph: ModelGraph) -> dict[str, float]:
    """FLOPs of each device in a step, recomputation aside; a split stage's are divided as its first shard is."""
    found = dict.fromkeys(plan.devices, 0.0)
    known: dict[tuple[str, ...], float] = {}
    for replica in plan.replicas:
        pieces = Counter(stop - start for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows))
        for stage in replica.stages:
            if stage.ops not in known:
                ops = [graph.by_name[name] for name in stage.ops]
                known[stage.ops] = sum(op.forward_flops + op.backward_flops for op in ops) / graph.num_rows
            sizes = stage.shards[0].sizes if stage.shards else (1,) * stage.split
            for num_rows, count in pieces.items():
                for position, (device, own) in enumerate(zip(stage.virtual_device.devices, stage.rows(num_rows), strict=True)):
                    found[device] += known[stage.ops] * count * own * sizes[position % stage.split] / sum(sizes)
    return found


def _measured(step: StepEstimate, tracks: Sequence[Track]) -> Iterator[str]:
    """The measured straggler, where there is one."""
    if not any(track.measured for track in tracks):
        return
    slow = max(tracks, key=lambda track: track.slowest)
    assert slow.measured is not None
    predicted = slow.estimate.busy
    times = f", {slow.slowest / predicted:.2f} times the {format_seconds(predicted)} that were predicted" if predicted else ""
    same = "too" if slow.estimate is step.straggler else f"and not {step.straggler.devices[0]}"
    yield f"Measured, it is {slow.measured.device} {same}: it computed {format_seconds(slow.slowest)}{times}."
    ratios = [each / track.estimate.busy for track in tracks for each in track.measured_busy if track.estimate.busy]
    if len(ratios) > 1 and predicted:
        yield f"The mean device computed {sum(ratios) / len(ratios):.2f} times as long as was predicted of it."
