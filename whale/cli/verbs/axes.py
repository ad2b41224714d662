"""``whale axes``: prints the logical axes of a model, who has them, which may be cut and why others may not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from whale.axes import Axes, AxisRow, describe, discover
from whale.cli.inputs import add_graph_arguments, read_graph
from whale.cli.tables import print_table
from whale.errors import first_few
from whale.ir.graph import ModelGraph
from whale.units import counted


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser("axes", help="show the logical axes of a model and which may be cut")
    add_graph_arguments(parser)
    parser.add_argument("--all", action="store_true", help="also axes that no parameter has and that cannot be cut")
    parser.add_argument("--json", action="store_true", help="print the axes as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Captures the model, discovers its axes, and prints them."""
    graph = read_graph(arguments.source, arguments.arg, arguments.blocks)
    axes = discover(graph)
    rows = [row for row in describe(axes, graph) if arguments.all or row.held_by or row.may_be_cut]
    if arguments.json:
        print(json.dumps(_as_data(rows, axes), indent=1))
    else:
        print_axes(rows, axes, graph)
    return 0


def print_axes(rows: list[AxisRow], axes: Axes, graph: ModelGraph) -> None:
    """Prints one table per TaskGraph, then the ops that mix samples."""
    for number, name in enumerate(dict.fromkeys(row.task_graph for row in rows)):
        own = [row for row in rows if row.task_graph == name]
        title = f"TaskGraph {name}" if name else "ops under no scope"
        body = [(row.axis, str(row.size), _holders(row), "yes" if row.may_be_cut else row.why) for row in own]
        print("\n" * bool(number), end="")
        print_table(f"{title} (sizes at {counted(graph.num_rows, 'row')})", ("axis", "size", "held by", "may be cut"), body, ("size",))
    for mixing in axes.mixing:
        print(f"samples are not independent: {mixing}")


def _holders(row: AxisRow) -> str:
    return first_few(row.held_by or ("-",), 1)


def _as_data(rows: list[AxisRow], axes: Axes) -> dict[str, object]:
    mixing = [{"op": m.op, "kind": m.kind, "reason": m.reason, "where": None if m.where is None else str(m.where)} for m in axes.mixing]
    return {"axes": [asdict(row) for row in rows], "mixing": mixing}
