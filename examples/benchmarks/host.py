"""The host's time of a step beside the plain loop's, on one rank: tiny layers, so that hardly anything is computed.

    python examples/benchmarks/host.py --json host.json
    python examples/benchmarks/host.py --only gpt2 --dtype bf16

gpt2        12 layers of width 16 (transformers), 2 rows of 16 tokens
resnet50    4 images of 8 pixels, batch normalisation, a tenth of the usual channels
lstm        2 layers of width 16, 4 rows of 12 steps; torch has no kernel for it in half precision on some CPUs

The plain loop runs under `torch.autocast` for bf16 and fp16, with a `GradScaler` for fp16. Seconds are of this process's CPU time
(`time.process_time`) over the first 200 steps, with everything that happens in them; blocks of steps of both sides alternate. Ratio = the
loop's time / Whale's; above 1, Whale takes less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ranks import Result, compared, on_ranks
from resnet import ResNet

Batch = dict[str, Tensor]
HALF = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        make: the model.
        batch: its batch; ``targets`` are for the loss.
        loss: of what the model returns.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Batch], Tensor]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 12, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))


def tokens() -> Batch:
    ids = torch.randint(64, (2, 17))
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def next_token(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())


class Images(nn.Module):
    """A ResNet with a tenth of the usual channels, and the classes."""

    def __init__(self, depth: int = 50) -> None:
        super().__init__()
        self.features = ResNet(depth, 6, norm="batch")
        self.head = nn.Linear(self.features.num_features, 10)

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.head(self.features(x))
        return classes


class Lstm(nn.Module):
    """Two layers, and the classes of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(16, 16, num_layers=2, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.head(self.layers(x)[0][:, -1])
        return classes


def classes(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["targets"])


MODELS = {
    "gpt2": Model(gpt2, tokens, next_token),
    "resnet50": Model(Images, lambda: {"x": torch.randn(4, 3, 8, 8), "targets": torch.randint(10, (4,))}, classes),
    "lstm": Model(Lstm, lambda: {"x": torch.randn(4, 12, 16), "targets": torch.randint(10, (4,))}, classes),
}


def whale_step(model: Model, dtype: str) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    module, batch, config = model.make(), model.batch(), {"precision.dtype": dtype} if dtype != "float32" else {}
    engine = whale.parallelize(module, loss=model.loss, optimizer=OPTIMIZER, batch=batch, config=config)
    return partial(engine.step, batch)


def plain_step(model: Model, dtype: str) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    module, batch = model.make(), model.batch()
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    optimizer, scaler = OPTIMIZER(module.parameters()), torch.amp.GradScaler("cpu", enabled=dtype == "fp16")

    def step() -> Tensor:
        optimizer.zero_grad()
        with nullcontext() if HALF[dtype] is None else torch.autocast("cpu", HALF[dtype]):
            loss = model.loss(module(**inputs), batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def run_case(name: str, dtype: str, options: argparse.Namespace) -> Result:
    last: dict[str, Tensor] = {}
    ours, peer = whale_step(MODELS[name], dtype), plain_step(MODELS[name], dtype)
    sides = [lambda step=step, side=side: last.update({side: step()}) for side, step in (("whale", ours), ("plain", peer))]
    result = compared(sides[0], sides[1], options.steps, options.pairs)
    if abs(float(last["whale"] - last["plain"])) > 0.05 * abs(float(last["plain"])):
        raise SystemExit(f"{name}, {dtype}: the losses differ: {float(last['whale']):.4f} and {float(last['plain']):.4f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20, help="default 20")
    parser.add_argument("--steps", type=int, default=10, help="of a block; default 10")
    parser.add_argument("--only", choices=sorted(MODELS), help="one model")
    parser.add_argument("--dtype", choices=sorted(HALF), help="one type")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    found: dict[str, Result] = {}
    for name in [options.only] if options.only else MODELS:
        for dtype in [options.dtype] if options.dtype else HALF if name != "lstm" else ["float32"]:
            found[f"{name} {dtype}"] = result = on_ranks(1, run_case, name, dtype, options)
            ours, peer = (1e3 * result[f"{side}_cpu_seconds"] for side in ("whale", "peer"))
            print(
                f"{name:10} {dtype:8} CPU ms of a step, plain {peer:.2f}, Whale {ours:.2f}: ratio {result['cpu_ratio']:.3f}; "
                f"first {result['num_steps']:.0f} steps {result['all_cpu_ratio']:.3f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
