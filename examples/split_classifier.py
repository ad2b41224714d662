"""Trains a classifier over very many classes: a small backbone copied on every device, its wide last layer split over them.

    python examples/split_classifier.py
    whale run --ranks 2 examples/split_classifier.py
    whale explain examples/split_classifier.py:build --cluster strategies/clusters/a100_8.yaml --arg classes=100000

With many classes the last layer holds nearly all of the parameters. Copied, its gradient would be synchronised in every step. Split,
each device holds some of the classes, and what travels is the features, their gradients and three numbers per row for the
cross-entropy. The data are made up: each class has a centre, a sample is its class's centre with noise, and classes are as
unequal in number as words are.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale

Batch = dict[str, Tensor]
FEATURES = 32


class Classifier(nn.Module):
    """A backbone and a layer with one output for each class.

    Args:
        classes: how many there are.
        width: features that the backbone makes.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        whale.set_default_strategy(whale.replicate())
        self.backbone = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        with whale.split(name="classes"):
            self.head = nn.Linear(width, classes)
        whale.set_default_strategy(None)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[rows, classes]`` for samples ``[rows, FEATURES]``."""
        logits: Tensor = self.head(self.backbone(x))
        return logits


class Samples(torch.utils.data.Dataset[Batch]):
    """Samples around the centres of their classes, the same on every machine.

    Args:
        classes: how many there are.
        number: of samples.
    """

    def __init__(self, classes: int, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.multinomial(1 / torch.arange(1, classes + 1), number, replacement=True, generator=generator)
        centres = torch.randn(classes, FEATURES, generator=generator)
        self.x = centres[self.labels] + 0.2 * torch.randn(number, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "label": self.labels[index]}


def loss_fn(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits, batch["label"])


def build(classes: int = 10_000, width: int = 128, rows: int = 64) -> tuple[Classifier, Batch, Callable[[Tensor, Batch], Tensor]]:
    """The model, an example batch and the loss, for ``whale plan examples/split_classifier.py:build``."""
    with torch.device("meta"):
        model = Classifier(classes, width)
    return model, {"x": torch.zeros(rows, FEATURES), "label": torch.zeros(rows, dtype=torch.int64)}, loss_fn


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    samples = Samples(options.classes, options.steps * options.global_batch_size)
    engine = whale.parallelize(
        Classifier(options.classes, options.width),
        loss=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        batch=torch.utils.data.default_collate([samples[index] for index in range(options.global_batch_size)]),
    )
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_: None
    say(engine.plan)
    for batch in engine.loader(samples, global_batch_size=options.global_batch_size):
        loss = engine.step(batch)
        if engine.step_number % options.print_every == 0 or engine.step_number == 1:
            say(f"step {engine.step_number}: loss {float(loss):.3f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--classes", type=int, default=10_000, help="outputs of the last layer")
    parser.add_argument("--width", type=int, default=128, help="features that the backbone makes")
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--print-every", type=int, default=20, help="steps between printed losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
