"""``whale plan``: decides which devices run what, and prints the decision; with ``--explain`` also the reasons.

``--tree`` prints the model's modules with the stages and devices that run them, what they hold and how long they compute. Consecutive
numbered modules with the same structure and devices take one line: ``h.0 .. h.5``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from whale.axes import discover
from whale.cli.inputs import check_output, positive, write_text
from whale.cli.planned import Planned, add_planning_verb, headline, planned, planned_largest
from whale.cli.tables import paragraph, print_table
from whale.errors import ConfigError
from whale.estimate import Costs
from whale.estimate.costs.line import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Choice, Plan, Replica, Stage, describe_shape, describe_shards
from whale.ir.schedule import Kind
from whale.ir.serialization import encode, to_json
from whale.planning import write_plan
from whale.planning.explain.mixing import terms_apart
from whale.schedules import schedules_of
from whale.search.largest import Largest
from whale.search.objective import format_cost
from whale.sharding.communicators import communicators_of
from whale.sharding.parameters import parameter_shardings
from whale.units import format_bytes, format_rate, format_seconds, format_share

_WRITTEN = (".yaml", ".yml")
"""Files of plans that are written down."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = add_planning_verb(
        verbs, "plan", run, says="plan a model for a cluster", json="print the plan as JSON, or with --explain its choices"
    )
    parser.add_argument("--tree", action="store_true", help="print the model's modules with the stages and devices that run them")
    parser.add_argument("--explain", action="store_true", help="print every decision with its cost, its bound and the runner-up")
    parser.add_argument("--runner-up", type=positive, metavar="N", help="print the N-th runner-up of the search instead of the plan")
    parser.add_argument(
        "--largest", action="store_true", help="repeat the model's blocks until no more fit, for each memory.zero and memory.offload"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the plan to FILE.yaml, to read and edit, or to FILE.json, for exactly this model and cluster",
    )


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments.output)
    if arguments.largest and arguments.runner_up is not None:
        raise ConfigError("--runner-up has no effect with --largest, which prints the best plan of each depth", hint="leave it out")
    if arguments.largest and arguments.explain and arguments.json:
        raise ConfigError("--explain has no effect with --largest --json, which prints the figures of each state", hint="leave one out")
    if arguments.output is not None and Path(arguments.output).suffix not in (*_WRITTEN, ".json"):
        raise ConfigError(f"--output {arguments.output} does not end in .yaml or .json")
    sizes, found = planned_largest(arguments) if arguments.largest else ((), planned(arguments, arguments.runner_up))
    graph, plan = found.graph, found.plan
    warnings = [*graph.warnings, *terms_apart(plan, graph)]
    if arguments.output is not None:
        is_written = Path(arguments.output).suffix in _WRITTEN
        write_text(arguments.output, write_plan(plan, graph) if is_written else to_json(plan))
    if arguments.json:
        explained = {"choices": encode(plan.choices), "warnings": warnings} if arguments.explain else None
        data = [_size(each) for each in sizes] or explained
        print(to_json(plan, indent=1) if data is None else json.dumps(data, indent=1))
        return 0
    if sizes:
        _print_sizes(sizes)
    print_plan(found)
    for choice in plan.choices if arguments.explain else ():
        print("\n".join(_choice_lines(choice)))
    for line in () if arguments.explain else _choices(plan):
        print(line)
    if arguments.tree:
        print_tree(found)
    shardings = parameter_shardings(plan, graph, discover(graph) if plan.is_sharded else None)
    communicators = communicators_of(plan, graph, shardings, schedules_of(plan), len(found.cluster.devices))
    print(communicators)
    for warning in (*warnings, *filter(None, [communicators.warning])):
        print(f"warning: {warning}")
    return 0


def _size(largest: Largest) -> dict[str, object]:
    """The figures of the deepest model with a state."""
    plan, seconds = largest.plan, largest.step.step_seconds
    state = {"memory.zero": largest.zero, "memory.offload": largest.offload}
    figures = {"num_blocks": largest.num_blocks, "num_parameters": largest.num_parameters, "step_seconds": seconds}
    return {**state, **figures, "samples_per_second": plan.planned_rows / seconds, "shape": describe_shape(plan.replicas)}


def _print_sizes(sizes: Sequence[Largest]) -> None:
    columns = ("zero", "offload", "blocks", "parameters", "step", "samples/s", "plan")
    rows = [
        (
            each.zero,
            each.offload,
            str(each.num_blocks),
            f"{each.num_parameters / 1e6:,.0f} M",
            format_seconds(each.step.step_seconds),
            format_rate(each.plan.planned_rows / each.step.step_seconds),
            describe_shape(each.plan.replicas),
        )
        for each in sizes
    ]
    title = f"the deepest model that fits on {sizes[-1].plan.where}, by memory.zero and memory.offload; below, the plan of the last"
    print_table(title, columns, rows, columns[2:6])
    print()


def print_plan(found: Planned) -> None:
    plan, cost = found.plan, found.cost_per_sample
    columns = ("rank", "device", "replica", "stage", "TaskGraphs", "rows", "forward", "backward", "memory")
    divided = zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True)
    rows = [row for replica, own in divided for stage in replica.stages for row in _stage_rows(plan, replica, stage, own)]
    print_table("\n".join(headline(plan)), columns, rows, ("rank", "replica", "stage", "rows", "forward", "backward", "memory"))
    print("forward, backward: per micro-batch; rows, memory: of the step")
    if plan.half_types:
        print("\n".join(paragraph("half precision: ", plan.describe_half_types())))
    for start, text in (*_shards(plan), *_edges(plan)):
        print("\n".join(paragraph(start, text)))
    rate = f", {format_rate(plan.planned_rows / plan.step_seconds)} samples/s" if plan.step_seconds else ""
    print(f"predicted: {format_seconds(plan.step_seconds)} per step{rate}" + ("" if cost is None else f", {format_cost(cost)}"))
    if plan.sync_groups:
        print("\n".join(paragraph("hosts: ", plan.describe_sync())))
    if found.step.redundancy is not None:
        print("\n".join(paragraph("redundancy: ", str(found.step.redundancy))))
    if plan.idle_devices:
        print("\n".join(paragraph("idle devices: ", ", ".join(plan.idle_devices))))


def _choices(plan: Plan) -> Iterator[str]:
    """Where the plan is from, and what a step takes, of all that `--explain` prints."""
    for choice in plan.choices:
        if choice.pass_name == "search" or choice.subject == "figures":
            yield from paragraph(f"{choice.pass_name}: ", "; ".join(filter(None, (choice.decision, choice.cost, choice.bound))))
        if choice.pass_name == "estimate":
            yield from paragraph(f"{choice.subject}: ", f"{choice.decision}; {choice.cost}")


def _shards(plan: Plan) -> Iterator[tuple[str, str]]:
    """What each split stage cuts, replicas with the same cuts together."""
    found: dict[tuple[int, str], list[int]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.shards:
                halves = "; in two alternating halves" if stage.overlap else ""
                text = f"groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
                found.setdefault((stage.index, text), []).append(replica.index)
    for (index, text), members in sorted(found.items()):
        yield f"stage {index}{_copies(plan, members)}: ", text


def _edges(plan: Plan) -> Iterator[tuple[str, str]]:
    """What crosses stages, replicas that send the same tensors together, with the bytes of the first of them."""
    found: dict[tuple[int, int, tuple[str, ...]], list[int]] = {}
    first: dict[tuple[int, int, tuple[str, ...]], int] = {}
    for replica in plan.replicas:
        for edge in replica.edges:
            key = edge.source, edge.target, edge.tensors
            first.setdefault(key, edge.num_bytes)
            found.setdefault(key, []).append(replica.index)
    for (source, target, tensors), members in found.items():
        num_bytes = format_bytes(first[source, target, tensors])
        yield f"stage {source} -> stage {target}{_copies(plan, members)}: ", f"{', '.join(tensors)} ({num_bytes})"


def _copies(plan: Plan, members: Sequence[int]) -> str:
    return f" of replica {', '.join(map(str, members))}" if len(members) < len(plan.replicas) else ""


def _stage_rows(plan: Plan, replica: Replica, stage: Stage, micro_batches: Sequence[tuple[int, int]]) -> Iterable[tuple[str, ...]]:
    # Rows of a whole step: those of each micro-batch, divided over the stage's devices.
    pieces = [stage.rows(stop - start) for start, stop in micro_batches]
    for position, device in enumerate(stage.virtual_device.devices):
        times: tuple[str, ...] = ("", "", "")
        if stage.estimates:
            e = stage.estimates[position]
            held = e.parameter_bytes + e.activation_bytes
            times = (format_seconds(e.forward), format_seconds(e.backward), f"{format_bytes(held)} ({format_share(held / e.capacity)})")
        names = ", ".join(stage.task_graphs)
        rows = str(sum(piece[position] for piece in pieces))
        yield (str(plan.rank_of[device]), device, str(replica.index), str(stage.index), names, rows, *times)


def _choice_lines(choice: Choice) -> Iterator[str]:
    """A choice as a heading with a line for each thing that there is to say of it."""
    yield from paragraph("", f"{choice.pass_name}: {choice.subject}")
    said = (("decision", choice.decision), ("cost", choice.cost), ("bound by", choice.bound), ("runner-up", choice.runner_up))
    for name, text in said:
        if text:
            yield from paragraph(f"  {name:<11}", text)


INDENT = "  "

FORWARD = (Kind.FORWARD, Kind.RECOMPUTE)
"""Passes that run the ops forward."""


@dataclass(frozen=True, slots=True)
class TreePiece:
    """What one op, or one parameter, adds to its module."""

    way: tuple[str, ...]  # names of the modules around it, outermost first, that are left to descend
    stage: int
    device: str
    num_bytes: int = 0  # of a parameter there, with what training keeps for it
    seconds: float = 0.0  # of that device in a step, forward and backward


@dataclass(frozen=True, slots=True)
class Module:
    """A module with everything inside it; ``first`` and ``last`` differ where one line stands for several."""

    first: str
    last: str
    stages: tuple[int, ...]
    held: dict[str, int]  # bytes of all its pieces, by device
    busy: dict[str, float]  # seconds of all its pieces, by device
    inside: tuple[Module, ...]

    @property
    def name(self) -> str:
        return self.first if self.first == self.last else f"{self.first} .. {self.last}"

    def looks(self) -> object:
        """Equal for modules with the same structure and devices, whatever their names."""
        return self.stages, tuple((each.first, each.looks()) for each in self.inside)


def module_of(name: str, pieces: Sequence[TreePiece]) -> Module:
    below: dict[str, list[TreePiece]] = {}
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
    """Prints the tree, once for all replicas whose stages run the same ops, with the devices and times of the first."""
    alike: dict[tuple[tuple[str, ...], ...], list[Replica]] = {}
    for replica in found.plan.replicas:
        alike.setdefault(tuple(stage.ops for stage in replica.stages), []).append(replica)
    prices = Prices(found.graph, found.cluster, Costs.for_model(found.config, found.graph, found.cluster))
    for replicas in alike.values():
        first = replicas[0]
        others = f" (and {len(replicas) - 1} like it)" if len(replicas) > 1 else ""
        columns = ("module", "stage", "devices", "parameters", "computes")
        title = f"replica {first.index}{others}: figures of the device that has most of each module"
        print_table(title, columns, _rows(tree_of(found, first, prices), first, 0), ("parameters", "computes"))


def tree_of(found: Planned, replica: Replica, prices: Prices) -> Module:
    """The modules of a model on the devices of a replica; of devices with equal work, on the first."""
    return module_of("", list(_pieces(found, replica, prices)))


def _pieces(found: Planned, replica: Replica, prices: Prices) -> Iterator[TreePiece]:
    placed: set[tuple[str, str]] = set()  # what several stages of a device hold counts once
    for stage in replica.stages:
        devices = stage.virtual_device.devices
        alike = {found.step.of(device).devices[0]: index for index, device in reversed(list(enumerate(devices)))}
        for index in alike.values():
            device, local = devices[index], prices.local(stage.ops, stage.shards, index % stage.split) if stage.shards else prices
            for name, seconds in zip(stage.ops, _seconds(found, replica, stage, index, local), strict=True):
                yield TreePiece(_way(found.graph.by_name[name].module), stage.index, device, seconds=float(seconds))
            for name in stage.parameters:
                if (device, name) not in placed:
                    placed.add((device, name))
                    yield TreePiece(_way(name.rpartition(".")[0]), stage.index, device, num_bytes=local.parameter_bytes(name))


def _way(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split(".")))


def _seconds(found: Planned, replica: Replica, stage: Stage, index: int, local: Prices) -> Floats:
    """Seconds of each op of a stage on one of its devices (``index``) in a step.

    Their sum is the estimate of the device's passes for the stage: what single ops do not take (launches of the host, exchanges in a split
    group) is divided in proportion. ``local`` are the prices of the device's parts of the ops.
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
