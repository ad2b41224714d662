"""Reads the command line and hands each verb to the file that does it."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import whale
import whale.cli.launch as launch
import whale.cli.verbs.advise as advise
import whale.cli.verbs.axes as axes
import whale.cli.verbs.capture as capture
import whale.cli.verbs.diff as diff
import whale.cli.verbs.doctor as doctor
import whale.cli.verbs.explain as explain
import whale.cli.verbs.plan as plan
import whale.cli.verbs.probe as probe
import whale.cli.verbs.profile as profile
import whale.cli.verbs.schedule as schedule
import whale.cli.verbs.simulate as simulate
from whale.cli.unknown import refuse_unknown
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
        _check_verb(parser, words[0])
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
    parser = Parser(prog="whale", description="Plan and train PyTorch models on the devices at hand.")
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (doctor, capture, axes, plan, explain, simulate, advise, diff, schedule, probe, profile, launch):
        verb.add_parser(verbs)
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


def _check_verb(parser: Parser, word: str) -> None:
    if word not in parser.verbs and not word.startswith("-"):
        parser.error(f"there is no verb {word!r} ({did_you_mean(word, parser.verbs)})")


class _Version(argparse.Action):
    """Prints the versions that a report of a fault needs; they are looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the versions of whale, torch and Python")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"whale {whale.__version__}, torch {version('torch')}, Python {platform.python_version()}")
        parser.exit()
