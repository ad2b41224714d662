"""Verbs that plan: their arguments, their inputs (a model, a configuration, a cluster, the plan), and the picture of a step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale.cli.inputs import add_planning_arguments, check_output, read_graph, read_settings, write_text
from whale.cli.tables import paragraph
from whale.config import Config
from whale.errors import ConfigError
from whale.estimate import StepEstimate
from whale.hardware import compute_type
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, describe_degrees, describe_order, describe_shape
from whale.planning.explain.choices import other_stages
from whale.progress import progress
from whale.report import report_html, trace_json
from whale.search import decide
from whale.search.largest import Depths, Largest, largest
from whale.search.objective import Objective
from whale.units import counted


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from."""

    graph: ModelGraph
    config: Config
    cluster: Cluster
    plan: Plan
    step: StepEstimate  # its estimate

    @property
    def fullest_bytes(self) -> float:
        """On the device that holds most, when it is fullest."""
        return max(each.peak.total for each in self.step.devices)

    @property
    def cost_per_sample(self) -> float | None:
        """In the currency of the cluster's prices; None where devices in use have none."""
        if self.cluster.price_per_hour(self.plan.devices) is None:
            return None
        return Objective("cost", self.cluster, self.plan.planned_rows).of(self.plan, self.step)


def headline(plan: Plan) -> Iterator[str]:
    """The shape of a plan, its devices, degrees and schedule, as lines that fit the page."""
    yield from paragraph("", f"{describe_shape(plan.replicas)} on {plan.where}")
    yield from paragraph("", describe_degrees(plan.replicas))
    yield from paragraph("", f"{describe_order(plan.replicas)}, {counted(plan.planned_rows, 'row')}")


def add_planning_verb(
    verbs: argparse._SubParsersAction[Any], name: str, run: Callable[[argparse.Namespace], int], *, says: str, json: str
) -> argparse.ArgumentParser:
    """Adds a verb that plans.

    Args:
        run: does it.
        says: what the verb does.
        json: what ``--json`` does.

    Returns:
        The verb's parser, for further arguments.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=says)
    add_planning_arguments(parser)
    parser.add_argument("--json", action="store_true", help=json)
    add_report_argument(parser)
    parser.set_defaults(run=run)
    return parser


def planned(
    arguments: argparse.Namespace, runner_up: int | None = None, graph: ModelGraph | None = None, like: Planned | None = None
) -> Planned:
    """Plans for a command line, and writes its picture where ``--report`` is given.

    Args:
        runner_up: of the search, from 1; None for the best.
        graph: of the model, where it is captured already.
        like: of the same model, whose graph is used where ops compute in the same types.
    """
    check_report(arguments.report)
    config, cluster = read_settings(arguments)
    if like is not None and compute_type(config, cluster) == compute_type(like.config, like.cluster):
        graph = like.graph
    graph = graph or read_graph(arguments.source, arguments.arg, arguments.blocks, settings=(config, cluster))
    with progress("planning") as tell:
        plan, step = decide(arguments.plan, graph, cluster, config, rows=arguments.rows, runner_up=runner_up, tell=tell)
    return _finished(arguments, Planned(graph, config, cluster, plan, step))


def _finished(arguments: argparse.Namespace, found: Planned) -> Planned:
    """What was planned, with its picture and a warning where they are due."""
    if text := other_stages(found.config.pipeline.num_stages, found.plan):
        print(f"warning: {text}", file=sys.stderr)
    write_report(arguments.report, found.plan, found.graph, found.cluster, found.step)
    return found


def deepest(graph: ModelGraph, config: Config, cluster: Cluster, rows: int | None) -> tuple[Largest, ...]:
    """The deepest versions of a model that fit, for each state of its parameters.

    Raises:
        WhaleError: no blocks repeat, there are settings for a certain depth, or not even the unrepeated model fits.
    """
    from whale.workloads import count_blocks, repeat_blocks

    num_blocks = count_blocks(graph)
    with progress("looking for the deepest model") as tell:
        return tuple(largest(Depths(lambda number: repeat_blocks(graph, number), num_blocks, cluster, rows), config, tell))


def planned_largest(arguments: argparse.Namespace) -> tuple[tuple[Largest, ...], Planned]:
    """The results of `deepest`, and the plan of the last, which is the deepest."""
    check_report(arguments.report)
    if arguments.plan is not None:
        raise ConfigError(f"--largest and --plan {arguments.plan} cannot be given together: --largest searches a plan for each depth")
    config, cluster = read_settings(arguments)
    graph = read_graph(arguments.source, arguments.arg, arguments.blocks, settings=(config, cluster))
    sizes = deepest(graph, config, cluster, arguments.rows)
    last = sizes[-1]
    return sizes, _finished(arguments, Planned(last.graph, config, cluster, last.plan, last.step))


_SUFFIXES = (".html", ".json")


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write a timeline of the step: FILE.html for a browser, FILE.json for Perfetto (ui.perfetto.dev)",
    )


def check_report(path: str | None) -> None:
    """Checks, before planning, that the picture can be written, in a form that exists."""
    if path is not None and Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"--report {path} does not end in .html or .json")
    check_output(path)


def write_report(path: str | None, plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate) -> None:
    if path is None:
        return
    write_text(path, report_html(plan, graph, cluster, step) if path.endswith(".html") else trace_json(plan, step))
