"""Trains a ResNet over very many classes: the backbone copied on every device, its wide last layer split over the same devices.

    python examples/split_classifier.py
    whale run --ranks 2 examples/split_classifier.py
    whale run --ranks 2 examples/split_classifier.py --classes 100000 --steps 20 --print-every 5
    whale plan examples/split_classifier.py:build --cluster strategies/clusters/v100_t4.yaml --arg classes=100000 --arg depth=50 --explain

With many classes the last layer holds nearly all of the parameters. Copied, its gradient would be synchronised in every step. Split,
each device holds some of the classes, and what travels is the features, their gradients and three numbers per row for the
cross-entropy. The data are made up: each class has a coarse image, a sample is its class's image with noise, and classes are as
unequal in number as words are.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from resnet import DEPTHS, ResNet
from torch import Tensor, nn

import whale

Batch = dict[str, Tensor]
COARSE = 4  # pixels on a side of a class's image, before it is enlarged


class Classifier(nn.Module):
    """A backbone and a layer with one output for each class.

    Args:
        classes: how many there are.
        depth, width, norm: of the `ResNet`.
    """

    def __init__(self, classes: int, depth: int, width: int, norm: str) -> None:
        super().__init__()
        whale.set_default_strategy(whale.replicate())
        self.backbone = ResNet(depth, width, norm)
        with whale.split(name="classes"):
            self.head = nn.Linear(self.backbone.num_features, classes)
        whale.set_default_strategy(None)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[rows, classes]`` of images ``[rows, 3, height, width]``."""
        logits: Tensor = self.head(self.backbone(images))
        return logits


class Samples(torch.utils.data.Dataset[Batch]):
    """Images like those of their classes, the same on every machine.

    Args:
        classes: how many there are.
        number: of samples.
        image: pixels on a side; a multiple of `COARSE`.
    """

    def __init__(self, classes: int, number: int, image: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.multinomial(1 / torch.arange(1, classes + 1), number, replacement=True, generator=generator)
        self.of_classes = torch.randn(classes, 3, COARSE, COARSE, generator=generator)
        self.image = image

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        label = self.labels[index]
        pixels = F.interpolate(self.of_classes[label][None], scale_factor=self.image // COARSE)[0]
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(index))
        return {"images": pixels + 0.5 * noise, "label": label}


def loss_fn(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits, batch["label"])


def build(
    classes: int = 10_000, depth: int = 10, width: int = 16, image: int = 16, norm: str = "group", rows: int = 64
) -> tuple[Classifier, Batch, Callable[[Tensor, Batch], Tensor]]:
    """The model, an example batch and the loss, for ``whale plan examples/split_classifier.py:build``."""
    with torch.device("meta"):
        model = Classifier(classes, depth, width, norm)
    return model, {"images": torch.zeros(rows, 3, image, image), "label": torch.zeros(rows, dtype=torch.int64)}, loss_fn


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    samples = Samples(options.classes, options.steps * options.global_batch_size, options.image)
    engine = whale.parallelize(
        Classifier(options.classes, options.depth, options.width, options.norm),
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
    parser.add_argument("--depth", type=int, default=10, choices=DEPTHS, help="layers of the ResNet")
    parser.add_argument(
        "--width", type=int, default=16, help="channels of its first part; the features are 8 times as many, in bottlenecks 32 times"
    )
    parser.add_argument(
        "--norm", default="group", choices=("group", "batch"), help="batch: by the rows that a device has, so numbers depend on the plan"
    )
    parser.add_argument("--image", type=int, default=16, help=f"pixels on a side, a multiple of {COARSE}")
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--print-every", type=int, default=20, help="steps between printed losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
