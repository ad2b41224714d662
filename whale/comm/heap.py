"""Keeping the memory that a CPU rank frees, so that the next pass finds it there.

glibc gives the end of its heap back to the kernel when enough of it is free. A step frees what it has kept, pass by pass, and
asks for as much again, page by page: of a pass of 40 ms such pages took 3 to 7.

    step     F F F  I I I  W W W  F F F
    heap     /-----------------\\  /----     given back, and faulted in anew
    kept     /--------------------------

Tensors of more than 32 MiB it would map one by one, whatever is freed: of a step of 2.7 s whose largest have 50 MB, 60,000 to 110,000
faults took 0.1 to 0.2. They come from the heap, too.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of mallopt(3): what is free at the end of the heap when that is given back; which pieces are mapped by themselves, and how many."""
NEVER, NONE = -1, 0
LARGEST_IN_HEAP = 32 << 20
"""Bytes: as far as glibc itself raises the limit above which it maps memory for one piece alone."""
USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES")
"""How the names of environment variables begin that say how memory is kept."""


def keep_freed_memory() -> None:
    """Lets this process keep what it frees; where it has another C library, or its user has said how memory is kept, it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(USERS_OWN) for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_MMAP_MAX, NONE)
        mallopt(M_TRIM_THRESHOLD, NEVER)
