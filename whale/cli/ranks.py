"""Verbs that measure on ranks: started here with torchrun, or joined where torchrun has started them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from whale.cli.inputs import check_output
from whale.cli.launch import run as launch
from whale.errors import ConfigError

if TYPE_CHECKING:
    from whale.comm import World


def add_rank_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Adds the number of ranks, and how often they measure: `rounds` times by default."""
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks on this machine (default: one per GPU, else one)")
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help=f"measurements of each thing (default: {rounds})")


def on_ranks(arguments: argparse.Namespace, verb: str, action: Callable[[argparse.Namespace], int], usual: Callable[[], int]) -> int:
    """Does a verb's work on every rank: in this process if it is one, else in ranks that are started with the same words.

    Whether ``--output`` can be written is found out before anything is measured.

    Args:
        usual: how many ranks there are if ``--ranks`` does not say.

    Raises:
        ConfigError: fewer than one rank is asked for, or a number where torchrun has started the ranks.
        WhaleError: the output cannot be written.
    """
    if "RANK" in os.environ:
        if arguments.ranks is not None:
            raise ConfigError(f"--ranks of `whale {verb}` starts ranks, and this is one already", hint="leave it out")
        return action(arguments)
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, not {arguments.ranks}")
    check_output(arguments.output)
    count = arguments.ranks or usual()
    if count == 1:
        return action(arguments)
    return launch(["--ranks", str(count), "-m", "whale", verb, *_words(arguments)])


def num_devices() -> int:
    """GPUs of this machine, or one CPU rank."""
    from whale.measure import devices_at_hand

    return len(devices_at_hand().devices)


def positive(text: str) -> int:
    """A whole number of at least 1 on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 ({text} is not)")
    return int(text)


def _words(arguments: argparse.Namespace) -> list[str]:
    """The command line of a rank: this one's without the number of ranks."""
    words: list[str] = []
    for name, value in vars(arguments).items():
        if name in ("verb", "run", "ranks", "source") or value is None or value is False or value == []:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return [*words, arguments.source] if hasattr(arguments, "source") else words


def teller(world: World, verb: str) -> Callable[[str], None]:
    """Says on rank 0 what is measured next."""
    return lambda what: print(f"whale {verb}: {what}", file=sys.stderr, flush=True) if world.rank == 0 else None
