"""What every parallel run must equal: plain PyTorch, one process, one undivided batch."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

Optimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """The numbers of a training run.

    Attributes:
        losses: of each step, before it is applied.
        gradients: of the first step, by parameter name.
        state: weights and buffers at the end, as ``state_dict`` names them.
        evaluation: the loss of the first batch in eval mode, at the end; None where it was not asked for.
        prediction: the tensors of the model's output for it, likewise.
        norms: of all gradients of each step before they are clipped; empty where they are not.
        averaged: the state with moving averages of weights, at the end; empty where none are kept.
        averaged_evaluation: the loss of the first batch in eval mode by them; None likewise.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None
    prediction: tuple[Tensor, ...] = ()
    norms: tuple[float, ...] = ()
    averaged: dict[str, Tensor] = field(default_factory=dict)
    averaged_evaluation: float | None = None


def train(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    optimizer: Optimizer,
    clip_norm: float | None = None,
    num_accumulated: int = 1,
    decay: float | None = None,
) -> Run:
    """Trains an unmodified model, a step per batch, or by the mean of the gradients of so many; with averages of its weights by a decay."""
    average = None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    stepper = optimizer(list(model.named_parameters()))
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        if number % num_accumulated == 0:
            stepper.zero_grad()
        value = loss_value(loss(call(model, batch), batch))
        value.backward()
        losses.append(float(value.detach()))
        if num_accumulated > 1 and number == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if (number + 1) % num_accumulated:
            continue
        for p in model.parameters() if num_accumulated > 1 else ():
            if p.grad is not None:
                p.grad /= num_accumulated
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip_norm)))
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        if average is not None:
            average.update_parameters(model)
    run = Run(losses, gradients, copy_of(model.state_dict()), norms=tuple(norms))
    if average is None:
        return run
    if not average.n_averaged:
        average.update_parameters(model)
    return replace(
        run, averaged=copy_of(average.module.state_dict()), averaged_evaluation=evaluate(copy.deepcopy(average.module), loss, batches[0])[0]
    )


def evaluate(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> tuple[float, tuple[Tensor, ...]]:
    """The loss of a batch in eval mode, and the tensors of the model's output."""
    model.eval()
    with torch.no_grad():
        output = call(model, batch)
        return float(loss_value(loss(output, batch))), tensors_of(output)


Pieces = Sequence[Sequence[Sequence[tuple[int, int]]]]
"""Per step and device, the intervals of rows that it takes, one after another."""


def train_in_pieces(model: nn.Module, loss: Callable[[Any, Any], Any], batches: Sequence[Any], pieces: Pieces, optimizer: Optimizer) -> Run:
    """Trains on pieces of each batch, as batch normalisation sees them; each device keeps running statistics of its own.

    What counts (an integer) moves once per step. At the end they are averaged by the rows that each device saw in the last step.

    Args:
        loss: returns (sum, weight).
    """
    stepper = optimizer(list(model.named_parameters()))
    kept = [copy_of(dict(model.named_buffers())) for _ in pieces[0]]
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for number, (batch, devices) in enumerate(zip(batches, pieces, strict=True)):
        stepper.zero_grad()
        total, weight = 0.0, 0.0
        for own, intervals in zip(kept, devices, strict=True):
            restore(model, own)
            counted: dict[str, Tensor] = {}
            for start, stop in intervals:
                piece = rows_of(batch, start, stop)
                summed, rows = loss(call(model, piece), piece)
                summed.backward()
                total, weight = total + float(summed.detach()), weight + float(rows)
                counted = counted or {name: b.clone() for name, b in model.named_buffers() if not b.is_floating_point()}
            own.update(copy_of(dict(model.named_buffers())) | counted)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        losses.append(total / weight)
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        stepper.step()
    shares = [sum(stop - start for start, stop in intervals) for intervals in pieces[-1]]
    merged = {name: sum(own[name] * n for own, n in zip(kept, shares, strict=True)) / sum(shares) for name in kept[0]}
    restore(model, merged)
    return Run(losses, gradients, copy_of(model.state_dict()))


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Some rows of a batch; what has one row only stays whole."""

    def shard(value: Tensor) -> Tensor:
        return value if value.shape[0] == 1 else value[start:stop]

    return {name: shard(value) for name, value in batch.items()} if isinstance(batch, Mapping) else tuple(shard(value) for value in batch)


def restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Puts values into a model's buffers."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def copy_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in memory of their own."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors of a model's output."""
    return tuple(value.detach().clone() for value in pytree.tree_leaves(output) if isinstance(value, Tensor))


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a mapping by keyword, a tuple by position, what `forward` does not take left out."""
    parameters = inspect.signature(model.forward).parameters
    takes = list(parameters)
    if isinstance(batch, Mapping):
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        return model(**{name: value for name, value in batch.items() if takes_all or name in takes})
    return model(*batch[: len(takes)])


def loss_value(result: Any) -> Tensor:
    """A loss, or the quotient of a (sum, weight)."""
    return result[0] / result[1] if isinstance(result, tuple) else result


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)  # what has diverged is still a number there


def _exact(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.double()


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference, relative to the expected tensor's largest magnitude, or to `floor` if that is larger.

    A floor keeps what is zero but for rounding (a key's bias under softmax) from being compared digit by digit.
    What is not a number differs from all numbers.
    """
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), floor)
    difference = float((_exact(found) - _exact(expected)).abs().max())
    if math.isnan(difference):
        return float("inf")
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
        f"loss of step {i}": relative_error(_number(a), _number(b))
        for i, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True))
    }
    if found.norms:
        norms, expected_norms = (torch.tensor(own.norms, dtype=torch.float64) for own in (found, expected))
        errors["norms of the gradients"] = relative_error(norms, expected_norms)
    errors |= {f"gradient of {name}": error for name, error in gradient_errors(found.gradients, expected.gradients).items()}
    assert list(found.state) == list(expected.state), (list(found.state), list(expected.state))
    floor = 1e-3 * max((float(value.abs().max()) for value in expected.state.values() if value.numel()), default=0.0)
    errors |= {name: relative_error(found.state[name], value, floor) for name, value in expected.state.items()}
    errors |= {f"average of {name}": relative_error(found.averaged[name], value, floor) for name, value in expected.averaged.items()}
    if expected.averaged_evaluation is not None and found.averaged_evaluation is not None:
        errors["averaged evaluation"] = relative_error(_number(found.averaged_evaluation), _number(expected.averaged_evaluation))
    if expected.evaluation is not None and found.evaluation is not None:
        errors["evaluation"] = relative_error(_number(found.evaluation), _number(expected.evaluation))
        for index, (a, b) in enumerate(zip(found.prediction, expected.prediction, strict=True)):
            errors[f"prediction {index}"] = relative_error(a, b)
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where
