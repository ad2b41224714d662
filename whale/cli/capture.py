"""``whale capture``: the model as a value, printed, or written to a file that planning reads without torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from whale.cli.inputs import add_graph_arguments, check_output, read_graph, write_text
from whale.cli.tables import print_table
from whale.ir.graph import ModelGraph, Op
from whale.ir.scope import ScopePath
from whale.ir.serialization import to_json
from whale.units import counted, format_bytes, format_count


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser("capture", help="capture a model as one graph")
    add_graph_arguments(parser)
    parser.add_argument("--output", metavar="model.json", help="file to write the graph to")
    parser.add_argument("--json", action="store_true", help="print the graph as JSON")
    parser.add_argument("--ops", action="store_true", help="print every op")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
    """The scopes around an op; for a parameter or buffer without, those around its first reader."""
    readers = graph.users[op.name] if op.kind in ("parameter", "buffer") and not op.scope else ()
    return graph.by_name[readers[0]].scope if readers else op.scope
