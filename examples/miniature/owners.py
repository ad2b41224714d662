"""Names of what a process makes in the kernel and nobody else would remove: they say whose it is, so that what is left over is known.

whale-OWNER-WHICH
"""

from __future__ import annotations

import os
from pathlib import Path

NAME = "whale"


def name_of(which: object) -> str:
    """Of one thing of this process; short enough for a network device where `which` is a single letter."""
    return f"{NAME}-{os.getpid()}-{which}"


def is_left_over(name: str) -> bool:
    """Whether what is called so was made by a process that is no more."""
    first, _, rest = name.partition("-")
    owner = rest.partition("-")[0]
    return first == NAME and owner.isdecimal() and not Path("/proc", owner).exists()
