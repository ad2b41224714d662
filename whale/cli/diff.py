"""``whale diff``: two plans of a model side by side, or its plans on two clusters or by two recipes: what differs, and what that costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from whale.cli.inputs import add_planning_arguments, read_graph
from whale.cli.planned import Planned, planned
from whale.cli.tables import print_table
from whale.config import read_yaml
from whale.config.settings import is_section
from whale.ir.plan import Replica, describe_shards
from whale.search.objective import format_cost
from whale.units import format_bytes, format_seconds

NONE = "-"

Row = tuple[str, str, str]
"""What differs, and how it is in both plans."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser(
        "diff",
        help="compare two plans, or the plans for two clusters or recipes",
        description="Plans a model twice, with A and with B, and prints what differs: stages, rows, schedule, predicted time and memory.",
    )
    add_planning_arguments(parser, plans=False)
    parser.add_argument("a", metavar="A", help="a written plan, a plan.json, a cluster file, or a recipe")
    parser.add_argument("b", metavar="B", help="the same, or another of these")
    parser.add_argument("--json", action="store_true", help="print the figures and differences as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans twice, and prints what differs."""
    graph = read_graph(arguments.source, arguments.arg, arguments.blocks)
    a, b = (planned(_with(path, arguments), graph=graph) for path in (arguments.a, arguments.b))
    figures, found = dict(_figures(a, b)), list(differences(a, b))
    if arguments.json:
        told = {name: {"a": one, "b": other} for name, (one, other) in figures.items()}
        named = [dict(zip(("replica", "what", "a", "b"), row, strict=True)) for row in found]
        print(json.dumps({"figures": told, "differences": named}, indent=1))
        return 0
    rows = [(name, _shown(name, one), _shown(name, other), f"{other / one:.3f} x" if one else "") for name, (one, other) in figures.items()]
    print_table(f"A: {arguments.a}; B: {arguments.b}", ("figure", "A", "B", "B by A"), rows, ("A", "B", "B by A"))
    if found:
        print_table("what differs", ("replica", "what", "A", "B"), found)
    else:
        print("the plans are the same")
    return 0


def differences(a: Planned, b: Planned) -> Iterator[tuple[str, str, str, str]]:
    """The replica, what differs there, and how it is in both plans; replicas that differ alike, but for their devices, once."""
    found: dict[tuple[Row, ...], list[tuple[int, list[Row]]]] = {}
    for index, pair in enumerate(zip_longest(a.plan.replicas, b.plan.replicas)):
        one, other = ({} if replica is None else dict(_facts(own, replica)) for own, replica in zip((a, b), pair, strict=True))
        unlike = [(what, one.get(what, NONE), other.get(what, NONE)) for what in one | other if one.get(what) != other.get(what)]
        found.setdefault(tuple(row for row in unlike if not row[0].endswith("devices")), []).append((index, unlike))
    for alike in found.values():
        first, rows = alike[0]
        name = str(first) + (f" +{len(alike) - 1}" if len(alike) > 1 else "")
        yield from ((name, *row) for row in rows)


def _facts(found: Planned, replica: Replica) -> Iterator[tuple[str, str]]:
    """What there is to say of a replica, by name."""
    sizes = [stop - start for start, stop in found.plan.micro_batch_rows(replica.index, found.plan.planned_rows)]
    yield "schedule", replica.pipeline.order
    yield "rows", str(sum(sizes))
    for stage in replica.stages:
        name = f"stage {stage.index}"
        yield f"{name} devices", " ".join(stage.virtual_device.devices)
        yield f"{name} ops", f"{stage.ops[0]} .. {stage.ops[-1]} ({len(stage.ops)})"
        yield f"{name} rows", " ".join(map(str, stage.rows(sizes[0])))
        if stage.shards:
            yield f"{name} cuts", f"groups of {stage.split}: {describe_shards(stage.shards)}"
        if stage.recomputed:
            yield f"{name} computes again", f"{sum(map(len, stage.recomputed))} ops"


def _figures(a: Planned, b: Planned) -> Iterator[tuple[str, tuple[float, float]]]:
    yield "step_seconds", (a.step.step_seconds, b.step.step_seconds)
    yield "peak_bytes", (a.fullest_bytes, b.fullest_bytes)
    costs = a.cost_per_sample, b.cost_per_sample
    if costs[0] is not None and costs[1] is not None:
        yield "cost_per_sample", (costs[0], costs[1])
    yield "devices", (len(a.plan.devices), len(b.plan.devices))
    yield "replicas", (len(a.plan.replicas), len(b.plan.replicas))


def _shown(name: str, value: float) -> str:
    forms = {"step_seconds": format_seconds, "peak_bytes": lambda size: format_bytes(round(size)), "cost_per_sample": format_cost}
    return forms[name](value) if name in forms else str(value)


def _with(path: str, arguments: argparse.Namespace) -> argparse.Namespace:
    """The words of a verb that plans with what a file says."""
    words: Mapping[str, object] = {"plan": None, "report": None} | vars(arguments) | {_kind(path): path}
    return argparse.Namespace(**words)


def _kind(path: str) -> Literal["plan", "cluster", "recipe"]:
    """What a file is: a cluster has hosts, a recipe sections."""
    if Path(path).suffix == ".json":
        return "plan"
    data = read_yaml(path).data
    keys = list(data) if isinstance(data, dict) else []
    if "hosts" in keys:
        return "cluster"
    return "recipe" if any(key == "plan" or is_section(key) for key in keys) else "plan"
