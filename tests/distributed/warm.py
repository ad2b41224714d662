"""What is imported and computed once, before any rank or launcher is forked: seconds that each interpreter would take by itself.

The server of forks (`multiprocessing`'s forkserver) imports this module. It starts no thread and sees no GPU: what is forked after either
could not train.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pkgutil

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import scipy.optimize  # noqa: F401
import torch
import torch.distributed.run
import torch.export

import tests.captures
import tests.models
import whale
from tests.counts import VARIABLE

LARGE = 2 << 20
"""Bytes of a large page."""
MADV_COLLAPSE = 25


def _fold_memory() -> None:
    """Has the kernel keep this process's memory in large pages, where it can (Linux 6.1): a fork then copies a few entries, not 75,000."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as maps:  # no other system has it
        for words in [line.split() for line in maps]:
            start, stop = (int(address, 16) for address in words[0].split("-"))
            first, end = -(-start // LARGE) * LARGE, stop // LARGE * LARGE
            if words[1].startswith("rw") and words[5:] in ([], ["[heap]"]) and first < end:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


for module in pkgutil.walk_packages(whale.__path__, "whale."):
    if not module.name.endswith("__main__") and not module.name.startswith("whale.integrations."):  # which need other libraries
        importlib.import_module(module.name)

if VARIABLE in os.environ:
    tests.captures.count_all()
torch.set_num_threads(1)
with contextlib.redirect_stderr(io.StringIO()):  # what only a first capture and a first plan do
    whale.parallelize(torch.nn.Linear(2, 2), loss=lambda output, batch: output.mean(), batch=torch.ones(2, 2)).close()
gc.collect()
gc.freeze()  # else the first collection of each fork would copy all memory
_fold_memory()
