"""``--report FILE``: the picture of a step as a page to open from disk, or as a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from whale.cli.inputs import check_output, write_text
from whale.errors import ConfigError
from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.report import report_html, trace_json

_SUFFIXES = (".html", ".json")


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the flag."""
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write the picture of a step here: FILE.html for a browser, FILE.json for Perfetto (ui.perfetto.dev)",
    )


def check_report(path: str | None) -> None:
    """Finds a wrong name before anything is planned.

    Raises:
        ConfigError: it ends otherwise than the forms that there are.
        WhaleError: it cannot be written.
    """
    if path is not None and Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"--report writes FILE.html or FILE.json, not {path}")
    check_output(path)


def write_report(path: str | None, plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate) -> None:
    """Writes the picture that was asked for, if one was.

    Raises:
        WhaleError: the file cannot be written.
    """
    if path is None:
        return
    write_text(path, report_html(plan, graph, cluster, step) if path.endswith(".html") else trace_json(plan, step))
