"""The estimate's memory stands beside what the runtime's own program holds, on plans and models of many kinds: mostly within 2.5 %."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.examples import further
from tests.unit.runtime.test_steps_at_scale import cluster_of
from whale.api.mode import CapturedMode
from whale.config import Config
from whale.dry_run import dry_run
from whale.planning.plan import plan_and_estimate
from whale.workloads import GPT

TOLERANCE = 0.025
KNOWN = (
    # masks of dropout, which are floats on a CPU, and bytes on a GPU
    dict.fromkeys(("dropout", "cores_again", "modules_again", "split_dropout", "away_1f1b"), 0.12)
    # gradients of activations, which autograd adds in place or not
    | {"convolutions": 0.06, "convolutions_1f1b": 0.06, "away_split": 0.06, "split_blocks_again": 0.03, "gathered_stages": 0.07}
)
SHORT: dict[str, Any] = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}
AWAY: dict[str, Any] = {"memory.offload": "activations"}
WHOLE: dict[str, Any] = {"pipeline.num_micro_batch": 1}
BUCKETS: dict[str, Any] = {"communication.bucket_bytes": 1 << 19}
GATHERED: dict[str, Any] = {"memory.zero": 3} | BUCKETS
FREED: dict[str, Any] = {"memory.zero": 2}
ROUNDED: dict[str, Any] = {"gradient.sum_dtype": "bf16"}
CHUNKS: dict[str, Any] = SHORT | {"pipeline.schedule": "interleaved", "pipeline.num_chunks": 2}
PIECES: dict[str, Any] = {"pipeline.num_micro_batch": 2, "replicas": [{"devices": 2, "split": 2}, {"devices": 1}]}
HALVES: dict[str, Any] = {"plan": {"split": 2, "replicas": 2}, "communication.overlap": True}
ZERO_BUBBLE: dict[str, Any] = SHORT | {"pipeline.schedule": "zb_h1"}


class Convolutions(nn.Module):
    """A stem, a residual block, and a branch that is read again further on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.inner, self.down = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.up, self.head = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = F.relu(x + self.inner(x))
        joined = torch.cat([self.up(F.silu(self.down(x))), x], 1)
        logits: Tensor = self.head(joined.mean((2, 3)))
        return logits


class Cast(nn.Module):
    """To another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def _squared(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def _classes(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, batch["y"])


@cache
def captured(kind: str) -> CapturedMode:
    if kind == "convolutions":
        with torch.device("meta"):
            batch = {"x": torch.zeros(4, 3, 64, 64), "y": torch.zeros(4, dtype=torch.int64)}
            return CapturedMode(Convolutions(), batch, _classes, "train")
    if kind == "uneven":  # a large last layer, and norms in another type, which share no bucket with what is between them
        widths = [*[256] * 8, 2500]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
        with torch.device("meta"):
            ends = (nn.LayerNorm(width, dtype=torch.float64) for width in (widths[0], widths[-1]))
            first, last = (nn.Sequential(Cast(torch.float64), norm, Cast(torch.float32)) for norm in ends)
            return CapturedMode(nn.Sequential(first, *layers, last), {"input": torch.zeros(8, widths[0])}, _squared, "train")
    more: dict[str, Any] = {
        "wide": {"hidden": 512, "sequence": 16},
        "bfloat16": {"dtype": "bfloat16", "vocabulary": 4096},
        "explicit": {"attention": "explicit", "dropout": 0.1},
    }
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 512} | more.get(kind, {})
    model, batch, loss = GPT(**sizes).built()
    return CapturedMode(model, batch, loss, "train")


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alone": ("long", 1, WHOLE),
    "wide": ("wide", 1, WHOLE),
    "bfloat16": ("bfloat16", 2, SHORT),
    "data_parallel": ("long", 4, WHOLE),
    "1f1b": ("long", 2, SHORT),
    "gpipe": ("wide", 2, SHORT | {"pipeline.schedule": "gpipe"}),
    "interleaved": ("long", 2, CHUNKS),
    "zero_bubble": ("long", 2, ZERO_BUBBLE),
    "dropout": ("explicit", 1, WHOLE),
    "blocks_again": ("long", 2, SHORT | {"recompute.policy": "blocks"}),
    "cores_again": ("explicit", 2, SHORT | {"recompute.policy": "selective"}),
    "modules_again": ("explicit", 2, SHORT | {"recompute.policy": {"*.qkv": "keep", "blocks.*": "recompute", "*": "keep"}}),
    "stages_again": ("long", 2, SHORT | {"pipeline.schedule": "recompute_early"}),
    "away": ("long", 1, WHOLE | AWAY),
    "away_split": ("long", 2, WHOLE | AWAY | {"plan": {"split": 2, "replicas": 1}}),
    "away_convolutions": ("convolutions", 1, WHOLE | AWAY),
    "replicas": ("wide", 4, SHORT),
    "gathered": ("long", 2, WHOLE | GATHERED),
    "freed": ("long", 4, WHOLE | FREED),
    "freed_of_several": ("wide", 2, {"pipeline.num_micro_batch": 4} | FREED | BUCKETS),
    "rounded": ("wide", 2, WHOLE | ROUNDED),
    "split": ("long", 2, WHOLE | {"plan": {"split": 2, "replicas": 1}}),
    "split_dropout": ("explicit", 2, WHOLE | {"plan": {"split": 2, "replicas": 1}}),
    "nested": ("long", 4, {"plan": {"split": 2, "num_stages": 2, "replicas": 1, "micro_batch_rows": 2}}),
    "convolutions": ("convolutions", 1, WHOLE),
    "convolutions_1f1b": ("convolutions", 2, SHORT),
}
QUICK = ("1f1b", "convolutions", "gathered", "freed")
TOGETHER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "away_1f1b": ("explicit", 2, SHORT | AWAY),
    "away_zero_bubble": ("long", 2, ZERO_BUBBLE | AWAY),
    "away_blocks_again": ("long", 2, SHORT | AWAY | {"recompute.policy": "blocks"}),
    "gathered_by_4": ("long", 4, WHOLE | GATHERED),
    "gathered_at_once": ("long", 4, WHOLE | {"memory.zero": 3}),
    "gathered_again": ("wide", 4, WHOLE | GATHERED | {"recompute.policy": "blocks"}),
    "gathered_stages": ("wide", 4, CHUNKS | GATHERED),
    "gathered_zero_bubble": ("wide", 4, ZERO_BUBBLE | GATHERED),
    "freed_zero_bubble": ("wide", 4, ZERO_BUBBLE | FREED),
    "rounded_zero_bubble": ("wide", 4, ZERO_BUBBLE | ROUNDED),
    "halves": ("wide", 4, WHOLE | HALVES),
    "freed_halves": ("wide", 4, WHOLE | HALVES | FREED | BUCKETS),
    "pieces": ("wide", 3, PIECES),
    "freed_pieces": ("wide", 3, PIECES | FREED),
    "gathered_uneven": ("uneven", 4, WHOLE | GATHERED),
    "freed_uneven": ("uneven", 2, WHOLE | FREED | BUCKETS),
    "freed_uneven_at_once": ("uneven", 4, WHOLE | FREED),
    "freed_uneven_stages": ("uneven", 4, SHORT | FREED | BUCKETS),
    "freed_stages": ("wide", 4, CHUNKS | FREED),
    "freed_rounded": ("wide", 4, WHOLE | FREED | ROUNDED),
    "split_cores_again": ("long", 2, WHOLE | {"plan": {"split": 2, "replicas": 1, "recompute": "selective"}}),
    "split_blocks_again": ("long", 2, WHOLE | {"plan": {"split": 2, "replicas": 1, "recompute": "blocks"}}),
    "split_dropout_again": ("explicit", 2, WHOLE | {"plan": {"split": 2, "replicas": 1, "recompute": "selective"}}),
}
"""Kinds of the cases above together, weights that more devices gather, and replicas that are cut unlike one another."""
CASES |= further(TOGETHER.items())


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES])
def test_beside_the_estimate(name: str) -> None:
    kind, num_devices, settings = CASES[name]
    mode, config = captured(kind), Config({"planning.search": "off"} | settings)
    plan, step = plan_and_estimate(mode.graph, cluster_of(num_devices), config, rows=8)
    assert len(plan.devices) == num_devices
    for devices, peak in dry_run(plan, mode, config).peaks:
        predicted = step.of(devices[0]).peak
        assert abs(predicted.total / peak.num_bytes - 1) <= KNOWN.get(name, TOLERANCE), f"{devices[0]}: {predicted} beside {peak}"
