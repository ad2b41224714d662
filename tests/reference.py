"""What every parallel run must equal: plain PyTorch, one process, one undivided batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Optimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """The numbers of a training run.

    Attributes:
        losses: of each step, before it is applied.
        gradients: of the first step, by parameter name.
        state: weights and buffers at the end, as ``state_dict`` names them.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module, loss: Callable[[Any, Any], Any], batches: Sequence[Any], optimizer: Optimizer, clip_norm: float | None = None
) -> Run:
    """Trains an unmodified model, a step per batch."""
    stepper = optimizer(list(model.named_parameters()))
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        stepper.zero_grad()
        value = loss_value(loss(call(model, batch), batch))
        value.backward()
        losses.append(float(value.detach()))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip_norm)
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        stepper.step()
    return Run(losses, gradients, {name: value.detach().clone() for name, value in model.state_dict().items()})


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a mapping by keyword, a tuple by position, what `forward` does not take left out."""
    takes = model.forward.__code__.co_varnames[1 : model.forward.__code__.co_argcount]
    if isinstance(batch, Mapping):
        return model(**{name: value for name, value in batch.items() if name in takes})
    return model(*batch[: len(takes)])


def loss_value(result: Any) -> Tensor:
    """A loss, or the quotient of a (sum, weight)."""
    return result[0] / result[1] if isinstance(result, tuple) else result


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference, relative to the expected tensor's largest magnitude, or to `floor` if that is larger.

    A floor keeps what is zero but for rounding (a key's bias under softmax) from being compared digit by digit.
    """
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), floor)
    difference = float((found.double() - expected.double()).abs().max())
    return difference / scale if scale > 0 else difference


def gradient_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Error of each gradient; the floor is a thousandth of the largest of all."""
    largest = max((float(value.abs().max()) for value in expected.values()), default=0.0)
    names = {*found, *expected}
    return {
        name: relative_error(found[name], expected[name], 1e-3 * largest) if name in found and name in expected else float("inf")
        for name in names
    }


def largest_error(found: Run, expected: Run) -> tuple[float, str]:
    """The largest error of two runs and where it is."""
    errors = {
        f"loss of step {i}": relative_error(torch.tensor(a), torch.tensor(b))
        for i, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True))
    }
    errors |= {f"gradient of {name}": error for name, error in gradient_errors(found.gradients, expected.gradients).items()}
    assert list(found.state) == list(expected.state), (list(found.state), list(expected.state))
    errors |= {name: relative_error(found.state[name], value) for name, value in expected.state.items()}
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where
