"""How each rank of ``whale run`` starts: it records its process id, is tied to the life of the launcher, and becomes the script's process.

    python -I -S rank_start.py LAUNCHER DIRECTORY COMMAND...

It imports nothing but the standard library, so that this takes some milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""Of prctl(2): what follows is the signal that this process gets when the thread that started it ends. It holds across exec."""

PROCESS = "process"
"""What a file of the run directory is called, before the number of the process of a rank."""


def become(launcher: int, directory: str, command: Sequence[str]) -> None:
    """Turns this process into a command that does not outlive the launcher, where the system has such a call.

    Args:
        launcher: process that started this one.
        directory: of the run.
        command: a program and its words.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit("whale run: the launcher has died")
    with suppress(OSError):  # no room: SIGTERM reaches it by torchrun
        open(os.path.join(directory, f"{PROCESS}.{os.getpid()}"), "w").close()
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.exit(f"whale run: {command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
