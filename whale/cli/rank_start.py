"""What each rank of ``whale run`` begins as: it asks to be killed when the launcher dies, and becomes the script's process.

    python -I -S rank_start.py LAUNCHER COMMAND...

It imports nothing but the standard library, so that this takes some milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""Of prctl(2): what follows is the signal that this process gets when the thread that started it ends. It holds across exec."""


def become(launcher: int, command: Sequence[str]) -> None:
    """Turns this process into a command that does not outlive the launcher; where the system has no such call, that may.

    Args:
        launcher: process that started this one.
        command: a program and its words.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit("whale run: the launcher has died")
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.exit(f"whale run: {command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
