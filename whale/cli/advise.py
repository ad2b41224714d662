"""``whale advise``: what each group of devices adds to a training, and what other settings, more devices or faster links would bring."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from whale.cli.inputs import add_planning_arguments, read_graph, read_settings
from whale.cli.planned import deepest
from whale.cli.tables import paragraph
from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.ir.plan import describe_degrees
from whale.search.advice import Advised, advise, of_depth
from whale.search.asking import Answer
from whale.units import counted


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "advise",
        help="show what each device type contributes, and what other settings and more devices would gain",
        description="Searches for the best plan on the cluster, with and without each device type, in half precision, for a batch twice as "
        "large, with one more device of each type, and with links between hosts twice as fast, and prints what the differences mean.",
    )
    add_planning_arguments(parser, plans=False)
    parser.add_argument("--largest", action="store_true", help="also find the largest number of blocks that still trains")
    parser.add_argument("--json", action="store_true", help="print the advice with its numbers as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config, cluster = read_settings(arguments)

    def captured(config: Config) -> ModelGraph:
        return read_graph(arguments.source, arguments.arg, arguments.blocks, settings=(config, cluster))

    graph = captured(config)
    recapture = None if arguments.source.endswith(".json") else captured
    found = advise(graph, cluster, config, rows=arguments.rows, recapture=recapture, tell=_tell)
    if arguments.largest:
        depth = of_depth(deepest(graph, config, cluster, arguments.rows))
        found = replace(found, advice=(*found.advice, depth))
    if arguments.json:
        print(json.dumps(_as_data(found), indent=1))
    else:
        print_advice(found)
    return 0


def print_advice(found: Advised) -> None:
    """Prints the plan in short and one sentence per piece of advice, each with its numbers."""
    if found.best is None:
        print("\n".join(paragraph("nothing fits: ", found.fault)))
    else:
        own = found.best
        degrees, rows = describe_degrees(own.plan.replicas), counted(own.plan.planned_rows, "row")
        said = f"{degrees} on {own.plan.where}, {rows}: {own}; {own.state}"
        print("\n".join(paragraph("", said)))
    for each in found.advice:
        print("\n".join(paragraph("- ", each.says)))


def _tell(what: str) -> None:
    print(f"whale advise: {what}", file=sys.stderr, flush=True)


def _as_data(found: Advised) -> dict[str, object]:
    plan = None if found.best is None else {"arrangement": str(found.best.strategy), "value": found.best.value, "state": found.best.state}
    facts = [_fact(each) for each in found.facts]
    return {"plan": plan, "fault": found.fault, "advice": [asdict(each) for each in found.advice], "facts": facts}


def _fact(answer: Answer) -> dict[str, object]:
    own = {"setting": answer.setting, "value": answer.value, "rows": answer.plan.planned_rows, "arrangement": str(answer.strategy)}
    return own | {"devices": answer.plan.devices}
