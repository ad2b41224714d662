"""The loss that `step` and `evaluate` return: a number of a pass that is over, and what is asked of it that it cannot do.

Plain loops call ``loss.backward()``, or scale the loss first (``scaler.scale(loss)``, ``loss / 4``). Here that is an error that says
what the step has done. To everything else it is a plain tensor, and so is what comes out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from whale.errors import ConfigError

_DIFFERENTIATING = frozenset({torch.Tensor.backward, torch.autograd.grad})
_SCALING = frozenset({torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.div, torch.Tensor.__truediv__})


class StepLoss(torch.Tensor):
    """A 0-dim tensor without a graph behind it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DIFFERENTIATING:
            raise ConfigError(
                "engine.step runs backward and the optimizer itself (backward was asked of the loss that it, or engine.evaluate, returned)",
                hint="leave out loss.backward(), optimizer.step() and a GradScaler; engine.gradients() has the gradients of the step",
            )
        plain_args, plain_kwargs = pytree.tree_map_only(StepLoss, _as_plain, (args, dict(kwargs or {})))
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            raise ConfigError(
                "the loss of a step has no graph to train through (it was put together with a tensor that requires a gradient)",
                hint="add what is to be trained to the loss= of parallelize, or take loss.detach() where the number is meant",
            )
        return step_loss(result) if func in _SCALING else result


def _as_plain(loss: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(torch.Tensor)


def step_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss as it is handed to the user; a tensor that is of a class of its own already stays of it."""
    return loss.as_subclass(StepLoss) if type(loss) is torch.Tensor else loss
