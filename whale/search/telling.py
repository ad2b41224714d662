"""A line on standard error while a search takes long: what it has seen so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

FIRST_SECONDS = 1.0
"""How long a search goes on before it is told; then again each time twice as long."""


def told_if_long(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """What `search` takes as ``tell``; its time begins now.

    Args:
        clock: tells the time in seconds.
    """
    start, pause = clock(), FIRST_SECONDS

    def tell(seen: str) -> None:
        nonlocal pause
        passed = clock() - start
        if passed >= pause:
            print(f"whale: still searching, for {passed:.0f} s: {seen}", file=sys.stderr, flush=True)
            while pause <= passed:
                pause *= 2

    return tell
