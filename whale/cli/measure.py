"""Verbs that measure on ranks, which are started here with torchrun, or joined where torchrun has started them.

``whale probe`` writes this machine's ranks as a cluster file. ``whale profile`` measures a model's ops and passes, for plans that are
priced by measurement.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.cli.inputs import add_source_arguments, build_model, check_output, is_function, positive, write_text
from whale.cli.launch import run as launch
from whale.cli.tables import print_table
from whale.config import Config
from whale.errors import ConfigError, first_few
from whale.hardware import cluster_text, load_cluster
from whale.ir.cluster import Cluster
from whale.ir.profile import KindProfile, read_profile
from whale.ir.serialization import to_json
from whale.units import counted, format_seconds

if TYPE_CHECKING:
    from whale.comm import World


def add_rank_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Adds the number of ranks, and how often they measure: `rounds` times by default."""
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks on this machine (default: one per GPU, else one)")
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help=f"measurements per figure (default: {rounds})")


def on_ranks(arguments: argparse.Namespace, verb: str, action: Callable[[argparse.Namespace], int], usual: Callable[[], int]) -> int:
    """Does a verb's work on every rank: in this process if it is one, else in ranks started with the same words.

    Whether ``--output`` can be written is checked before anything is measured.

    Args:
        usual: the number of ranks without ``--ranks``.

    Raises:
        ConfigError: fewer than one rank, or a number where torchrun has started the ranks.
        WhaleError: the output cannot be written.
    """
    if "RANK" in os.environ:
        if arguments.ranks is not None:
            raise ConfigError(f"--ranks of `whale {verb}` was given inside a rank; it starts ranks itself", hint="leave it out")
        return action(arguments)
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, not {arguments.ranks}")
    check_output(arguments.output)
    count = arguments.ranks or usual()
    if count == 1:
        return action(arguments)
    return launch(["--ranks", str(count), "-m", "whale", verb, *_words(arguments)])


def num_devices() -> int:
    from whale.measure import devices_at_hand

    return len(devices_at_hand().devices)


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


PROBE_ROUNDS = 11


def add_probe_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "probe",
        help="measure this machine's devices, as a cluster file",
        description="Measures the speed of devices and links, and writes a cluster file with the spread of each figure. "
        "On several hosts: whale run [torchrun's flags] -m whale probe --output C.yaml on each.",
    )
    add_rank_arguments(parser, PROBE_ROUNDS)
    parser.add_argument("--output", metavar="C.yaml", help="write the cluster file here instead of printing it")
    parser.set_defaults(run=run_probe)


def run_probe(arguments: argparse.Namespace) -> int:
    return on_ranks(arguments, "probe", _probe, num_devices)


def _probe(arguments: argparse.Namespace) -> int:
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


PROFILE_ROUNDS = 7
SHOWN = 12
"""Ops that the table shows: those that take longest."""
MOST_LETTERS = 160
"""Of an op in the table."""


def add_profile_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "profile",
        help="measure a model's ops on this machine's devices",
        description="Measures each distinct op of a model, forward and backward, and its whole passes, on the devices of a cluster file. "
        "Ops that the --output file already has are not measured again.",
    )
    add_source_arguments(parser, runs=True)
    parser.add_argument("--cluster", metavar="C.yaml", help="cluster file that names this machine's devices (default: what is found)")
    add_rank_arguments(parser, PROFILE_ROUNDS)
    parser.add_argument("--output", metavar="P.json", required=True, help="file to which the profile is added")
    parser.add_argument("--again", action="store_true", help="measure again what the file already has")
    parser.set_defaults(run=run_profile)


def run_profile(arguments: argparse.Namespace) -> int:
    if not is_function(arguments.source):
        raise ConfigError(
            f"{arguments.source} has no code to measure; whale profile needs FILE.py:FUNCTION",
            hint="a captured or published model has no weights to run",
        )
    return on_ranks(
        arguments, "profile", _profile, lambda: num_devices() if arguments.cluster is None else _ranks_of(load_cluster(arguments.cluster))
    )


def _ranks_of(cluster: Cluster) -> int:
    """As many ranks as a host of the cluster has devices of the type here; no more GPUs than there are."""
    from whale.measure import devices_at_hand

    here = devices_at_hand().devices
    count = max(sum(device.model == here[0].model for device in host.devices) for host in cluster.hosts)
    return max(1, count if here[0].model == "cpu" else min(count, len(here)))


def _profile(arguments: argparse.Namespace) -> int:
    from whale.capture import capture
    from whale.comm import connect, on_first_rank, together
    from whale.measure.op_times import Inputs
    from whale.measure.profiling import Known, profile_model

    world = connect(Config().communication.timeout_seconds)
    on_first_rank(world, lambda: check_output(arguments.output))
    model, batch, loss, batch_dims = together(world, lambda: build_model(arguments.source, arguments.arg))
    graph, program = together(world, lambda: capture(model, batch, loss, batch_dims=batch_dims, device=world.device.type))
    inputs = Inputs(graph, program.graph, program.values(batch), world.device)
    cluster = together(world, lambda: _cluster(arguments, world))
    file = Path(arguments.output)
    known = Known(on_first_rank(world, lambda: read_profile(file) if file.exists() else None), arguments.again)
    profile = profile_model(world, cluster, graph, inputs, known, arguments.rounds, teller(world, "profile"))
    if world.rank == 0:
        write_text(arguments.output, to_json(profile, indent=1))
        for kind in profile.kinds:
            names = [device.name for device in cluster.devices if device.kind == kind.device]
            print("\n".join(_kind_lines(kind, names)))
            _print_ops(kind)
        for warning in profile.warnings:
            print(f"warning: {warning}")
        print(f"written to {arguments.output}")
    return 0


def _cluster(arguments: argparse.Namespace, world: World) -> Cluster:
    from whale.measure import devices_at_hand

    return load_cluster(arguments.cluster) if arguments.cluster is not None else devices_at_hand(world.local_size)


def _kind_lines(kind: KindProfile, names: Sequence[str]) -> Iterator[str]:
    """What was measured of a kind of device, of which the cluster has those of these names."""
    here = f" ({first_few(names)})" if names else ""
    yield f"{kind.device.model}{here}, {kind.machine}, torch {kind.torch}; rows {', '.join(map(str, kind.rows))}"
    yield from (str(figure) for figure in (*kind.forward, *kind.backward))
    for op in kind.ops:
        if op.reason:
            yield f"not measured, time computed instead: {op.signature}: {op.reason}"


def _print_ops(kind: KindProfile) -> None:
    measured = sorted((op for op in kind.ops if op.forward), key=lambda op: -sum((*op.forward[-1:], *op.backward[-1:])))
    rows = [(_short(op.signature), _last(op.forward), _last(op.backward), f"{op.spread:.0%}") for op in measured[:SHOWN]]
    title = f"the longest of {len(measured)} distinct ops, at {kind.rows[-1]} rows"
    print_table(title, ("op", "forward", "backward", "spread"), rows, ("forward", "backward", "spread"))


def _short(signature: str) -> str:
    """An op by its operator and its shapes; float32 with a gradient, the usual case, is left out."""
    text = signature.removeprefix("aten.").replace(" with gradient", "").replace("float32[", "[")
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def _last(times: tuple[float, ...]) -> str:
    return format_seconds(times[-1]) if times else ""
