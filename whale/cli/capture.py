"""``whale capture``: the model as a value, printed, or written to a file that planning reads without torch.

``whale axes``: per TaskGraph its logical axes, who has them, which may be cut and why others may not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from whale.axes import Axes, axes_of, discover
from whale.cli.inputs import add_graph_arguments, check_output, read_graph, write_text
from whale.cli.tables import print_table
from whale.errors import first_few
from whale.ir.graph import ModelGraph, Op
from whale.ir.scope import ScopePath
from whale.ir.serialization import to_json
from whale.units import counted, format_bytes, format_count


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser("capture", help="capture a model as one graph")
    add_graph_arguments(parser)
    parser.add_argument("--output", metavar="model.json", help="write the graph here")
    parser.add_argument("--json", action="store_true", help="print the graph as JSON")
    parser.add_argument("--ops", action="store_true", help="print every op")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Captures, and prints or writes what was asked for."""
    check_output(arguments.output)
    graph = read_graph(arguments.source, arguments.arg, arguments.blocks)
    if arguments.output is not None:
        write_text(arguments.output, to_json(graph))
    if arguments.json:
        print(to_json(graph, indent=1))
        return 0
    if arguments.ops:
        print(graph)
    _print_summary(graph)
    return 0


def _print_summary(graph: ModelGraph) -> None:
    title = (
        f"model: {counted(len(graph.ops), 'op')}, {counted(graph.num_rows, 'row')}, fingerprint {graph.fingerprint}; FLOPs of one forward"
    )
    right = ("ops", "parameters", "activations", "FLOPs")
    print_table(title, ("scope", "where", *right), _rows(graph), right)
    ties = [parameter for parameter in graph.parameters if parameter.ties]
    for parameter in ties:
        print(f"tied: {' = '.join((parameter.name, *parameter.ties))}")
    for term in graph.loss:
        if not term.exact:
            print(f"no sum over samples: {term.reason} (at {term.where}); a plan that separates rows weighs its parts by rows")
    for warning in graph.warnings:
        print(f"warning: {warning}")


def _rows(graph: ModelGraph) -> Iterable[tuple[str, ...]]:
    groups: dict[str, list[Op]] = {}
    for op in graph.ops:
        groups.setdefault(" / ".join(str(scope) for scope in _scope(op, graph)), []).append(op)
    for path, ops in groups.items():
        places = [scope.where for op in ops[:1] for scope in _scope(op, graph) if scope.where is not None]
        held = sum(op.num_bytes for op in ops if op.kind in ("parameter", "buffer"))
        calls = [op for op in ops if op.kind == "call"]
        yield (
            path or "(none)",
            str(places[-1]) if places else "",
            str(len(calls)),
            format_bytes(held),
            format_bytes(sum(op.num_bytes for op in calls)),
            format_count(sum(op.forward_flops for op in calls)),
        )


def _scope(op: Op, graph: ModelGraph) -> ScopePath:
    """The scopes around an op; around its first reader for a parameter or buffer that has none of its own."""
    readers = graph.users[op.name] if op.kind in ("parameter", "buffer") and not op.scope else ()
    return graph.by_name[readers[0]].scope if readers else op.scope


@dataclass(frozen=True, slots=True)
class AxisRow:
    """One axis in one TaskGraph.

    Attributes:
        task_graph: the innermost scope around its ops; "" for ops under none.
        axis: its name.
        size: at the example's rows.
        held_by: the dimensions of this TaskGraph's parameters that have it, as ``fc.weight:0``.
        may_be_cut: whether all of this TaskGraph's ops can work on a part of it.
        why: where not, the first reason.
    """

    task_graph: str
    axis: str
    size: int
    held_by: tuple[str, ...]
    may_be_cut: bool
    why: str


def describe_axes(axes: Axes, graph: ModelGraph) -> tuple[AxisRow, ...]:
    """One row per TaskGraph and axis, in the order of the graph."""
    reasons: dict[tuple[str, str], str] = {}
    held: dict[tuple[str, str], dict[str, None]] = {}
    for op in graph.ops:
        if op.name not in axes.ops:
            continue
        group = op.scope[-1].key if op.scope else ""
        for axis, role in axes.ops[op.name].roles.items():
            why = f"{op.target} {role.reason}" + (f" at {op.where}" if op.where else "") if role.kind == "whole" else ""
            reasons[group, axis] = reasons.get((group, axis)) or why
        for parameter in graph.parameters_among(op.inputs):
            for index, dimension in enumerate(axes.parameters.get(parameter.name, ())):
                for axis in axes_of(dimension):
                    held.setdefault((group, axis), {})[f"{parameter.name}:{index}"] = None
    return tuple(
        AxisRow(group, axis, axes.by_name[axis].size, tuple(held.get((group, axis), ())), not why, why)
        for (group, axis), why in reasons.items()
    )


def add_axes_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser("axes", help="show the logical axes of a model and which may be cut")
    add_graph_arguments(parser)
    parser.add_argument("--all", action="store_true", help="also axes that no parameter has and that cannot be cut")
    parser.add_argument("--json", action="store_true", help="print the axes as JSON")
    parser.set_defaults(run=run_axes)


def run_axes(arguments: argparse.Namespace) -> int:
    """Captures the model, discovers its axes, and prints them."""
    graph = read_graph(arguments.source, arguments.arg, arguments.blocks)
    axes = discover(graph)
    rows = [row for row in describe_axes(axes, graph) if arguments.all or row.held_by or row.may_be_cut]
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
        body = [(row.axis, str(row.size), first_few(row.held_by or ("-",), 1), "yes" if row.may_be_cut else row.why) for row in own]
        print("\n" * bool(number), end="")
        print_table(f"{title} (sizes at {counted(graph.num_rows, 'row')})", ("axis", "size", "held by", "may be cut"), body, ("size",))
    for mixing in axes.mixing:
        print(f"samples are not independent: {mixing}")


def _as_data(rows: list[AxisRow], axes: Axes) -> dict[str, object]:
    mixing = [{"op": m.op, "kind": m.kind, "reason": m.reason, "where": None if m.where is None else str(m.where)} for m in axes.mixing]
    return {"axes": [asdict(row) for row in rows], "mixing": mixing}
