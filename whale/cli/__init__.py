"""The command ``whale``.

What its verbs need is imported when it starts: that takes a second and may be interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130
"""The command's end after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one ``whale`` command.

    Args:
        argv: the words after ``whale``; those of the process by default.

    Returns:
        0 if all went well, 1 if Whale or the run reported a fault, 130 after Ctrl-C; a wrong command line exits with 2.
    """
    try:
        from whale.cli.command import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # a search that has a plan keeps it, and says so
        print("whale: interrupted", file=sys.stderr)
        return INTERRUPTED
