"""``whale run``: starts the ranks of a training script with torchrun, and says who died, where, and who waited."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.cli.unknown import refuse_unknown
from whale.config import RECIPE_VARIABLE, load_config
from whale.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from whale.runtime.execute.status import RankStatus

TIMEOUT = "WHALE_COMMUNICATION_TIMEOUT_SECONDS"
TRACE = "WHALE_TRACE_DIRECTORY"

_POSITIONAL = {"training_script": ("SCRIPT", True), "training_script_args": ("WORDS", False)}
"""What torchrun's own words are called, and whether there must be one."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Lists ``run`` among the verbs; its own words are read by `run`."""
    verbs.add_parser("run", help="start a training script on several ranks", add_help=False)


def run(words: Sequence[str]) -> int:
    """Starts the ranks and waits for them.

    Args:
        words: the words after ``whale run``: its flags and torchrun's, the script, the script's own.

    Returns:
        0 if every rank ended well, 1 otherwise.

    Raises:
        WhaleError: the recipe cannot be read, or does not hold.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as run_torchrun

    from whale.runtime.execute.status import RUN_DIRECTORY, read_all

    parser = make_parser()
    arguments, rest = parser.parse_known_args(list(words))
    refuse_unknown(parser, rest)
    _check(arguments)
    variables, begun = _variables(arguments), time.time()
    with _run_directory() as directory, _environment({**variables, RUN_DIRECTORY: directory}):
        try:
            run_torchrun(arguments)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            print(describe_failure(error, read_all(directory), time.time()), file=sys.stderr)
            _tell_recorded(variables.get(TRACE), begun)
            return 1
        except SignalException as error:
            print(f"whale run: stopped by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval
    _tell_recorded(variables.get(TRACE), begun)
    return 0


def _tell_recorded(directory: str | None, begun: float) -> None:
    """Says where the picture of this run is, on the host that has it."""
    from whale.api import tracing

    report = None if directory is None else Path(directory) / tracing.REPORT
    if report is not None and report.is_file() and report.stat().st_mtime >= begun:
        print(f"whale run: recorded {report} for a browser, {tracing.TRACE} beside it for Perfetto (ui.perfetto.dev)", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """torchrun's parser with Whale's own flags before the script."""
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "whale run"
    parser.usage = (
        "whale run [--ranks N] [--recipe R.yaml] [--timeout SECONDS] [--trace DIR]\n"
        "                 [torchrun's flags] SCRIPT [the script's own words]"
    )
    parser.description = "Start a training script on several ranks. Accepts torchrun's flags beside its own."
    own = parser.add_argument_group("whale's own flags")
    own.add_argument(
        "--ranks", dest="nproc_per_node", default=argparse.SUPPRESS, metavar="N", help="ranks on this host (torchrun's --nproc-per-node)"
    )
    own.add_argument("--recipe", metavar="R.yaml", help="configuration of the engines that the script makes")
    own.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="longest that a rank waits for another (communication.timeout_seconds)"
    )
    own.add_argument(
        "--trace",
        metavar="DIR",
        help="record three steps there: report.html, trace.json for Perfetto (trace.directory, and keys beside it)",
    )
    for action in parser._actions:
        if not action.option_strings:
            action.metavar, action.required = _POSITIONAL[action.dest]
    parser._action_groups.insert(0, parser._action_groups.pop())  # help lists the groups in this order
    parser._optionals.title = "torchrun's flags"
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Finds here what torchrun would answer with a traceback, or each rank by itself."""
    ranks = str(arguments.nproc_per_node)
    if ranks not in ("auto", "gpu", "cpu") and not (ranks.isdecimal() and int(ranks) > 0):
        raise ConfigError(f"--ranks takes a whole number above 0, or auto, gpu or cpu ({ranks} is not)")
    if not (arguments.module or arguments.no_python) and not Path(arguments.training_script).is_file():
        raise ConfigError(f"there is no script {arguments.training_script}", hint="whale run [flags] SCRIPT [the script's own words]")
    if arguments.trace is not None and str(arguments.nnodes) in ("1", "1:1"):  # of several hosts, that of rank 0 has it
        from whale.api import tracing

        tracing.make_folder(arguments.trace)


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    variables = {}
    if "PYTHONHASHSEED" not in os.environ:
        variables["PYTHONHASHSEED"] = "0"  # a model's code may go through a set; all ranks capture it in one order
    if str(arguments.nproc_per_node) != "1" and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"  # torchrun's default, without its banner
    if arguments.recipe is not None:
        recipe = Path(arguments.recipe).resolve()
        load_config(recipe, environment=os.environ)  # a fault in it is reported once, here, and no rank is started
        variables[RECIPE_VARIABLE] = str(recipe)
    if arguments.timeout is not None:
        if arguments.timeout <= 0:
            raise ConfigError(f"--timeout must be more than 0 seconds, not {arguments.timeout:g}")
        variables[TIMEOUT] = str(arguments.timeout)
    if arguments.trace is not None:
        variables[TRACE] = str(Path(arguments.trace).resolve())
    return variables


@contextmanager
def _run_directory() -> Iterator[str]:
    # In memory where the system offers it: a record that is written at every action should never wake a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="whale_run_", dir=memory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    # torchrun hands this process's environment down to the ranks.
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def describe_failure(error: ChildFailedError, statuses: Mapping[int, RankStatus], now: float) -> str:
    """Which rank died, its last action, and what every other rank was doing or waiting for.

    Args:
        error: torchrun's account: the ranks that it saw fail.
        statuses: what the ranks of this host last said.
        now: seconds of ``time.time()``.
    """
    failures = sorted(error.failures.items(), key=lambda item: _blame(item[0], item[1], statuses))
    lines = []
    for rank, failure in failures:
        lines.append(f"whale run: rank {rank} (pid {failure.pid}) {_how(failure)}; {_last(statuses.get(rank), now)}")
    for rank, status in sorted(statuses.items()):
        if rank not in error.failures:
            lines.append(f"  rank {rank} was {_last(status, now).removeprefix('last ')}")
    silent = "" if statuses else "\n  no rank had begun a step"
    return "\n".join(lines) + silent


def _blame(rank: int, failure: ProcessFailure, statuses: Mapping[int, RankStatus]) -> tuple[int, int, int]:
    """Sorts the likely cause first: killed, then failed by itself, then failed while it waited, then stopped by torchrun."""
    if failure.exitcode < 0:
        order = 3 if -failure.exitcode == signal.SIGTERM else 0
    else:
        status = statuses.get(rank)
        order = 2 if status is not None and status.waits_for else 1
    return order, int(failure.timestamp), rank


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exited with code {failure.exitcode}"
    if -failure.exitcode == signal.SIGTERM:
        return "was stopped by SIGTERM"  # what torchrun sends the others after a death
    return f"was killed by {failure.signal_name()}"


def _last(status: RankStatus | None, now: float) -> str:
    return "last seen before its first action" if status is None else f"last {status.describe(now)}"
