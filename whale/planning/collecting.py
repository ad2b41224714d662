"""Puts Python's search for cycles off while a plan is made: millions of small values come and stay, and few of them are in a cycle.

The search goes through all that there is again and again, torch's modules and the user's values among it; it was a quarter of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Inside, nothing is looked for; afterwards as before. What is no longer referred to is let go as ever."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
