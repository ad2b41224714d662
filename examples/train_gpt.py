"""Trains a byte-level GPT on the source text of the Python standard library found on this machine.

    python examples/train_gpt.py
    whale run --ranks 4 --recipe strategies/recipes/pipeline_data_parallel.yaml examples/train_gpt.py
    whale run --ranks 8 --recipe strategies/recipes/gpt_3d.yaml examples/train_gpt.py --stages 2 --split 2 --steps 20
    whale plan examples/train_gpt.py:build --cluster strategies/clusters/v100_t4.yaml

The same script runs on one device and on many: which device does what is the plan's affair.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpt import GPT, loss_fn
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from text import SourceText
from torch import Tensor

import whale

Batch = dict[str, Tensor]


def build(
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    stages: int = 0,
    split: int = 1,
    axis: str | None = None,
    rows: int = 32,
) -> tuple[GPT, Batch, Callable[[Tensor, Batch], Tensor]]:
    """The model, an example batch and the loss, for ``whale plan examples/train_gpt.py:build``."""
    with torch.device("meta"):  # planning needs shapes, not weights: any size fits on any machine
        model = GPT(layers, width, heads, context, stages, split, axis)
    ids = torch.zeros(rows, context, dtype=torch.int64)
    return model, {"ids": ids, "targets": ids}, loss_fn


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context, options.stages, options.split, options.axis)
    train, held_out = SourceText(options.context), SourceText(options.context, held_out=True)
    example = torch.utils.data.default_collate([train[index] for index in range(options.global_batch_size)])
    engine = whale.parallelize(
        model,
        loss=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate, weight_decay=0.1, betas=(0.9, 0.95)),
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=Warmup(options.steps)),
        batch=example,
    )
    report = Report(options, engine.plan)
    if options.resume:
        engine.resume(options.checkpoint)
    loader = engine.loader(train, global_batch_size=options.global_batch_size, shuffle=True, seed=options.seed)
    with report:
        while engine.step_number < options.steps:
            for batch in itertools.islice(loader, options.steps - engine.step_number):
                report.step(engine.step_number + 1, engine.step(batch))
                if engine.step_number % options.evaluate_every == 0 or engine.step_number == options.steps:
                    report.evaluation(engine.step_number, evaluate(engine, held_out, options))
                    if options.checkpoint is not None:
                        engine.save(options.checkpoint / f"step_{engine.step_number}")
    report.end()


def evaluate(engine: whale.Engine, held_out: SourceText, options: argparse.Namespace) -> float:
    """Mean loss over the first held-out windows, in nats per byte; the same on all ranks."""
    losses = []
    for number in range(options.evaluate_batches):
        rows = range(number * options.global_batch_size, (number + 1) * options.global_batch_size)
        batch = torch.utils.data.default_collate([held_out[row % len(held_out)] for row in rows])
        losses.append(float(engine.evaluate(batch)))
    return sum(losses) / len(losses)


@dataclass(frozen=True)
class Warmup:
    """Scale of the learning rate: a linear rise over the first steps, then half a cosine to a tenth."""

    steps: int

    def __call__(self, step: int) -> float:
        rise = max(self.steps // 20, 1)
        if step < rise:
            return (step + 1) / rise
        done = min((step - rise) / max(self.steps - rise, 1), 1.0)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Report:
    """What rank 0 prints: the plan, progress with loss and speed, evaluations."""

    def __init__(self, options: argparse.Namespace, plan: object) -> None:
        self.options = options
        self.shown = os.environ.get("RANK", "0") == "0"
        self.console = Console(quiet=not self.shown, highlight=False, soft_wrap=True)
        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn()
        self.progress = Progress(*columns, console=self.console, disable=not (self.shown and self.console.is_terminal))
        self.task = self.progress.add_task("train", total=options.steps, state="")
        self.say(str(plan))
        self.begin = self.mark = time.perf_counter()
        self.tokens = 0

    def __enter__(self) -> None:
        self.progress.start()

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def step(self, number: int, loss: Tensor) -> None:
        """Counts a step; the loss is read, which waits for the device, only when it is printed."""
        self.tokens += self.options.global_batch_size * self.options.context
        last = number == self.options.steps
        if number % self.options.print_every and not last and number != 1:
            self.progress.update(self.task, completed=number)
            return
        value, now = float(loss), time.perf_counter()
        speed = self.tokens / (now - self.mark)
        self.tokens, self.mark = 0, now
        state = f"loss {value:.3f}, {speed:,.0f} tokens/s"
        self.progress.update(self.task, completed=number, state=state)
        if self.progress.disable or last:
            self.say(f"step {number}: {state}")

    def evaluation(self, number: int, loss: float) -> None:
        self.say(f"step {number}: held-out loss {loss:.3f} ({loss / math.log(2):.2f} bits per byte)")
        self.mark = time.perf_counter()

    def end(self) -> None:
        self.say(f"done in {time.perf_counter() - self.begin:.1f} s")


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    numbers: Mapping[str, tuple[int, str]] = {
        "steps": (200, "optimizer steps, those of a resumed run included"),
        "layers": (4, "blocks"),
        "width": (128, "features of a position"),
        "heads": (4, "attention heads"),
        "context": (128, "bytes of a window"),
        "global-batch-size": (32, "windows of a step, over all ranks"),
        "stages": (0, "pipeline stages, as scopes in the model; 0: the recipe says"),
        "split": (1, "devices that the layers of a stage are divided over"),
        "evaluate-every": (50, "steps between evaluations (and checkpoints)"),
        "evaluate-batches": (4, "batches of an evaluation"),
        "print-every": (10, "steps between printed losses"),
        "seed": (0, "seed of the initial weights"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--axis", help="along which they are divided where they can be, as heads; the plan decides if it is not given")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the folder")
    options = parser.parse_args(words)
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    return options


if __name__ == "__main__":
    main()
