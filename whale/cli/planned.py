"""Verbs that plan: their words, and what all of them start from: a model, a configuration, a cluster and the plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whale.cli.inputs import add_planning_arguments, read_graph, read_settings
from whale.cli.report import add_report_argument, check_report, write_report
from whale.config import Config
from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.search import decide
from whale.search.objective import LeastCost
from whale.telling import told_if_long


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from.

    Attributes:
        graph: the model.
        config: settings.
        cluster: the devices there are.
        plan: verified.
        step: its estimate.
    """

    graph: ModelGraph
    config: Config
    cluster: Cluster
    plan: Plan
    step: StepEstimate

    @property
    def fullest_bytes(self) -> float:
        """On the device that holds most, when it is fullest."""
        return max(each.peak.total for each in self.step.devices)

    @property
    def cost_per_sample(self) -> float | None:
        """In the currency of the cluster's prices; None where devices in use have none."""
        if self.cluster.price_per_hour(self.plan.devices) is None:
            return None
        return LeastCost(self.cluster, self.plan.planned_rows).of(self.plan, self.step)


def add_planning_verb(
    verbs: argparse._SubParsersAction[Any], name: str, run: Callable[[argparse.Namespace], int], *, says: str, json: str
) -> argparse.ArgumentParser:
    """Adds a verb that plans.

    Args:
        run: does it.
        says: what the verb does.
        json: what ``--json`` does.

    Returns:
        The verb's parser, for words of its own.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=says)
    add_planning_arguments(parser)
    parser.add_argument("--json", action="store_true", help=json)
    add_report_argument(parser)
    parser.set_defaults(run=run)
    return parser


def planned(arguments: argparse.Namespace, runner_up: int | None = None, graph: ModelGraph | None = None) -> Planned:
    """Plans what a command line asks for, and writes its picture where one was asked for.

    Args:
        runner_up: of the search, from 1; None for the best.
        graph: of the model, where it is captured already.
    """
    check_report(arguments.report)
    config, cluster = read_settings(arguments)
    graph = graph or read_graph(arguments.source, arguments.arg, arguments.blocks)
    with told_if_long("planning") as tell:
        plan, step = decide(arguments.plan, graph, cluster, config, rows=arguments.rows, runner_up=runner_up, tell=tell)
    _warn_of_stages(config, plan)
    write_report(arguments.report, plan, graph, cluster, step)
    return Planned(graph, config, cluster, plan, step)


def _warn_of_stages(config: Config, plan: Plan) -> None:
    """Says on standard error where a plan has not the stages that are set."""
    asked = config.pipeline.num_stages
    made = {len(replica.stages) // replica.pipeline.num_chunks for replica in plan.replicas}
    if asked is not None and asked not in made:
        print(
            f"warning: pipeline.num_stages is {asked}, and the plan has {', '.join(map(str, sorted(made)))}: "
            "stages share devices where there are fewer, and a plan that is given has its own",
            file=sys.stderr,
        )
