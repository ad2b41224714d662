"""What is changed on the user's model for the time of a capture, and put back: training flags, momenta and parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from whale.capture.exporting.wrapper import Mode


@contextlib.contextmanager
def training_flags(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Sets the modules' training flags as a mode wants them.

    In ``train`` the flags of a model that is in training stay as the user set them: a frozen BatchNorm stays in eval.
    """
    before = {module: module.training for module in model.modules()}
    if mode != "train":
        model.eval()
    elif not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextlib.contextmanager
def marked_averages(model: nn.Module) -> Iterator[Mapping[float, str]]:
    """Sets a mark as the momentum of batch normalisations that average over all batches, whose own is one over their counter.

    They read the counter as a number, which is not known in a capture; `whale.capture.flat.flatten` writes it in the place of the mark.

    Yields:
        Per mark, the name of the counter.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm) and _averages_all(module)}
    marks = {-1.0 - number: name for number, name in enumerate(norms)}
    for mark, name in marks.items():
        norms[name].momentum = mark
    try:
        yield {mark: f"{name}.num_batches_tracked".removeprefix(".") for mark, name in marks.items()}
    finally:
        for norm in norms.values():
            norm.momentum = None


def _averages_all(norm: _BatchNorm) -> bool:
    return norm.momentum is None and norm.num_batches_tracked is not None


@contextlib.contextmanager
def fake_tensors(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Puts fake tensors in the place of a model's parameters, buffers and its other tensors on the meta device."""
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items(), *_meta_attributes(module)]:
                if tensor is not None:
                    replaced.append((module, name, tensor))
                    setattr(module, name, fake(tensor))
        yield
    finally:
        for module, name, tensor in replaced:
            setattr(module, name, tensor)


def _meta_attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor) and value.device.type == "meta"]


class Faker:
    """Makes fake tensors of one mode; equal tensors stay equal, and what is on meta becomes fake CPU."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (self._make(tensor), tensor)  # the original is kept so that its id stays its own
        return self._made[id(tensor)][0]

    def _make(self, tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
