"""The bridges of every split stage for `whale explain`: which tensor changes its form, what moves, and what sharing saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from whale.ir.plan import Choice, Replica, Stage
from whale.planning.replicas.replica import ReplicaModel
from whale.planning.replicas.solve import Solution, Solver
from whale.planning.shard.stage_price import make_scene
from whale.sharding.bridge_bytes import GATHERED, bridge_bytes
from whale.sharding.bridges import Bridge
from whale.units import format_bytes

Bytes = tuple[int, int]
"""Received by the device that receives most, per micro-batch, forward and backward."""


def explain_bridges(solver: Solver, best: Solution, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """A choice per bridge of each split stage, alike ones together, and one for the stage; equal replicas once, others by number."""
    are_alike = len({replica.pipeline for replica in replicas}) == 1
    seen: dict[object, None] = {}
    for replica, model in zip(replicas, best.replicas, strict=True):
        for stage in replica.stages:
            key = replica.pipeline, stage.index, stage.shards, stage.shares
            if stage.shards and key not in seen:
                seen[key] = None
                name = f"stage {stage.index}" + ("" if are_alike else f" of replica {replica.index}")
                yield from (replace(choice, subject=f"{name}: {choice.subject}") for choice in _stage(solver, model, stage))


def _stage(solver: Solver, model: ReplicaModel, stage: Stage) -> Iterator[Choice]:
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
        yield _together(bridges, found, received)


def _together(bridges: Sequence[Bridge], found: dict[Bridge, Bytes], received: Callable[[Bridge], Bytes]) -> Choice:
    alone = sum(sum(found[bridge]) * max(1, len(bridge.users)) for bridge in bridges)
    fused = sum(map(sum, found.values()))
    steps = sum(sum(map(sum, map(received, _in_two_steps(bridge)))) for bridge in bridges)
    return Choice(
        "bridges",
        f"all {len(bridges)}",
        "each form once for all its users, in one step",
        cost=f"{format_bytes(fused)} per device and micro-batch",
        runner_up="; ".join(
            f"{text}: {format_bytes(num_bytes)}"
            for text, num_bytes in (("one for each user", alone), ("through whole tensors", steps))
            if num_bytes != fused
        ),
    )


def _in_two_steps(bridge: Bridge) -> Iterator[Bridge]:
    """The same with whole tensors in between: gather and take a part, sum and take a part, gather and sum gradients."""
    if (bridge.is_sum and bridge.target) or (bridge.source and bridge.target):
        yield replace(bridge, target=None)
        yield Bridge(bridge.tensor, None, bridge.target, has_gradient=bridge.has_gradient)
    elif bridge.source and bridge.entered:
        yield replace(bridge, entered=False)
        yield Bridge(bridge.tensor, None, None, entered=True, has_gradient=bridge.has_gradient)
    else:
        yield bridge


def _text(bridge: Bridge) -> str:
    """The forms, with axes of numbered layers alike."""
    source = "sum" if bridge.is_sum else _form(bridge.source)
    return f"{source} -> {_form(bridge.target)}{' by parts' if bridge.entered else ''}"


def _form(axis: str | None) -> str:
    return f"cut {_without_numbers(axis)}" if axis else "whole"


def _without_numbers(name: str) -> str:
    """A dotted name with the numbers of layers alike."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _moved(forward: str, backward: str, moved: Bytes) -> str:
    there = f"{forward} {format_bytes(moved[0])}" if forward else "nothing"
    back = f"{backward} {format_bytes(moved[1])}" if backward else "nothing"
    return f"forward {there}, backward {back}"
