"""The tree of a model's modules beside the stages and devices that run them, what they hold and how long they compute.

Modules that follow one another, are numbered, and are built and placed alike stand in one line: ``h.0 .. h.5``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.cli.planned import Planned
from whale.cli.tables import print_table
from whale.estimate import Costs
from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Replica, Stage
from whale.ir.schedule import Kind
from whale.units import format_bytes, format_seconds

INDENT = "  "

FORWARD = (Kind.FORWARD, Kind.RECOMPUTE)
"""Passes that run the ops forward."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one op, or one parameter, adds to the module that it belongs to.

    Attributes:
        way: names of the modules around it, outermost first, that are still to be gone down.
        stage: that runs or holds it.
        device: likewise.
        num_bytes: of a parameter there, with what training keeps beside it.
        seconds: of that device in a step, forward and backward.
    """

    way: tuple[str, ...]
    stage: int
    device: str
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Module:
    """A module with all that is inside it.

    Attributes:
        first, last: its name; where several stand together, those of the first and of the last.
        stages: that run it.
        held: bytes of all its pieces, by device.
        busy: seconds likewise.
        inside: its modules.
    """

    first: str
    last: str
    stages: tuple[int, ...]
    held: dict[str, int]
    busy: dict[str, float]
    inside: tuple[Module, ...]

    @property
    def name(self) -> str:
        return self.first if self.first == self.last else f"{self.first} .. {self.last}"

    def looks(self) -> object:
        """Equal for modules that are built and placed alike, whatever their own names are."""
        return self.stages, tuple((each.first, each.looks()) for each in self.inside)


def module_of(name: str, pieces: Sequence[Piece]) -> Module:
    """The tree of some pieces."""
    below: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.way:
            below.setdefault(piece.way[0], []).append(replace(piece, way=piece.way[1:]))
    stages = tuple(sorted({piece.stage for piece in pieces}))
    inside = _joined([module_of(each, own) for each, own in below.items()])
    if len(inside) == 1 and name and all(piece.way for piece in pieces):  # nothing but one module: one line for both
        only = inside[0]
        return replace(only, first=f"{name}.{only.first}", last=f"{name}.{only.last}")
    held, busy = dict[str, int](), dict[str, float]()
    for piece in pieces:
        held[piece.device] = held.get(piece.device, 0) + piece.num_bytes
        busy[piece.device] = busy.get(piece.device, 0.0) + piece.seconds
    return Module(name, name, stages, held, busy, inside)


def _joined(modules: Sequence[Module]) -> tuple[Module, ...]:
    found: list[Module] = []
    for module in modules:
        if found and found[-1].last.isdecimal() and module.first.isdecimal() and found[-1].looks() == module.looks():
            found[-1] = replace(_sum(found[-1], module), last=module.last)
        else:
            found.append(module)
    return tuple(found)


def _sum(one: Module, other: Module) -> Module:
    inside = tuple(_sum(own, its) for own, its in zip(one.inside, other.inside, strict=True))
    held = {device: one.held.get(device, 0) + other.held.get(device, 0) for device in one.held | other.held}
    busy = {device: one.busy.get(device, 0.0) + other.busy.get(device, 0.0) for device in one.busy | other.busy}
    return replace(one, held=held, busy=busy, inside=inside)


def print_tree(found: Planned) -> None:
    """Prints the tree, once for all replicas whose stages run the same ops: with the devices and times of the first of them."""
    alike: dict[tuple[tuple[str, ...], ...], list[Replica]] = {}
    for replica in found.plan.replicas:
        alike.setdefault(tuple(stage.ops for stage in replica.stages), []).append(replica)
    prices = Prices(found.graph, found.cluster, Costs.for_model(found.config, found.graph, found.cluster))
    for replicas in alike.values():
        first = replicas[0]
        others = f" (and {len(replicas) - 1} alike)" if len(replicas) > 1 else ""
        columns = ("module", "stage", "devices", "parameters", "computes")
        title = f"replica {first.index}{others}: on the device of each module that has most of it"
        print_table(title, columns, _rows(tree_of(found, first, prices), first, 0), ("parameters", "computes"))


def tree_of(found: Planned, replica: Replica, prices: Prices) -> Module:
    """The modules of a model on the devices of a replica; of devices that do the same, on the first."""
    return module_of("", list(_pieces(found, replica, prices)))


def _pieces(found: Planned, replica: Replica, prices: Prices) -> Iterator[Piece]:
    placed: set[tuple[str, str]] = set()  # what several stages of a device hold counts once
    for stage in replica.stages:
        devices = stage.virtual_device.devices
        alike = {found.step.of(device).devices[0]: index for index, device in reversed(list(enumerate(devices)))}
        for index in alike.values():
            device, local = devices[index], prices.local(stage.ops, stage.shards, index % stage.split) if stage.shards else prices
            for name, seconds in zip(stage.ops, _seconds(found, replica, stage, index, local), strict=True):
                yield Piece(_way(found.graph.by_name[name].module), stage.index, device, seconds=float(seconds))
            for name in stage.parameters:
                if (device, name) not in placed:
                    placed.add((device, name))
                    yield Piece(_way(name.rpartition(".")[0]), stage.index, device, num_bytes=local.parameter_bytes(name))


def _way(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split(".")))


def _seconds(found: Planned, replica: Replica, stage: Stage, index: int, local: Prices) -> Floats:
    """Of each op of a stage on one of its devices in a step.

    Together they are what the estimate says of the device's passes for the stage, so that what an op alone does not take (the host's
    starts, exchanges inside a split group) falls to the ops in proportion.

    Args:
        index: of the device in the stage.
        local: prices of the device's parts of the ops.
    """
    device, plan = stage.virtual_device.devices[index], found.plan
    counts = [stage.rows(stop - start)[index] for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows)]
    rows = sum(counts) / len(counts)
    times = local.seconds(found.cluster.by_name[device], rows)
    ops = local.positions(stage.ops)
    repeated = frozenset(name for run in stage.recomputed for name in run)
    forward = (times.forward_fixed + rows * times.forward_per_row)[ops]
    backward = (times.backward_fixed + rows * times.backward_per_row)[ops] + forward * np.array([name in repeated for name in stage.ops])
    spans = [span for span in found.step.of(device).compute if span.action.stage == stage.index]
    there = sum(span.end - span.start for span in spans if span.action.kind in FORWARD)
    back = sum(span.end - span.start for span in spans if span.action.kind not in FORWARD)
    return _divided(there, forward) + _divided(back, backward)


def _divided(seconds: float, weights: Floats) -> Floats:
    """Seconds in proportion to weights; evenly where there are none."""
    own = weights if weights.any() else np.ones_like(weights)
    found: Floats = seconds * own / own.sum()
    return found


def _rows(module: Module, replica: Replica, depth: int) -> Iterator[tuple[str, ...]]:
    devices = list(dict.fromkeys(name for stage in module.stages for name in replica.stages[stage].virtual_device.devices))
    more = f" +{len(devices) - 2}" if len(devices) > 2 else ""
    stages = str(module.stages[0]) if len(module.stages) == 1 else f"{module.stages[0]}..{module.stages[-1]}"
    name = INDENT * depth + (module.name or "the model")
    yield name, stages, " ".join(devices[:2]) + more, format_bytes(max(module.held.values())), format_seconds(max(module.busy.values()))
    for inside in module.inside:
        yield from _rows(inside, replica, depth + 1)
