"""``whale run``: starts the ranks of a training script with torchrun, and reports who died, where, and who waited."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from whale.cli import rank_start
from whale.cli.deaths import Deaths, describe_failure, rank_processes, watching
from whale.cli.elastic import KEEP, KEPT, QUIET, be_elastic, is_local, leave_kept, left_at, take_up_kept
from whale.cli.inputs import refuse_unknown
from whale.config import RECIPE_VARIABLE, load_config
from whale.errors import PREEMPTED_CODE, ConfigError

TIMEOUT = "WHALE_COMMUNICATION_TIMEOUT_SECONDS"
TRACE = "WHALE_TRACE_DIRECTORY"
PROGRESS = "WHALE_RUNTIME_PROGRESS"
LOG = "WHALE_RUNTIME_LOG_FILE"

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that say at which network interface a backend listens."""

_RUN = "whale_run_"

_LOOK_SECONDS = 0.05
"""Between two looks whether the ranks have ended."""

_POSITIONAL = {"training_script": ("SCRIPT", True), "training_script_args": ("WORDS", False)}
"""What torchrun's own words are called, and whether there must be one."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Lists ``run`` among the verbs; its own words are read by `run`."""
    verbs.add_parser("run", help="start a training script on several ranks", add_help=False)


def run(words: Sequence[str]) -> int:
    """Starts the ranks and waits for them.

    Args:
        words: after ``whale run``: its flags and torchrun's, the script, the script's own.

    Returns:
        0 if every rank ended well; 128 and the signal's number if a signal stopped them, also where SIGTERM came to a rank and all have
        saved (`Preempted`); 1 otherwise.

    Raises:
        WhaleError: the recipe is invalid, or no rank can be started.
    """
    if any(word.partition("=")[0] == "--elastic" for word in words):
        os.environ.setdefault(*QUIET)  # torch reads it when it is imported
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run as run_torchrun

    from whale.runtime.execute.status import RUN_DIRECTORY, read_all

    parser = make_parser()
    arguments, rest = parser.parse_known_args(list(words))
    refuse_unknown(parser, rest)
    elastic = {}
    if arguments.elastic is not None:
        from whale.cli import meeting

        elastic = be_elastic(arguments)
        meeting.register()
    _check(arguments)
    variables, begun = {**_variables(arguments), **elastic}, time.time()
    with (
        _meeting_on_loopback(arguments),
        _run_directory() as directory,
        _environment({**variables, RUN_DIRECTORY: directory, **({KEEP: str(Path(directory) / KEPT)} if elastic else {})}),
        watching(directory, is_elastic=arguments.elastic is not None) as deaths,
        _passing_on_sigterm(arguments, directory, deaths),
    ):
        place = left_at(_memory(), arguments)
        if elastic:
            take_up_kept(place, Path(directory) / KEPT)
        _bind_ranks(arguments, directory)
        try:
            run_torchrun(arguments)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            if is_preempted([failure.exitcode for failure in error.failures.values()]):
                print("whale run: stopped by SIGTERM, which a rank received", file=sys.stderr)
                return PREEMPTED_CODE
            print(describe_failure(error, read_all(directory), time.time(), deaths), file=sys.stderr)
            _tell_recorded(variables.get(TRACE), begun)
            return 1
        except SignalException as error:
            if deaths.has_left:
                print(f"whale run: leaving the run: {error}", file=sys.stderr)
                return 1
            print(f"whale run: stopped by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval
        except (DistError, RendezvousError) as error:
            if elastic and rank_processes(directory):
                has_left = leave_kept(Path(directory) / KEPT, place)
                print(_lost_rendezvous(arguments.rdzv_endpoint, place if has_left else None), file=sys.stderr)
                return 1
            where = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"
            raise ConfigError(f"launchers cannot connect to each other at {where}: {str(error).splitlines()[0]}") from error
        except OSError as error:
            raise ConfigError(f"no rank can be started: {error.strerror or error} ({error.filename})") from error
    _tell_recorded(variables.get(TRACE), begun)
    return 0


def _lost_rendezvous(endpoint: str, place: Path | None) -> str:
    if place is None:
        rest = "no rank of this host has kept its state. Start it again: it goes on from the newest checkpoint"
    else:
        rest = f"what ranks of this host kept is left in {place}. Start it again in the same way: it goes on from there"
    why = "the launcher that held it has ended, or cannot be reached"
    return f"whale run: the rendezvous at {endpoint} does not answer any more: {why}. The run ends here; {rest}"


def _tell_recorded(directory: str | None, begun: float) -> None:
    """Says where the picture of this run is, on the host that has it."""
    if directory is None:
        return
    from whale.api import tracing  # seconds, which a run that records nothing should not take to end

    report = Path(directory) / tracing.REPORT
    if report.is_file() and report.stat().st_mtime >= begun:
        print(f"whale run: recorded {report} for a browser, and {tracing.TRACE} for Perfetto (ui.perfetto.dev)", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """torchrun's parser with Whale's own flags before the script."""
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "whale run"
    parser.usage = (
        "whale run [--ranks N] [--recipe R.yaml] [--timeout SECONDS] [--trace DIR]\n"
        "                 [--progress] [--log FILE] [--elastic MIN:MAX]\n"
        "                 [torchrun's flags] SCRIPT [SCRIPT's arguments]"
    )
    parser.description = "Start a training script on several ranks. Accepts torchrun's flags and whale's own."
    own = parser.add_argument_group("whale's own flags")
    own.add_argument(
        "--ranks", dest="nproc_per_node", default=argparse.SUPPRESS, metavar="N", help="ranks on this host (torchrun's --nproc-per-node)"
    )
    own.add_argument("--recipe", metavar="R.yaml", help="configuration of the engines of the script")
    own.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="longest that a rank waits for another (communication.timeout_seconds)"
    )
    own.add_argument(
        "--trace",
        metavar="DIR",
        help="record three steps there: report.html, trace.json for Perfetto (trace.directory; see the keys of trace)",
    )
    own.add_argument("--progress", action="store_true", help="show loss, speed, norm, learning rate, memory (runtime.progress)")
    own.add_argument("--log", metavar="FILE", help="add a line of JSON for each step (runtime.log_file)")
    own.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="number of launchers, one per host, that may join and leave; then, and when a rank dies, all ranks restart",
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
        raise ConfigError(f"--ranks {ranks} is not a whole number above 0, auto, gpu or cpu")
    if not (arguments.module or arguments.no_python) and not Path(arguments.training_script).is_file():
        raise ConfigError(f"there is no script {arguments.training_script}", hint="whale run [flags] SCRIPT [SCRIPT's arguments]")
    if arguments.trace is not None and _is_one_host(arguments):  # of several hosts, that of rank 0 has it
        from whale.api import tracing

        tracing.make_folder(arguments.trace)


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    variables = {}
    if "PYTHONHASHSEED" not in os.environ:
        variables["PYTHONHASHSEED"] = "0"  # a model's code may go through a set; all ranks capture it in one order
    if str(arguments.nproc_per_node) != "1" and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"  # torchrun's default, without its banner
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if (_is_one_host(arguments) or is_local(arguments.rdzv_endpoint)) and loopback is not None:
        variables |= {name: loopback for name in INTERFACES if name not in os.environ}
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
    if arguments.progress:
        variables[PROGRESS] = "true"
    if arguments.log is not None:
        variables[LOG] = str(Path(arguments.log).resolve())
    return variables


def _is_one_host(arguments: argparse.Namespace) -> bool:
    return str(arguments.nnodes) in ("1", "1:1")


@contextmanager
def _meeting_on_loopback(arguments: argparse.Namespace) -> Iterator[None]:
    """Where all ranks are on this host, and no flag names the endpoint: a store on the loopback interface alone.

    torchrun's own listens at all interfaces. This one starts before it, at a port that torchrun is given, and serves it.

    Raises:
        ConfigError: the port is in use.
    """
    is_ours = arguments.standalone or (arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint)
    if not (is_ours and _is_one_host(arguments) and arguments.max_restarts == 0 and is_local(arguments.master_addr)):
        yield
        return
    from whale.comm.listening import LOOPBACK, listening_at, store_on

    try:
        listener = listening_at(LOOPBACK, arguments.master_port or 0)
    except OSError as error:
        raise ConfigError(
            f"port {arguments.master_port} of this host, for the ranks to connect, is not available: {os.strerror(error.errno or 0)}",
            hint="leave out --master-port to use a free port",
        ) from error
    port = listener.getsockname()[1]
    store = store_on(listener)
    arguments.standalone, arguments.rdzv_backend, arguments.master_addr, arguments.master_port = False, "static", LOOPBACK, port
    yield
    del store  # it has listened until here


def _bind_ranks(arguments: argparse.Namespace, directory: str) -> None:
    """Lets the ranks end with this process, however it ends, and record their process ids in the run directory."""
    if arguments.run_path:  # a function in a fork of this process, and no command
        return
    command = [arguments.training_script, *arguments.training_script_args]
    if not arguments.no_python:
        command = [os.environ.get("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if arguments.module else []), *command]
    arguments.no_python, arguments.module, arguments.training_script = True, False, sys.executable
    arguments.training_script_args = ["-I", "-S", rank_start.__file__, str(os.getpid()), directory, *command]


def is_preempted(exit_codes: Sequence[int]) -> bool:
    """Whether ranks have saved and ended because SIGTERM came to one; torchrun then sends it to the living ones."""
    return PREEMPTED_CODE in exit_codes and {*exit_codes} <= {PREEMPTED_CODE, -signal.SIGTERM}


@contextmanager
def _passing_on_sigterm(arguments: argparse.Namespace, directory: str, deaths: Deaths) -> Iterator[None]:
    """Forwards SIGTERM to the ranks, once, and waits for them while they save; what sent it ends all when time is up.

    torchrun would send it to all their child processes too, which ends the workers of their DataLoaders and so fails the ranks; it would
    kill ranks after 30 seconds, and at a second signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def pass_on(_: int, __: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deaths.is_stopping = True
        ranks = rank_processes(directory)
        for pid in filter(_lives, ranks):
            os.kill(pid, signal.SIGTERM)
        while any(map(_lives, ranks)):
            time.sleep(_LOOK_SECONDS)
        raise SignalException("the launcher received SIGTERM", sigval=signal.SIGTERM)

    if not hasattr(os, "waitid") or threading.current_thread() is not threading.main_thread():
        yield
        return
    arguments.signals_to_handle = ",".join(name for name in arguments.signals_to_handle.split(",") if name.strip() != "SIGTERM")
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _lives(child: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _memory() -> Path:
    """In memory where the system offers it: a record that is written at every action should never wake a disk."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


@contextmanager
def _run_directory() -> Iterator[str]:
    """A folder for the statuses of ranks; folders that killed runs have left are removed.

    It is locked while this process lives, and its ranks do not inherit the lock.

    Raises:
        ConfigError: it cannot be made.
    """
    memory = _memory()
    for left in memory.glob(f"{_RUN}*"):
        with suppress(OSError):
            lock = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    try:
        directory, lock = _make_locked(memory)
    except OSError as error:
        raise ConfigError(f"cannot record what the ranks do in {memory}: {error.strerror}") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _make_locked(parent: Path) -> tuple[str, int]:
    """A new folder and its lock; another launcher that cleans up may come between the two."""
    while True:
        directory = tempfile.mkdtemp(prefix=_RUN, dir=parent)
        with suppress(FileNotFoundError, BlockingIOError):
            lock = _locked(Path(directory))
            if Path(directory).exists():
                return directory, lock
            os.close(lock)


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock of a folder until it is closed; an OSError where another process holds it."""
    # in a folder that all users share anything may have such a name: a pipe would be waited for, a link followed
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
