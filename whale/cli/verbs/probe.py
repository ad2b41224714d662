"""``whale probe``: measures the ranks at hand and writes them as a cluster file."""

from __future__ import annotations

import argparse
import datetime
from importlib.metadata import version
from typing import Any

from whale.cli.inputs import check_output, write_text
from whale.cli.ranks import add_rank_arguments, num_devices, on_ranks, teller
from whale.config import Config
from whale.hardware import cluster_text
from whale.ir.cluster import Cluster
from whale.units import counted

ROUNDS = 11


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser(
        "probe",
        help="measure the devices at hand, as a cluster file",
        description="Measures what ranks compute and send one another, and writes it as a cluster file with the spread of each figure. "
        "On several hosts: whale run [torchrun's flags] -m whale probe --output C.yaml on each.",
    )
    add_rank_arguments(parser, ROUNDS)
    parser.add_argument("--output", metavar="C.yaml", help="write the cluster file here instead of printing it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints or writes the cluster."""
    return on_ranks(arguments, "probe", _measure, num_devices)


def _measure(arguments: argparse.Namespace) -> int:
    """On one rank."""
    from whale.comm import connect, on_first_rank
    from whale.measure.probing import probe

    world = connect(Config().communication.timeout_seconds)
    on_first_rank(world, lambda: check_output(arguments.output))
    cluster, notes = probe(world, arguments.rounds, teller(world, "probe"))
    if world.rank == 0:
        _write(cluster, (_heading(world.size), *notes), arguments.output)
    return 0


def _heading(num_ranks: int) -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    return f"Measured by whale probe on {counted(num_ranks, 'rank')}, {today}, torch {version('torch')}."


def _write(cluster: Cluster, notes: tuple[str, ...], output: str | None) -> None:
    text = cluster_text(cluster, notes)
    if output is None:
        print(text, end="")
    else:
        write_text(output, text.rstrip("\n"))
        for figure in cluster.measured:
            print(figure)
        print(f"written to {output}")
    for warning in cluster.warnings:
        print(f"# warning: {warning}" if output is None else f"warning: {warning}")
