"""The memory that the estimate predicts beside what the runtime's own program holds in a dry run, over plans of several models.

    python examples/benchmarks/memory.py

Every device of a plan is an A100-80GB. A dry run (`whale simulate --dry-run`) needs none: operators run for their shapes alone.
Error = (predicted - dry run) / dry run, of the rank where it is largest. Nothing is fitted to the dry runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.api.mode import CapturedMode
from whale.config import Config
from whale.dry_run import dry_run
from whale.hardware import parse_cluster
from whale.planning.plan import plan_and_estimate
from whale.units import format_bytes
from whale.workloads import GPT

SIZES = {"layers": 4, "hidden": 256, "heads": 8, "sequence": 256, "vocabulary": 8192}


def gpt(**more: Any) -> CapturedMode:
    """A GPT of these sizes, or of others."""
    model, batch, loss = GPT(**SIZES | more).built()
    return CapturedMode(model, batch, loss, "train")


class Residual(nn.Module):
    """Two convolutions, added to what they read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    """A stem, two widths of residual blocks, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 32, 7, stride=2, padding=3), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.narrow = nn.Sequential(Residual(32), Residual(32))
        self.wide = nn.Sequential(Residual(64), Residual(64))
        self.head = nn.Linear(64, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1))
        logits: Tensor = self.head(self.wide(F.relu(self.down(x))).mean((2, 3)))
        return logits


class UNet(nn.Module):
    """Down twice and up again, beside what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.at1, self.at2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.at3, self.norm = nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(4, 64)
        self.up2, self.back2 = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(64, 32, 3, padding=1)
        self.up1, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 1000, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.at1(x))
        second = F.silu(self.at2(first))
        lowest = F.silu(self.norm(self.at3(second)))
        joined = F.silu(self.back2(torch.cat([self.up2(lowest), second], 1)))
        logits: Tensor = self.out(torch.cat([self.up1(joined), first], 1)).mean((2, 3))
        return logits


def images(model: Callable[[], nn.Module]) -> CapturedMode:
    """A model of images with its classes."""
    with torch.device("meta"):
        batch = {"x": torch.zeros(4, 3, 64, 64), "y": torch.zeros(4, dtype=torch.int64)}
        return CapturedMode(model(), batch, lambda logits, batch: F.cross_entropy(logits, batch["y"]), "train")


MODELS: dict[str, Callable[[], CapturedMode]] = {
    "GPT": gpt,
    "GPT, wide": lambda: gpt(hidden=1024, heads=16, sequence=64),
    "GPT, bfloat16": lambda: gpt(dtype="bfloat16"),
    "GPT, explicit attention, dropout": lambda: gpt(attention="explicit", dropout=0.1),
    "ResNet": lambda: images(ResNet),
    "UNet": lambda: images(UNet),
}
made = cache(lambda model: MODELS[model]())


@dataclass(frozen=True)
class Case:
    """A plan to ask for.

    Attributes:
        model: its name.
        plan: in words.
        num_devices: that it runs on.
        settings: that make it.
    """

    model: str
    plan: str
    num_devices: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


PIPELINE = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}


def _pipeline(model: str, plan: str, num_devices: int = 2, **settings: Any) -> Case:
    return Case(model, plan, num_devices, PIPELINE | {key.replace("__", "."): value for key, value in settings.items()})


CASES = (
    Case("GPT", "one device"),
    Case("GPT", "data parallel on 4", 4),
    _pipeline("GPT", "1f1b"),
    _pipeline("GPT", "gpipe", pipeline__schedule="gpipe"),
    _pipeline("GPT", "interleaved", pipeline__schedule="interleaved", pipeline__num_chunks=2),
    _pipeline("GPT", "zb_h1", pipeline__schedule="zb_h1"),
    _pipeline("GPT", "1f1b, each block computed again", recompute__policy="blocks"),
    _pipeline("GPT", "recompute_early", pipeline__schedule="recompute_early"),
    _pipeline("GPT", "two pipelines of 1f1b", 4),
    Case("GPT", "split over 2", 2, {"plan": {"split": 2, "replicas": 1}}),
    Case("GPT", "split over 2, cores of attention computed again", 2, {"plan": {"split": 2, "replicas": 1, "recompute": "selective"}}),
    Case("GPT", "1f1b of stages split over 2", 4, {"plan": {"split": 2, "num_stages": 2, "replicas": 1, "micro_batch_rows": 4}}),
    *(Case("GPT", f"data parallel on 4, memory.zero: {zero}", 4, {"memory.zero": zero}) for zero in (1, 2, 3)),
    _pipeline("GPT", "two pipelines of 1f1b, memory.zero: 2", 4, memory__zero=2),
    _pipeline("GPT", "two pipelines of zb_h1, memory.zero: 3", 4, memory__zero=3, pipeline__schedule="zb_h1"),
    Case("GPT, wide", "one device"),
    *(Case("GPT, wide", f"data parallel on 4, memory.zero: {zero}", 4, {"memory.zero": zero}) for zero in (2, 3)),
    _pipeline("GPT, wide", "1f1b"),
    Case("GPT, wide", "split over 2", 2, {"plan": {"split": 2, "replicas": 1}}),
    Case("GPT, bfloat16", "one device"),
    _pipeline("GPT, bfloat16", "1f1b"),
    Case("GPT, explicit attention, dropout", "one device"),
    _pipeline("GPT, explicit attention, dropout", "1f1b, cores of attention computed again", recompute__policy="selective"),
    Case("ResNet", "one device"),
    _pipeline("ResNet", "1f1b"),
    Case("UNet", "one device"),
    _pipeline("UNet", "1f1b"),
)


def run(case: Case, rows: int) -> tuple[int, int, float]:
    """The bytes predicted, those of the dry run, and the error, of the rank where it is largest."""
    mode, config = made(case.model), Config({"planning.search": "off"} | dict(case.settings))
    cluster = parse_cluster(f"hosts: [{{devices: {{model: A100-80GB, count: {case.num_devices}}}}}]\n")
    plan, step = plan_and_estimate(mode.graph, cluster, config, rows=rows)
    uses = [(step.of(names[0]).peak, peak.num_bytes) for names, peak in dry_run(plan, mode, config).peaks]
    found = [(round(use.total - use.communicators), counted) for use, counted in uses]  # a dry run opens none
    predicted, counted = max(found, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return predicted, counted, predicted / counted - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="rows of the global batch")
    options = parser.parse_args()
    print("| model | plan | predicted | dry run | error |\n|---|---|---|---|---|")
    errors = []
    for case in CASES:
        predicted, counted, error = run(case, options.rows)
        errors.append(abs(error))
        print(f"| {case.model} | {case.plan} | {format_bytes(predicted)} | {format_bytes(counted)} | {error:+.1%} |", flush=True)
    print(f"\nmean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, of {len(CASES)} plans")


if __name__ == "__main__":
    main()
