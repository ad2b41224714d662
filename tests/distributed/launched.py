"""Commands of Python as forks of a process that has torch, Whale and a first capture: a start takes milliseconds, not five seconds.

    done = python("-m", "whale", "run", "--ranks", "2", str(script))       # as `python -m whale run ...`: runs to its end
    launcher = start("-m", "whale", "run", "--ranks", "2", str(script))    # as subprocess.Popen

A process has its own words, environment, folder, output and signals. A launcher's ranks are children of it, in sessions of their own, as
those that torchrun starts; they are forked before it begins, since torchrun starts threads. `interpreter` starts the real thing, where
what is tested is how an interpreter starts or ends.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.counts import count

PATIENCE_SECONDS = 600
"""Of a machine that is busy; a run that takes so long does not end."""
STARTS = 8
"""So often may each rank of an elastic run start."""
PRELOADED = ("tests.distributed.ranks", "tests.distributed.launched", "tests.distributed.warm")


def forkserver() -> Any:
    """The context of `multiprocessing` whose processes are forks of one that has imported what tests need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def interpreter(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`python WORDS` by an interpreter of its own, which takes seconds to start."""
    count("interpreters")
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS, **more)


def python(
    *words: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, to its end."""
    process = start(*words, env=env, cwd=cwd, ranks=ranks)
    out, said = process.communicate(PATIENCE_SECONDS)
    assert process.returncode is not None
    return subprocess.CompletedProcess(words, process.returncode, out, said)


def start(*words: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None, ranks: int | None = None) -> Started:
    """Starts `python WORDS`: a script or `-m` and a module, and their own words; `ranks`: so many does it start, if no word says so."""
    if ranks is None:
        ranks = next((int(after) for word, after in pairwise(words) if word in ("--ranks", "--nproc-per-node")), 0)
    environment = dict(os.environ if env is None else env)
    return Started(words, environment, os.getcwd() if cwd is None else str(cwd), ranks * (STARTS if "--elastic" in words else 1))


class Started:
    """A process, as `subprocess.Popen` with pipes has it.

    Args:
        num_blanks: so many processes may it start with torchrun.
    """

    def __init__(self, words: Sequence[str], environment: dict[str, str], folder: str, num_blanks: int) -> None:
        count("commands")
        self.args = words
        self._output = tempfile.mkdtemp(prefix="launched")
        self._process = forkserver().Process(target=_be, args=(list(words), environment, folder, self._output, num_blanks), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            said = self._read("stderr")
            self.kill()
            raise subprocess.TimeoutExpired(list(self.args), timeout, stderr=said.encode())
        return self.returncode

    def communicate(self, timeout: float = PATIENCE_SECONDS) -> tuple[str, str]:
        """What it has written to standard output and error when it has ended."""
        self.wait(timeout)
        texts = self._read("stdout"), self._read("stderr")
        shutil.rmtree(self._output)
        return texts

    def _read(self, name: str) -> str:
        return (Path(self._output) / name).read_text()


def wait_until(is_so: Callable[[], bool], what: str, *running: Started) -> None:
    """Waits while some of the processes that are to bring it about are running.

    Raises:
        AssertionError: it has not come; with what they wrote.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        has_ended = bool(running) and all(process.returncode is not None for process in running)
        assert not has_ended or is_so(), f"{what}: all have ended\n" + "\n".join(process.communicate()[1] for process in running)
        assert time.monotonic() < until, f"not in {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.02)


# -- in the forked processes ----------------------------------------------------------------------------------


class Replaced(BaseException):
    """Raised in place of ``exec``: this process becomes another command."""


def _be(words: list[str], environment: dict[str, str], folder: str, output: str, num_blanks: int) -> NoReturn:
    """The life of what a test starts."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(os.path.join(output, name), "w") as file:
            os.dup2(file.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    multiprocessing.set_start_method(None, force=True)  # of which the data loader's are made as in any script
    blanks = Blanks(num_blanks)
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen"
    with mock.patch(handler, blanks.start), mock.patch("inspect.stack", _stack):
        _live(words, environment)


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.stack` without sources.

    torchrun names each event by its stack. To look for the source of a frame that has none, among all modules that are here, takes so
    long that a launcher would not get to write into the rendezvous between two signs of life of the others.
    """
    frames = []
    frame = inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        frames.append(inspect.FrameInfo(frame, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None))
    return frames


def _live(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Does what an interpreter does with these words, and ends as it ends."""
    os.environ.clear()
    os.environ.update(environment)
    code: Any = 0
    try:
        _run(words)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(words: list[str]) -> None:
    while words[0] in ("-u", "-I", "-S"):
        words = words[1:]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            with mock.patch.object(sys, "path", [str(Path(words[0]).resolve().parent), *sys.path]), mock.patch("os.execvp", _exec):
                runpy.run_path(words[0], run_name="__main__")
    except Replaced as other:
        return _run(other.args[0])


def _exec(program: str, words: Sequence[str]) -> NoReturn:
    assert program == sys.executable, program
    raise Replaced(list(words[1:]))


class Blanks:
    """Children that wait to be told which command they are."""

    def __init__(self, number: int) -> None:
        self._waiting: list[tuple[int, Connection]] = []
        launcher = os.getpid()
        for _ in range(number):
            there, here = multiprocessing.Pipe(duplex=False)
            if (pid := os.fork()) == 0:
                for _, other in self._waiting:
                    other.close()
                here.close()
                _be_blank(there, launcher)
            there.close()
            self._waiting.append((pid, here))

    def start(self, args: Sequence[str], env: Mapping[str, str], **rest: Any) -> Child:
        """In place of `subprocess.Popen`, as torchrun calls it for a rank."""
        assert args[0] == sys.executable and rest == {"stdout": None, "stderr": None, "start_new_session": True}, (args, rest)
        assert self._waiting, f"a rank has started more than {STARTS} times"
        pid, pipe = self._waiting.pop(0)
        with pipe:
            pipe.send((list(args[1:]), dict(env)))
        return Child(pid)


def _be_blank(pipe: Connection, launcher: int) -> NoReturn:
    """The life of a rank."""
    from whale.cli.rank_start import PR_SET_PDEATHSIG

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
    try:
        words, environment = pipe.recv()
    except EOFError:  # the launcher has ended
        os._exit(0)
    pipe.close()
    _live(words, environment)


class Child:
    """A child of this process, as torchrun uses a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        gone = os.pidfd_open(self.pid) if self.poll() is None else None
        if gone is not None:
            wait([gone], timeout)
            os.close(gone)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode
