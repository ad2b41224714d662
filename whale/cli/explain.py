"""``whale explain``: why a plan is as it is: what each choice cost, what bound it, and the runner-up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from whale.cli.inputs import add_planning_arguments, read_cluster, read_config, read_graph
from whale.cli.plan import print_plan
from whale.cli.report import add_report_argument, check_report, write_report
from whale.cli.tables import paragraph
from whale.ir.plan import Choice
from whale.ir.serialization import encode
from whale.search import decide


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser("explain", help="say why the plan is as it is")
    add_planning_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the choices and warnings as JSON")
    add_report_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints the choices."""
    check_report(arguments.report)
    graph = read_graph(arguments.source, arguments.arg, arguments.blocks)
    config = read_config(arguments)
    cluster = read_cluster(arguments, config)
    plan, step = decide(arguments.plan, graph, cluster, config, rows=arguments.rows)
    write_report(arguments.report, plan, graph, cluster, step)
    if arguments.json:
        print(json.dumps({"choices": encode(plan.choices), "warnings": list(graph.warnings)}, indent=1))
        return 0
    print_plan(plan)
    for choice in plan.choices:
        print("\n".join(_lines(choice)))
    for warning in graph.warnings:
        print(f"warning: {warning}")
    return 0


def _lines(choice: Choice) -> Iterator[str]:
    """A choice as a heading with a line for each thing that there is to say of it."""
    yield from paragraph("", f"{choice.pass_name}: {choice.subject}")
    said = (("decision", choice.decision), ("cost", choice.cost), ("bound by", choice.bound), ("runner-up", choice.runner_up))
    for name, text in said:
        if text:
            yield from paragraph(f"  {name:<11}", text)
