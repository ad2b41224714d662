"""``whale plan``: decides which devices run what, and prints the decision."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from whale.axes import discover
from whale.cli.inputs import check_output, write_text
from whale.cli.module_tree import print_tree
from whale.cli.planned import Planned, add_planning_verb, planned
from whale.cli.tables import paragraph, print_table
from whale.errors import ConfigError
from whale.ir.plan import Plan, Replica, Stage, describe_order, describe_shape, describe_shards
from whale.ir.serialization import to_json
from whale.planning import write_plan
from whale.planning.explain.mixing import terms_apart
from whale.search.objective import format_cost
from whale.sharding.communicators import communicators_of
from whale.sharding.parameters import parameter_shardings
from whale.units import counted, format_bytes, format_seconds, format_share

_WRITTEN = (".yaml", ".yml")
"""Files of plans that are written down."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = add_planning_verb(verbs, "plan", run, says="plan a model for a cluster", json="print the plan as JSON")
    parser.add_argument("--tree", action="store_true", help="print the model's modules with the stages and devices that run them")
    parser.add_argument("--output", metavar="FILE", help="write the plan here: plan.yaml as one that is written down, plan.json as a value")


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints or writes what was asked for."""
    check_output(arguments.output)
    if arguments.output is not None and Path(arguments.output).suffix not in (*_WRITTEN, ".json"):
        raise ConfigError(f"--output writes FILE.yaml or FILE.json, not {arguments.output}")
    found = planned(arguments)
    graph, plan = found.graph, found.plan
    if arguments.output is not None:
        is_written = Path(arguments.output).suffix in _WRITTEN
        write_text(arguments.output, write_plan(plan, graph) if is_written else to_json(plan))
    if arguments.json:
        print(to_json(plan, indent=1))
        return 0
    print_plan(found)
    for line in _choices(plan):
        print(line)
    if arguments.tree:
        print_tree(found)
    communicators = communicators_of(plan, graph, parameter_shardings(plan, graph, discover(graph) if plan.is_sharded else None))
    print(communicators)
    for warning in (*graph.warnings, *terms_apart(plan, graph), *filter(None, [communicators.warning])):
        print(f"warning: {warning}")
    return 0


def print_plan(found: Planned) -> None:
    """Prints a plan as a table of its devices."""
    plan, cost = found.plan, found.cost_per_sample
    title = f"{describe_shape(plan.replicas)} on {plan.where}: {describe_order(plan.replicas)}, {counted(plan.planned_rows, 'row')}"
    columns = ("rank", "device", "replica", "stage", "TaskGraphs", "rows", "forward", "backward", "set aside")
    rows = [row for replica in plan.replicas for stage in replica.stages for row in _stage_rows(plan, replica, stage)]
    print_table(title, columns, rows, ("rank", "replica", "stage", "rows", "forward", "backward", "set aside"))
    for start, text in (*_shards(plan), *_edges(plan)):
        print("\n".join(paragraph(start, text)))
    print(f"predicted: {format_seconds(plan.step_seconds)} per step" + ("" if cost is None else f", {format_cost(cost)}"))
    if plan.idle_devices:
        print("\n".join(paragraph("idle: ", ", ".join(plan.idle_devices))))


def _choices(plan: Plan) -> Iterator[str]:
    """Where the plan is from, and what a step takes, of all that `whale explain` tells."""
    for choice in plan.choices:
        if choice.pass_name == "search" or choice.subject == "figures":
            yield from paragraph(f"{choice.pass_name}: ", "; ".join(filter(None, (choice.decision, choice.cost, choice.bound))))
        if choice.pass_name == "estimate":
            yield from paragraph(f"{choice.subject}: ", f"{choice.decision}; {choice.cost}")


def _shards(plan: Plan) -> Iterator[tuple[str, str]]:
    """What each split stage cuts, replicas that cut alike together."""
    found: dict[tuple[int, str], list[int]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.shards:
                halves = "; in two halves that take turns" if stage.overlap else ""
                text = f"groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
                found.setdefault((stage.index, text), []).append(replica.index)
    for (index, text), members in sorted(found.items()):
        yield f"stage {index}{_copies(plan, members)}: ", text


def _edges(plan: Plan) -> Iterator[tuple[str, str]]:
    """What crosses stages, replicas that hand on the same tensors together, with the bytes of the first of them."""
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


def _stage_rows(plan: Plan, replica: Replica, stage: Stage) -> Iterable[tuple[str, ...]]:
    # Rows of a whole step: those of each micro-batch, divided over the stage's devices.
    pieces = [stage.rows(stop - start) for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows)]
    for position, device in enumerate(stage.virtual_device.devices):
        times: tuple[str, ...] = ("", "", "")
        if stage.estimates:
            e = stage.estimates[position]
            held = e.parameter_bytes + e.activation_bytes
            times = (format_seconds(e.forward), format_seconds(e.backward), f"{format_bytes(held)} ({format_share(held / e.capacity)})")
        names = ", ".join(stage.task_graphs)
        rows = str(sum(piece[position] for piece in pieces))
        yield (str(plan.rank_of[device]), device, str(replica.index), str(stage.index), names, rows, *times)
