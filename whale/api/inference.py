"""Verbs that work where their caller is in `torch.inference_mode`: what they make is trained on, or kept, so none may be of that kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def out_of_inference_mode(verb: Callable[P, T]) -> Callable[P, T]:
    """Leaves the mode for as long as a verb runs; there optimizers would write to weights that autograd knows nothing of."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return verb(*args, **kwargs)
        with torch.inference_mode(False):
            return verb(*args, **kwargs)

    return call


def usable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that autograd may keep: itself, or a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
