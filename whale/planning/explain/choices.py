"""The choices of the planner with cost, bound and runner-up, for `whale plan --explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from whale.estimate import StepEstimate
from whale.ir.division import divide_evenly
from whale.ir.plan import Choice, Pipeline, Plan, Replica, Stage, describe_shards
from whale.planning.annotations.taskgraphs import Annotations
from whale.planning.pipeline.placement import SEARCHED
from whale.planning.pipeline.scheduling import explain_schedule
from whale.planning.replicas.group_size import ChosenPlacement
from whale.planning.replicas.replica import ReplicaModel
from whale.planning.replicas.solve import PricedPlacement, Solver
from whale.planning.shard.overlapping import explain_overlap
from whale.planning.shard.sharding import StageSharding
from whale.planning.shard.stage_price import make_scene
from whale.sharding.bridges import GATHERED, Bridge, bridge_bytes
from whale.units import counted, each_counted, format_bytes, format_seconds


def other_stages(asked: int | None, plan: Plan) -> str:
    """What to say of a plan that has not the stages that are set; "" where it has, or none are set."""
    made = {len(replica.stages) // replica.pipeline.num_chunks for replica in plan.replicas}
    if asked is None or asked in made:
        return ""
    return (
        f"pipeline.num_stages is {asked}, but the plan has {', '.join(map(str, sorted(made)))}: "
        "stages share devices where there are fewer, and a given plan keeps its own"
    )


_CLOSED_FORM = "a closed form without sums of gradients and the optimizer"


def explain_choices(annotations: Annotations | None, chosen: ChosenPlacement, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """The choices of all passes, in order."""
    best = chosen.best
    yield from _schedules(best)
    if chosen.group is not None:
        yield chosen.group
    yield _placement(best, chosen.others)
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
    yield from explain_bridges(chosen.solver, best, replicas)
    yield from explain_overlap([model.overlappings for model in best.replicas])
    if len(replicas) > 1:  # one takes all
        yield _rows(best)
    for replica in replicas:
        if any(len(stage.shares) > 1 and stage.estimates for stage in replica.stages):  # of joined replicas, joining tells
            yield _inner_rows(replica)
    yield from explain_recompute(chosen.solver, best, replicas)


def explain_half_types(plan: Plan) -> Choice:
    """Which half-precision type each device type has, and what is sent between unlike ones."""
    is_mixed = plan.are_unlike(range(len(plan.devices)))
    return Choice(
        "precision",
        "half precision",
        plan.describe_half_types(),
        cost="between them a message is in its sender's type; sums, and what several read, are in float32" if is_mixed else "",
        bound="bfloat16 where a device has it",
    )


def _schedules(best: PricedPlacement) -> Iterator[Choice]:
    """One choice per distinct pipeline, with its replicas if there are several."""
    found: dict[Pipeline, list[int]] = {}
    for index, model in enumerate(best.replicas):
        found.setdefault(model.pipeline.pipeline, []).append(index)
    for members in found.values():
        choice = explain_schedule(best.replicas[members[0]].pipeline)
        copies = f" of replica {', '.join(map(str, members))}" if len(found) > 1 else ""
        yield replace(choice, subject=choice.subject + copies)


def _placement(best: PricedPlacement, others: Mapping[str, str]) -> Choice:
    counts = [model.pipeline.num_devices for model in best.replicas]
    used, sizes = sum(counts), each_counted(counts if len(set(counts)) > 1 else counts[:1], "device")
    return Choice(
        "placement",
        "devices of the stages",
        f"{counted(len(best.replicas), 'replica')} of {sizes}, {best.placement.rule}",
        cost=f"ranked at {format_seconds(best.step_seconds)} per step, by a closed form without overlap of gradient sums" if others else "",
        bound=f"{used} of {used + len(best.placement.idle)} devices",
        runner_up="; ".join(f"{rule}: {price}" for rule, price in others.items()),
    )


def _idle(best: PricedPlacement) -> Choice:
    counts = {model.pipeline.num_devices for model in best.replicas}
    why = f"a replica takes {counted(counts.pop(), 'device')}" if len(counts) == 1 else "the blocks of replicas leave them out"
    return Choice(
        "placement",
        "idle devices",
        ", ".join(best.placement.idle),
        cost=f"{counted(len(best.placement.idle), 'device')} without work",
        bound="the search found no better plan with them" if best.placement.rule == SEARCHED else why,
    )


def _cuts(best: PricedPlacement) -> Iterator[Choice]:
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


def _rows(best: PricedPlacement) -> Choice:
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


def explain_sharding(best: PricedPlacement, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """One choice per split stage, equally cut replicas together."""
    found: dict[tuple[int, StageSharding], list[int]] = {}
    for index, model in enumerate(best.replicas):
        for stage, sharding in enumerate(model.shardings):
            if sharding is not None:
                found.setdefault((stage, sharding), []).append(index)
    for (stage, sharding), members in found.items():
        copies = f" of replica {', '.join(map(str, members))}" if len(members) < len(replicas) else ""
        yield Choice(
            "sharding",
            f"axes of stage {stage}{copies}",
            describe_shards(replicas[members[0]].stages[stage].shards),
            cost=f"{format_seconds(sharding.seconds)} per micro-batch, {_memory(replicas[members[0]], stage)}",
            bound=_bound(sharding),
            runner_up=f"nothing cut: {format_seconds(sharding.whole_seconds)}",
        )


def _bound(sharding: StageSharding) -> str:
    text = "memory" if sharding.bound_by_memory else "time of the slowest device and of its reductions"
    return text + (f"; the search ended within {sharding.gap:.1%} of the optimum" if sharding.gap > 0 else "")


def _memory(replica: Replica, stage: int) -> str:
    """Peak bytes at each position of a split group."""
    own = replica.stages[stage]
    held = [max(e.parameter_bytes + e.activation_bytes for e in own.estimates[position :: own.split]) for position in range(own.split)]
    texts = list(dict.fromkeys(format_bytes(num_bytes) for num_bytes in held))
    return f"{' | '.join(texts)} per device"


Bytes = tuple[int, int]
"""Per micro-batch, forward and backward, on the device that receives most."""


def explain_bridges(solver: Solver, best: PricedPlacement, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """A choice per group of equal bridges of each split stage, and one for the stage; equal replicas once."""
    are_alike = len({replica.pipeline for replica in replicas}) == 1
    seen: dict[object, None] = {}
    for replica, model in zip(replicas, best.replicas, strict=True):
        for stage in replica.stages:
            key = replica.pipeline, stage.index, stage.shards, stage.shares
            if stage.shards and key not in seen:
                seen[key] = None
                name = f"stage {stage.index}" + ("" if are_alike else f" of replica {replica.index}")
                yield from (replace(choice, subject=f"{name}: {choice.subject}") for choice in _bridges_of(solver, model, stage))


def _bridges_of(solver: Solver, model: ReplicaModel, stage: Stage) -> Iterator[Choice]:
    prices = solver.prices
    scene = make_scene(prices, model.assignment, stage.index, model.pipeline)
    bridges = prices.bridges(stage.ops, stage.shards, scene.returned)

    def received(bridge: Bridge) -> Bytes:
        rows = max(stage.shares)
        return max(bridge_bytes(bridge, prices.graph, prices.axes, stage.shards, rows), key=sum)

    found = {bridge: received(bridge) for bridge in bridges}
    alike: dict[tuple[object, ...], list[Bridge]] = {}
    for bridge, moved in found.items():
        alike.setdefault((_text(bridge), _without_numbers(prices.graph.by_name[bridge.tensor].target), moved), []).append(bridge)
    for (text, target, _), own in alike.items():
        count = f"{len(own)} x " if len(own) > 1 else ""
        forward = "all-gather" if own[0].combine in GATHERED else own[0].forward
        cost = _moved(forward, own[0].backward, found[own[0]])
        yield Choice("bridges", f"{count}%{own[0].tensor} ({target})", str(text), cost=cost)
    if bridges:
        total = f"{format_bytes(sum(map(sum, found.values())))} per device and micro-batch"
        yield Choice("bridges", f"all {len(bridges)}", "each form once for all its users, in one step", cost=total)


def _text(bridge: Bridge) -> str:
    """The forms, with layer numbers replaced."""
    source = "sum" if bridge.is_sum else _form(bridge.source)
    return f"{source} -> {_form(bridge.target)}{' by parts' if bridge.entered else ''}"


def _form(axis: str | None) -> str:
    return f"cut {_without_numbers(axis)}" if axis else "whole"


def _without_numbers(name: str) -> str:
    """A dotted name with layer numbers replaced."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _moved(forward: str, backward: str, moved: Bytes) -> str:
    there = f"{forward} {format_bytes(moved[0])}" if forward else "nothing"
    back = f"{backward} {format_bytes(moved[1])}" if backward else "nothing"
    return f"forward {there}, backward {back}"


def explain_recompute(solver: Solver, best: PricedPlacement, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """A choice per stage that recomputes, equal replicas together; nothing without recomputation."""
    seen: dict[tuple[int, object], list[int]] = {}
    for index, model in enumerate(best.replicas):
        for stage, recompute in enumerate(model.recomputes):
            if recompute.segments or recompute.num_alive:
                seen.setdefault((stage, (recompute, replicas[index].stages[stage].shares)), []).append(index)
    for (stage, _), members in seen.items():
        yield _recomputed(solver, best, replicas, stage, members)
    if not seen and solver.policy.kind == "auto":
        yield Choice("recompute", "activations", "nothing recomputed", bound="everything fits in memory")
    if not seen and solver.policy.kind == "modules":
        yield Choice("recompute", "activations", "nothing recomputed", bound="modules of these names have no run of ops that may be")


def _recomputed(solver: Solver, best: PricedPlacement, replicas: Sequence[Replica], stage: int, members: list[int]) -> Choice:
    model = best.replicas[members[0]]
    planned, recompute, part = replicas[members[0]].stages[stage], model.recomputes[stage], model.assignment.parts[stage]
    costs, rows = model.costs[stage], planned.shares
    prices = [solver.prices.local(part.ops, planned.shards, p) if planned.shards else solver.prices for p in range(planned.split)]
    seconds = max(
        prices[position].recomputing(part, recompute, solver.prices.cluster.by_name[name], max(1.0, share)).device.at(share)
        for group, share in zip(planned.groups, rows, strict=True)
        for position, name in enumerate(group)
    )
    num_rows = max(rows)
    without = prices[0].part(part, num_rows, budget=solver.pricing.budget)
    in_flight = model.pipeline.in_flight[stage]
    kept, instead = (round(each.activation.at(num_rows) * in_flight + each.working.at(num_rows)) for each in (costs[0].part, without))
    if recompute.num_alive:
        decision = f"all {len(part.ops)} ops, by R actions"
    else:
        decision = f"{sum(map(len, recompute.segments))} of {len(part.ops)} ops, in {counted(len(recompute.segments), 'segment')}"
    device = planned.virtual_device.devices[0]
    memory = solver.prices.costs.capacity(solver.prices.cluster.by_name[device])
    is_asked = solver.policy.kind != "auto"
    return Choice(
        "recompute",
        f"stage {stage} of replica {', '.join(str(index) for index in members)}",
        decision,
        cost=f"{format_seconds(seconds)} more backward per micro-batch",
        bound="the configuration" if is_asked else f"memory of {device} ({format_bytes(memory)})",
        runner_up=f"nothing recomputed: {format_bytes(instead)} of activations instead of {format_bytes(kept)}",
    )


def explain_step(step: StepEstimate) -> Iterator[Choice]:
    """Where the time of a step goes, what fills the fullest memory, and the cost of gradient sums."""
    slow, full = step.straggler, max(step.devices, key=lambda each: each.peak.total / each.capacity)
    yield Choice(
        "estimate",
        "step",
        format_seconds(step.step_seconds),
        cost=f"{slow.name} {slow.does('computes')} {format_seconds(slow.busy)}, {slow.does('waits')} {format_seconds(slow.exposed)} "
        f"for communication and {format_seconds(step.idle(slow))} for other devices; bubble rate {step.bubble_rate:.3f}{step.beside}",
        bound=f"time of {slow.name}",
    )
    yield Choice(
        "estimate",
        "peak memory",
        f"{format_bytes(round(full.peak.total))} of {format_bytes(full.capacity)} on {full.name}",
        cost=str(full.peak),
        bound="the fullest device",
    )
    sums, given = ([sync for sync in slow.syncs if sync.what == what] for what in ("gradients", "weights"))
    if sums:
        yield Choice(
            "estimate",
            "gradient synchronisation",
            f"{counted(len(sums), 'bucket')}, all-reduced by owner sets, on {slow.name}",
            cost=f"{format_seconds(slow.syncing)} for {format_bytes(round(sum(sync.num_bytes for sync in sums)))}, "
            f"{format_seconds(slow.exposed_sync)} exposed; optimizer {format_seconds(slow.optimizer)}",
            bound="the slowest link of a ring",
        )
    if given or slow.num_given:
        waited = sum(wait.end - wait.start for wait in slow.waits)
        before = f", {slow.num_given} before the step ends" if slow.num_given else ""
        yield Choice(
            "estimate",
            "publishing",
            f"{counted(len(given), 'bucket')} of updated weights sent during the next forward passes{before}, on {slow.name}",
            cost=f"passes wait {format_seconds(waited)} for {format_bytes(round(sum(sync.num_bytes for sync in given)))}",
            bound="before the step ends: parameters that replicas hold in different pieces, or all with communication.defer_weights: false"
            if slow.num_given
            else "the slowest link of a ring",
        )
