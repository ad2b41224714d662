"""``whale explain``: why a plan is as it is: what each choice cost, what bound it, and the runner-up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from whale.cli.planned import add_planning_verb, planned
from whale.cli.ranks import positive
from whale.cli.tables import paragraph
from whale.cli.verbs.plan import print_plan
from whale.ir.plan import Choice
from whale.ir.serialization import encode
from whale.planning.explain.mixing import terms_apart


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = add_planning_verb(verbs, "explain", run, says="say why the plan is as it is", json="print the choices and warnings as JSON")
    parser.add_argument("--runner-up", type=positive, metavar="N", help="the N-th runner-up of the search instead of the plan, whole")


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints the choices."""
    found = planned(arguments, arguments.runner_up)
    graph, plan = found.graph, found.plan
    warnings = [*graph.warnings, *terms_apart(plan, graph)]
    if arguments.json:
        print(json.dumps({"choices": encode(plan.choices), "warnings": warnings}, indent=1))
        return 0
    print_plan(found)
    for choice in plan.choices:
        print("\n".join(_lines(choice)))
    for warning in warnings:
        print(f"warning: {warning}")
    return 0


def _lines(choice: Choice) -> Iterator[str]:
    """A choice as a heading with a line for each thing that there is to say of it."""
    yield from paragraph("", f"{choice.pass_name}: {choice.subject}")
    said = (("decision", choice.decision), ("comes to", choice.cost), ("bound by", choice.bound), ("runner-up", choice.runner_up))
    for name, text in said:
        if text:
            yield from paragraph(f"  {name:<11}", text)
