"""Freed memory stays with a rank: what is asked for again brings no new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from whale.comm.world import USERS_OWN

PROGRAM = """
import ctypes, resource, sys
from whale.comm.world import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def pass_over(pieces: int, num_bytes: int) -> None:
    held = [libc.malloc(num_bytes) for _ in range(pieces)]
    for piece in held:
        ctypes.memset(piece, 1, num_bytes)
    for piece in reversed(held):
        libc.free(piece)

keep_freed_memory()
sizes = tuple(map(int, sys.argv[1:]))
pass_over(*sizes)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
pass_over(*sizes)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 64 * 256
LARGE = 40 << 20
"""Bytes of a piece that glibc would map by itself, whatever is set."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
@pytest.mark.parametrize(
    ("variables", "sizes", "keeps"),
    [({}, (64, 1 << 20), True), ({}, (4, LARGE), True), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, (64, 1 << 20), False)],
    ids=["kept", "large pieces, too", "the user's word"],
)
def test_what_was_freed_is_there_for_the_next_pass(variables: dict[str, str], sizes: tuple[int, int], keeps: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(USERS_OWN)} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, sizes)], env=environment, check=True, capture_output=True, text=True)
    new_pages = int(done.stdout)
    assert new_pages < PAGES // 8 if keeps else new_pages > PAGES // 2
