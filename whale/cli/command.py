"""Reads the command line and passes each verb to its module."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import whale
from whale.cli import advise, capture, checkpoint, doctor, launch, measure, plan, report, schedule, simulate
from whale.cli.inputs import refuse_unknown
from whale.config import did_you_mean
from whale.errors import WhaleError, is_debugging


def run(words: Sequence[str]) -> int:
    """Runs one ``whale`` command.

    Args:
        words: after ``whale``.

    Returns:
        0 if all went well, 1 if Whale or the run reported a fault; a wrong command line exits with 2.
    """
    try:
        if words[:1] == ["run"]:  # its words after SCRIPT belong to the script, so torchrun's own parser reads them
            return launch.run(list(words[1:]))
        if not words:
            make_parser().print_help()
            return 0
        parser = make_parser()
        if words[0] not in parser.verbs and not words[0].startswith("-"):
            parser.error(f"unknown command {words[0]!r} ({did_you_mean(words[0], parser.verbs)})")
        arguments = parser.parse_args(words)
        code: int = arguments.run(arguments)
        return code
    except WhaleError as error:
        if is_debugging():
            raise
        print(f"whale: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `whale plan ... | head`
        sys.stderr.close()
        return 1


def make_parser() -> Parser:
    """The parser of all verbs; each verb's file adds its own part."""
    parser = Parser(prog="whale", description="Plan PyTorch models for a cluster, and train them by the plan.")
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for add_parser in (
        doctor.add_parser, capture.add_parser, plan.add_parser, simulate.add_parser, advise.add_parser, report.add_parser,
        schedule.add_parser, measure.add_probe_parser, measure.add_profile_parser, checkpoint.add_parser, launch.add_parser,
    ):  # fmt: skip
        add_parser(verbs)
    parser.verbs = tuple(verbs.choices)
    return parser


class Parser(argparse.ArgumentParser):
    """A parser that says of which verb a word is unknown, and the nearest that is known."""

    verbs: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but that words which are left over are an error of this parser."""
        found, rest = super().parse_known_args(args, namespace)
        refuse_unknown(self, rest)
        return found, rest


class _Version(argparse.Action):
    """Prints the versions that a report of a fault needs; they are looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the versions of whale, torch and Python")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"whale {whale.__version__}, torch {version('torch')}, Python {platform.python_version()}")
        parser.exit()
