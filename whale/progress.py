"""Work that takes long (a capture, a plan, the first step, a checkpoint): a line on standard error, so that it does not look like a hang,
and no garbage collection.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FIRST_SECONDS = 1.0  # before the first report; each further pause is twice as long


@contextmanager
def progress(what: str, *, on_first: bool = True, first_seconds: float | None = None) -> Iterator[Callable[[str], None]]:
    """Reports on work that takes long, with its latest note.

    Args:
        what: the work (``capturing the model``).
        on_first: whether this is rank 0, which alone reports.
        first_seconds: before the first report; None for `FIRST_SECONDS`.

    Yields:
        A function that takes notes on the work so far.
    """
    reporter = _Reporter(what, FIRST_SECONDS if first_seconds is None else first_seconds)
    if not on_first:
        yield reporter.note
        return
    thread = threading.Thread(target=reporter.report, name="whale progress", daemon=True)
    thread.start()
    try:
        yield reporter.note
    finally:
        reporter.done.set()
        thread.join()


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection inside: it took a quarter of the time of planning and a tenth of a capture, and few objects are in cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(eq=False)
class _Reporter:
    what: str
    first_seconds: float
    seen: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def note(self, seen: str) -> None:
        self.seen = seen

    def report(self) -> None:
        """Prints a line each time, until the work is done."""
        start, pause = time.monotonic(), self.first_seconds
        while not self.done.wait(pause):
            seen = f": {self.seen}" if self.seen else ""
            print(f"whale: {self.what} ({time.monotonic() - start:.0f} s){seen}", file=sys.stderr, flush=True)
            pause *= 2
