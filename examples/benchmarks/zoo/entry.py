"""One model of the zoo: how to build it, a batch for it, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A tiny model with random weights, as somebody would train it.

    Attributes:
        name: ``library/model``.
        build: makes the model; torch is seeded before.
        batch: makes a batch of so many rows, of floats in float32; torch is seeded before.
        loss: ``loss(output, batch)``; None takes the output's own ``loss``.
        single: whether the model knows no float64.
        rate: of the plain gradient descent.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Any] | None = None
    single: bool = False
    rate: float = 0.01

    def model(self) -> nn.Module:
        """The model in training, in the precision that it is compared in, without dropout."""
        torch.manual_seed(0)
        model = without_dropout(self.build()).train()
        return model if self.single else model.double()

    def example(self, rows: int, seed: int) -> Batch:
        """A batch in the model's precision."""
        torch.manual_seed(seed)
        return {name: value if self.single else in_double(value) for name, value in self.batch(rows).items()}


def in_double(value: Any) -> Any:
    """Floats in float64, all else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


DROPS = (
    "p",
    "drop_prob",
    "drop_rate",
    "dropout",
    "dropout_p",
    "dropout_prob",
    "attention_dropout",
    "activation_dropout",
    "attn_drop",
    "layerdrop",
)
"""Attributes by which modules of dropout, of stochastic depth and attention know how often they drop."""


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability to drop something at zero."""
    for module in model.modules():
        names = DROPS if "drop" in type(module).__name__.lower() or "depth" in type(module).__name__.lower() else DROPS[1:]
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def tokens(rows: int, length: int = 8, vocabulary: int = 64, first: int = 4) -> Tensor:
    """Random token numbers, without the special ones before the first."""
    return torch.randint(first, vocabulary, (rows, length))


def masked_labels(ids: Tensor, ignored: int = -100) -> Tensor:
    """Labels with another number of ignored positions in every row."""
    labels = ids.clone()
    labels[torch.rand(labels.shape) < 0.3] = ignored
    labels[:, 1] = ids[:, 1]
    return labels


def padding_mask(rows: int, length: int = 8) -> Tensor:
    """1 for tokens, 0 for padding at the end, in every other row."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[::2, -2:] = 0
    return mask


def classes(rows: int, count: int = 5) -> Tensor:
    """A class per row."""
    return torch.randint(0, count, (rows,))


def images(rows: int, size: int = 32, channels: int = 3) -> Tensor:
    """Random images."""
    return torch.randn(rows, channels, size, size)


def image_classes(size: int = 32, channels: int = 3, name: str = "x") -> Callable[[int], Batch]:
    """Batches of images with classes, for an argument of this name."""
    return lambda rows: {name: images(rows, size, channels), "labels": classes(rows)}


def class_loss(output: Any, batch: Any) -> Tensor:
    """Cross-entropy of class scores."""
    return nn.functional.cross_entropy(output, batch["labels"])
