"""Blocks that the model itself asks to compute again in the backward pass, by `torch.utils.checkpoint`: marked on their ops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.fx.traceback
from torch import fx

_KEY = "whale.region"
_numbers: ContextVar[Iterator[int] | None] = ContextVar("whale_region_numbers", default=None)


@contextmanager
def numbered() -> Iterator[None]:
    """Numbers the regions of one capture from 0, so that equal captures give equal numbers."""
    token = _numbers.set(itertools.count())
    try:
        yield
    finally:
        _numbers.reset(token)


@contextmanager
def recomputed() -> Iterator[None]:
    """Marks the ops that are traced inside; inside another region they belong to that."""
    numbers = _numbers.get()
    assert numbers is not None, "a capture numbers the regions"
    current = torch.fx.traceback.current_meta.get("custom") or {}
    with torch.fx.traceback.annotate({} if _KEY in current else {_KEY: next(numbers)}):
        yield


def region_of(node: fx.Node) -> int | None:
    """The region of a node; None outside all."""
    number = (node.meta.get("custom") or {}).get(_KEY)
    assert number is None or isinstance(number, int)
    return number
