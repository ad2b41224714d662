"""Random numbers of its own for what reads a sample: Python's, NumPy's and torch's, and the caller's as they were afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class OwnNumbers:
    """The global random numbers, while they are lent."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")  # who draws from it has imported it
        self._before = self._state()
        self._seeded = self._before

    def seed(self, number: int) -> None:
        """Seeds all of them."""
        random.seed(number)
        torch.default_generator.manual_seed(number)
        if self._numpy is not None:
            self._numpy.random.seed(number % 2**32)
        self._seeded = self._state()

    def were_drawn(self) -> bool:
        """Whether somebody drew since they were seeded."""
        (python, of_torch, numpy), now = self._seeded, self._state()
        is_same = numpy is None or (numpy[2:] == now[2][2:] and (numpy[1] == now[2][1]).all())
        return not (is_same and python == now[0] and torch.equal(of_torch, now[1]))

    def put_back(self) -> None:
        """Puts them back as they were when they were lent."""
        random.setstate(self._before[0])
        torch.default_generator.set_state(self._before[1])
        if self._numpy is not None:
            self._numpy.random.set_state(self._before[2])

    def _state(self) -> tuple[Any, torch.Tensor, Any]:
        numpy = None if self._numpy is None else self._numpy.random.get_state()
        return random.getstate(), torch.default_generator.get_state(), numpy


@contextmanager
def own_random_numbers() -> Iterator[OwnNumbers]:
    """Lends the global random numbers, and puts them back at the end."""
    numbers = OwnNumbers()
    try:
        yield numbers
    finally:
        numbers.put_back()
