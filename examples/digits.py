"""Lightning on the devices of a plan: handwritten digits of scikit-learn.

    whale run --ranks 2 examples/digits.py
    python examples/digits.py --plain          the same with Lightning's own strategy, in one process

The two differ by `strategy=`.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from whale.integrations.lightning import WhaleStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        output = self.layers(images)
        self.log_dict({"val_loss": F.cross_entropy(output, labels), "accuracy": (output.argmax(1) == labels).float().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="Lightning's own strategy in place of WhaleStrategy")
    parser.add_argument("--epochs", type=int, default=5, help="default 5")
    parser.add_argument("--output", default="checkpoints/digits", help="folder of the checkpoints")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="go on from a checkpoint")
    options = parser.parse_args()

    lightning.seed_everything(0)
    found = load_digits()
    samples = TensorDataset(torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target))
    train, held_out = random_split(samples, [1500, 297])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="auto" if options.plain else WhaleStrategy(),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.output, monitor="val_loss", save_last=True)],
        default_root_dir=options.output,
        log_every_n_steps=10,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=297), ckpt_path=options.resume)
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
