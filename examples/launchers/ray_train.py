"""A training by Ray Train: Ray starts the workers and joins them in a process group, which Whale takes up.

    python examples/launchers/ray_train.py --workers 2

It needs `pip install "ray[train]"`. Workers with GPUs: `use_gpu=True`, and `backend="cpu:gloo,cuda:nccl"`, for Whale sends settings and
batches between hosts' memories too.
"""

from __future__ import annotations

import argparse
from functools import partial

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import whale


def train(settings: dict[str, float]) -> None:
    """What every worker does: an ordinary script of Whale's."""
    torch.manual_seed(0)  # every rank makes the same model and the same batch
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    batch = {"input": torch.randn(8, 16), "label": torch.randint(4, (8,))}
    engine = whale.parallelize(
        model,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["label"]),
        optimizer=partial(torch.optim.AdamW, lr=settings["lr"]),
        batch=batch,
    )
    for _ in range(10):
        loss = engine.step(batch)
        ray.train.report({"step": engine.step_number, "loss": float(loss)})  # by every worker, as Ray asks
        if engine.rank == 0:
            print(f"step {engine.step_number}: loss {loss:.4f}")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-2},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=False),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
