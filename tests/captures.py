"""Models that are built and captured once, and served to `whale.parallelize` as often as tests need them.

    made = captured_once(builder, argument)      # first where ranks are forked from, then, at once, in each rank
    whale.parallelize(made.model, loss=made.loss, batch=made.batch)

`at_hand` is around everything that ranks do. A model that a rank builds by itself is captured there, as users do it; `alike` is for
tests in one process that need a model of their own each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from torch import nn

import whale.api.mode
from tests.counts import count
from whale.capture import BatchStructure, CapturedProgram, capture
from whale.capture.flat.sizes import holdings
from whale.ir.graph import ModelGraph
from whale.ir.precision import Precision


def counted(*arguments: Any, **more: Any) -> tuple[ModelGraph, CapturedProgram]:
    """A capture, which is counted (`tests.counts`)."""
    count("captures")
    return capture(*arguments, **more)


def count_all() -> None:
    """From now on the captures of `whale.parallelize` in this process are counted, and in those forked from it."""
    whale.api.mode.capture = counted  # type: ignore[attr-defined]


class Captured:
    """A model and the captures of it that have been made so far.

    Attributes:
        model, batch, loss: what a builder makes; to be left as they are, except in a rank.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> None:
        self.model, self.batch, self.loss = model, batch, loss
        self._made: dict[tuple[Any, ...], tuple[ModelGraph, CapturedProgram]] = {}

    def capture(
        self, mode: str = "train", batch: Any = None, static: bool = False, precision: Precision | None = None
    ) -> tuple[ModelGraph, CapturedProgram]:
        """The capture in a mode, for batches like the model's own or like another."""
        batch = self.batch if batch is None else batch
        structure = batch if isinstance(batch, BatchStructure) else BatchStructure.of(batch, 1 if static else 2)
        key = mode, static, structure, precision
        if key not in self._made:
            self._made[key] = counted(
                self.model,
                structure,
                self.loss,
                mode=mode,
                static=static,
                device="cpu",
                precision=precision,
            )
        return self._made[key]


_FOUND: WeakKeyDictionary[nn.Module, Captured] = WeakKeyDictionary()


@lru_cache(maxsize=64)
def captured_once(builder: Callable[..., tuple[Any, ...]], *arguments: Any) -> Captured:
    """What a builder makes of these arguments, captured for training: once in a process and in those forked from it."""
    made = Captured(*builder(*arguments))
    made.capture()
    _FOUND[made.model] = made
    return made


def alike(made: Captured, model: nn.Module) -> nn.Module:
    """A model that was built just as the captured one, and is served with what is captured of that one; returns it."""
    _FOUND[model] = made
    return model


def changed(model: nn.Module) -> None:
    """Has a model that was changed captured as it is now."""
    _FOUND.pop(model, None)


@contextmanager
def at_hand() -> Iterator[None]:
    """Whoever captures one of these models meanwhile is given what has been made already."""

    def given(
        model: nn.Module, batch: Any, loss: Any, *, mode: Any, static: bool = False, batch_dims: Any = None, **compute: Any
    ) -> tuple[ModelGraph, CapturedProgram]:
        made = _FOUND.get(model)
        if made is None or loss is not made.loss or batch_dims:
            return counted(model, batch, loss, mode=mode, static=static, batch_dims=batch_dims, **compute)
        graph, program = made.capture(mode, batch, static, compute.get("precision"))
        return graph, program if model is made.model else replace(program, tensors={**program.tensors, **holdings(model).tensors})

    with mock.patch.object(whale.api.mode, "capture", given):
        yield
