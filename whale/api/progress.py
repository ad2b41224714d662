"""A line on standard error while work takes long (a capture, a plan, the first step, a checkpoint), so that nobody takes it for a hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from whale.comm import World

FIRST_SECONDS = 10.0
"""How long work goes on before it is told; then again each time twice as long."""


@contextmanager
def told_if_long(what: str, world: World) -> Iterator[None]:
    """Tells on rank 0 what goes on inside, if it goes on for long.

    Args:
        what: is done (``capturing the model``).
        world: this process among its peers.
    """
    if world.rank != 0:
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, done), name="whale progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(what: str, done: threading.Event) -> None:
    start, pause = time.monotonic(), FIRST_SECONDS
    while not done.wait(pause):
        print(f"whale: still {what}, for {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        pause *= 2
