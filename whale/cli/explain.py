"""``whale explain``: why a plan is as it is: what each choice cost, what bound it, and the runner-up."""

from __future__ import annotations

import argparse
import json
from typing import Any

from whale.cli.inputs import add_planning_arguments, read_cluster, read_config, read_graph
from whale.cli.plan import print_plan
from whale.cli.tables import make_console, make_table
from whale.ir.serialization import encode
from whale.planning import make_plan


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser("explain", help="say why the plan is as it is")
    add_planning_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the choices and warnings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints the choices."""
    graph = read_graph(arguments.source, arguments.arg)
    config = read_config(arguments)
    plan = make_plan(graph, read_cluster(arguments, config), config, rows=arguments.rows)
    if arguments.json:
        print(json.dumps({"choices": encode(plan.choices), "warnings": list(graph.warnings)}, indent=1))
        return 0
    print_plan(plan)
    columns = ("pass", "choice", "decision", "cost", "bound by", "runner-up")
    rows = [(c.pass_name, c.subject, c.decision, c.cost, c.bound, c.runner_up) for c in plan.choices]
    make_console().print(make_table("why", columns, rows))
    for warning in graph.warnings:
        print(f"warning: {warning}")
    return 0
