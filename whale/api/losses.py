"""Losses that take the output and a target, as torch's do, called with the one part of the batch that the model leaves over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from whale.capture.exporting.wrapper import call_arguments
from whale.errors import ConfigError

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_loss(loss: Callable[..., Any] | None, model: nn.Module, batch: Any) -> Callable[..., Any] | None:
    """The loss as it is called, ``loss(output, batch)``.

    One whose second argument is called ``target`` (`torch.nn.CrossEntropyLoss()`, `torch.nn.functional.mse_loss`) gets the part of
    the batch that the model's forward does not take.

    Args:
        loss: the user's.
        model: the user's.
        batch: the example.

    Raises:
        ConfigError: there is no such part, or there are several; or torch's loss takes something else.
        BatchError: the batch lacks what forward requires.
    """
    takes = _arguments(loss)
    name = getattr(loss, "__name__", type(loss).__name__)
    if takes[1:2] != ["target"]:
        if isinstance(loss, _Loss):
            raise _told(f"{name} takes ({', '.join(takes)})", name, takes[1:])
        return loss
    assert loss is not None
    left = _left_over(model, batch)
    if len(left) != 1:
        listing = ", ".join(map(repr, left)) or "none"
        raise _told(
            f"{name} takes the output and one target, the part of the batch that forward leaves over (left over: {listing})",
            name,
            takes[1:2],
        )
    key = left[0]

    def of_target(output: Any, batch: Any) -> Any:
        return loss(output, batch[key])

    return of_target


def _told(message: str, name: str, wanted: list[str]) -> ConfigError:
    parts = ", ".join(f"batch[{each!r}]" for each in wanted)
    return ConfigError(
        f"loss(output, batch) is called with the whole batch: {message}", hint=f"loss=lambda output, batch: {name}(output, {parts})"
    )


def _arguments(loss: Callable[..., Any] | None) -> list[str]:
    """Names of the arguments that a loss takes by position; none where that cannot be told."""
    if loss is None:
        return []
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in _BY_POSITION]


def _left_over(model: nn.Module, batch: Any) -> list[Any]:
    """Keys, or positions, of the tensors of a batch that the model does not take."""
    args, kwargs = call_arguments(model, batch)
    if isinstance(batch, Mapping):
        return [key for key, value in batch.items() if key not in kwargs and isinstance(value, Tensor)]
    return list(range(len(args), len(batch))) if isinstance(batch, (tuple, list)) else []
