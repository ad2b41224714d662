"""Freed memory stays with a rank: what is asked for again brings no new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from whale.comm.heap import USERS_OWN

PROGRAM = """
import ctypes, resource
from whale.comm.heap import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def pass_over(pieces: int) -> None:
    held = [libc.malloc(1 << 20) for _ in range(pieces)]
    for piece in held:
        ctypes.memset(piece, 1, 1 << 20)
    for piece in reversed(held):
        libc.free(piece)

keep_freed_memory()
pass_over(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
pass_over(64)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 64 * 256


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
@pytest.mark.parametrize(
    ("variables", "keeps"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, False)], ids=["kept", "the user's word"]
)
def test_what_was_freed_is_there_for_the_next_pass(variables: dict[str, str], keeps: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(USERS_OWN)} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    new_pages = int(done.stdout)
    assert new_pages < PAGES // 8 if keeps else new_pages > PAGES // 2
