"""The tree of a model's modules beside the stages and devices that run them, what they hold and how long they compute.

Modules that follow one another, are numbered, and are built and placed alike stand in one line: ``h.0 .. h.5``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from whale.cli.planned import Planned
from whale.cli.tables import print_table
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Replica, Stage
from whale.units import format_bytes, format_seconds

INDENT = "  "


@dataclass(frozen=True, slots=True)
class Piece:
    """What one op, or one parameter, adds to the module that it belongs to.

    Attributes:
        way: names of the modules around it, outermost first, that are still to be gone down.
        stage: that runs or holds it.
        num_bytes: of a parameter, with what training keeps beside it.
        seconds: of a device of the stage in a step, forward and backward.
    """

    way: tuple[str, ...]
    stage: int
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Module:
    """A module with all that is inside it.

    Attributes:
        first, last: its name; where several stand together, those of the first and of the last.
        stages: that run it.
        num_bytes, seconds: of all its pieces.
        inside: its modules.
    """

    first: str
    last: str
    stages: tuple[int, ...]
    num_bytes: int
    seconds: float
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
    return Module(name, name, stages, sum(piece.num_bytes for piece in pieces), sum(piece.seconds for piece in pieces), inside)


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
    return replace(one, num_bytes=one.num_bytes + other.num_bytes, seconds=one.seconds + other.seconds, inside=inside)


def print_tree(found: Planned) -> None:
    """Prints the tree, once for all replicas whose stages run the same ops: with the devices and times of the first of them."""
    alike: dict[tuple[tuple[str, ...], ...], list[Replica]] = {}
    for replica in found.plan.replicas:
        alike.setdefault(tuple(stage.ops for stage in replica.stages), []).append(replica)
    prices = Prices(found.graph, found.cluster, Costs.for_model(found.config, found.graph, found.cluster))
    for replicas in alike.values():
        first = replicas[0]
        others = f" (and {len(replicas) - 1} alike)" if len(replicas) > 1 else ""
        tree = module_of("", list(_pieces(found, first, prices)))
        columns = ("module", "stage", "devices", "memory", "seconds")
        title = f"replica {first.index}{others}: memory of parameters, seconds of one device in a step"
        print_table(title, columns, _rows(tree, first, 0), ("memory", "seconds"))


def _pieces(found: Planned, replica: Replica, prices: Prices) -> Iterator[Piece]:
    graph = found.graph
    placed: dict[str, None] = {}
    for stage in replica.stages:
        seconds = _seconds(found, replica, stage, prices)
        for name in stage.ops:
            yield Piece(_way(graph.by_name[name].module), stage.index, seconds=seconds[name])
        for name in stage.parameters:
            if name not in placed:
                placed[name] = None
                yield Piece(_way(name.rpartition(".")[0]), stage.index, num_bytes=prices.parameter_bytes(name))


def _way(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split(".")))


def _seconds(found: Planned, replica: Replica, stage: Stage, prices: Prices) -> dict[str, float]:
    """Of each op on the stage's first device in a step."""
    plan = found.plan
    local = prices.local(stage.ops, stage.shards, 0) if stage.shards else prices
    device = found.cluster.by_name[stage.virtual_device.devices[0]]
    counts = [stage.rows(stop - start)[0] for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows)]
    rows = sum(counts) / len(counts)
    times = local.seconds(device, rows)
    each = times.forward_fixed + times.backward_fixed + rows * (times.forward_per_row + times.backward_per_row)
    return {name: len(counts) * float(each[local.table.position[name]]) for name in stage.ops}


def _rows(module: Module, replica: Replica, depth: int) -> Iterator[tuple[str, ...]]:
    devices = list(dict.fromkeys(name for stage in module.stages for name in replica.stages[stage].virtual_device.devices))
    more = f" +{len(devices) - 2}" if len(devices) > 2 else ""
    stages = str(module.stages[0]) if len(module.stages) == 1 else f"{module.stages[0]}..{module.stages[-1]}"
    name = INDENT * depth + (module.name or "the model")
    yield name, stages, " ".join(devices[:2]) + more, format_bytes(module.num_bytes), format_seconds(module.seconds)
    for inside in module.inside:
        yield from _rows(inside, replica, depth + 1)
