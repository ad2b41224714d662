"""Random numbers of its own for what reads a sample: Python's, NumPy's and torch's, and the caller's as they were afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_random_numbers() -> Iterator[Callable[[int], None]]:
    """Lends the global random numbers: gives a function that seeds them, and puts them back at the end."""
    numpy = sys.modules.get("numpy")  # who draws from it has imported it
    before = random.getstate(), torch.default_generator.get_state(), None if numpy is None else numpy.random.get_state()

    def seed(number: int) -> None:
        random.seed(number)
        torch.default_generator.manual_seed(number)
        if numpy is not None:
            numpy.random.seed(number % 2**32)

    try:
        yield seed
    finally:
        random.setstate(before[0])
        torch.default_generator.set_state(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])
