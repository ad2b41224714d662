"""``whale report``: two recorded runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whale.cli.inputs import check_output, write_text
from whale.cli.tables import print_table
from whale.errors import ConfigError
from whale.ir.serialization import read_value
from whale.ir.timeline import STEPS, RecordedRun
from whale.report import comparison_html, differences


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "report",
        help="compare two recorded runs",
        description="Prints what differs between the steps that two runs recorded (whale run --trace FOLDER), and draws both on one page.",
    )
    parser.add_argument("run_a", metavar="A", help="folder of a recorded run")
    parser.add_argument("--against", metavar="B", required=True, help="folder of the run to compare with")
    parser.add_argument("--output", metavar="FILE.html", default="comparison.html", help="page to write (default: comparison.html)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments.output)
    names = arguments.run_a, arguments.against
    a, b = map(_read, names)
    columns = ("figure", "A", "B", "B against A")
    print_table(f"A: {names[0]}, {a.plan}; B: {names[1]}, {b.plan}", columns, differences(a, b), columns[1:])
    write_text(arguments.output, comparison_html(a, b, names))
    print(f"both steps: {arguments.output}")
    return 0


def _read(folder: str) -> RecordedRun:
    path, hint = Path(folder) / STEPS, "whale run --trace FOLDER ... records a run"
    try:
        found = read_value(RecordedRun, path)
    except OSError as error:
        raise ConfigError(f"{folder} holds no recorded run ({path}: {error.strerror})", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no recorded run: {error}", hint=hint) from error
    if not found.steps:
        raise ConfigError(f"{path} holds no recorded step", hint=hint)
    return found
