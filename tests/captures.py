"""Models that are built and captured once, and served to `whale.parallelize` as often as tests need them.

    made = captured_once(build, description, 0)                # where it is called first: the source of ranks
    with made.at_hand():                                       # in each rank
        whale.parallelize(made.model, loss=made.loss, batch=made.batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import whale.api.mode
from whale.capture import Program, capture
from whale.ir.graph import ModelGraph


class Captured:
    """A model and the captures of it that have been made so far.

    Attributes:
        model, batch, loss: what a builder makes.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> None:
        self.model, self.batch, self.loss = model, batch, loss
        self._made: dict[tuple[Any, ...], tuple[ModelGraph, Program]] = {}

    def capture(self, mode: str = "train", batch: Any = None) -> tuple[ModelGraph, Program]:
        """The capture in a mode, of the model's own batch or of one like another."""
        return self._given(self.model, self.batch if batch is None else batch, self.loss, mode=mode)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Whoever captures this very model meanwhile is given what has been made already."""
        with mock.patch.object(whale.api.mode, "capture", self._given):
            yield

    def _given(self, model: nn.Module, batch: Any, loss: Any, *, mode: Any, static: bool = False) -> tuple[ModelGraph, Program]:
        if model is not self.model or loss is not self.loss:
            return capture(model, batch, loss, mode=mode, static=static)
        key = mode, static, _form(batch)
        if key not in self._made:
            self._made[key] = capture(model, batch, loss, mode=mode, static=static)
        return self._made[key]


@lru_cache(maxsize=256)
def captured_once(builder: Callable[..., tuple[Any, ...]], *arguments: Any) -> Captured:
    """What a builder makes of these arguments, captured for training: one value per process, and per process forked from it."""
    made = Captured(*builder(*arguments))
    made.capture()
    return made


def _form(batch: Any) -> str:
    """What a capture depends on in a batch."""
    return str(pytree.tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, batch))
