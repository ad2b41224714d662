"""Whether the plan that the search picks is the fastest one: every plan of a small space is run beside it, on CPU ranks.

    python examples/benchmarks/choices.py --ranks 2 --json choices.json
    python examples/benchmarks/choices.py --speeds 1.0 0.33 --only resnet
    python examples/benchmarks/choices.py --speeds 0.6 0.6 0.3 0.3 --only gpt

Three models: a GPT (every layer alike), a ResNet (early layers have much to keep, late ones many weights), an encoder with a
decoder (the encoder's output is read by every layer of the decoder). The space: one device alone, copies on all, pipelines of
either schedule with 2, 4 and 8 micro-batches, split layers, and on 4 ranks what nests. Ranks and model are measured first, as
`whale probe` and `whale profile` do; nothing tells the planner the shares of --speeds, by which four ranks fit on two cores. The
plans take turns, step by step, so that a slow moment of the machine hits all of them. Where the search picks a plan of the space,
that one's time is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whale
from whale.errors import WhaleError
from whale.ir.cluster import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, loss_fn
from measuring import measure, tell
from ranks import on_ranks, slowest, timed
from resnet import ResNet

Batch = dict[str, Tensor]
Written = dict[str, object]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
ROWS = 32
SEARCHED = "searched"


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        make: the modules.
        batch: of so many rows.
        loss: of the output.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Batch], Tensor]


class Classifier(nn.Module):
    """Images to one of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = ResNet(depth=18, width=16)
        self.head = nn.Linear(self.features.num_features, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images))
        return scores


class Translator(nn.Module):
    """An encoder over one text, and a decoder over another that reads what the encoder made."""

    def __init__(self, width: int = 192, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(256, width)
        self.both = nn.Transformer(width, 4, layers, layers, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        scores: Tensor = self.head(self.both(self.words(source), self.words(target)))
        return scores


def text(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def bytes_batch(rows: int) -> Batch:
    found = text(rows, 65, 1)
    return {"ids": found[:, :-1].contiguous(), "targets": found[:, 1:].contiguous()}


def images_batch(rows: int) -> Batch:
    drawn = torch.Generator().manual_seed(1)
    return {"images": torch.randn(rows, 3, 32, 32, generator=drawn), "labels": torch.randint(10, (rows,), generator=drawn)}


def pairs_batch(rows: int) -> Batch:
    return {"source": text(rows, 48, 1), "target": text(rows, 32, 2), "next": text(rows, 32, 3)}


MODELS = {
    "gpt": Model(lambda: GPT(4, 256, 4, 64), bytes_batch, loss_fn),
    "resnet": Model(Classifier, images_batch, lambda scores, batch: nn.functional.cross_entropy(scores, batch["labels"])),
    "translator": Model(
        Translator, pairs_batch, lambda scores, batch: nn.functional.cross_entropy(scores.flatten(0, 1), batch["next"].flatten())
    ),
}


def space(cluster: Cluster) -> Iterator[tuple[str, Written]]:
    """Plans of a small space by name, as they are written."""
    names = [device.name for device in cluster.devices]
    count = len(names)
    yield "one device", {"replicas": [{"devices": names[:1]}]}
    yield f"{count} copies", {"num_stages": 1}
    for num_stages in {2, count}:
        for micro_batches in (2, 4, 8):
            yield f"{num_stages} stages, {micro_batches} micro-batches", pipeline(num_stages, micro_batches)
        yield f"{num_stages} stages of 2 chunks, 4 micro-batches", pipeline(num_stages, 4) | {"schedule": "interleaved", "num_chunks": 2}
    if len({device.kind for device in cluster.devices}) > 1:
        turned = {"replicas": [pipeline(count, 8) | {"devices": [[name] for name in reversed(names)]}]}
        yield f"{count} stages turned round, 8 micro-batches", turned
    for width in {2, count}:
        yield f"split over {width}", {"split": width}
    if count > 2:
        yield "2 stages, split over 2, 4 micro-batches", pipeline(2, 4) | {"split": 2}


def pipeline(num_stages: int, micro_batches: int) -> Written:
    return {"num_stages": num_stages, "schedule": "1f1b", "num_micro_batch": micro_batches}


@dataclass(frozen=True)
class Result:
    """A plan by both clocks.

    Attributes:
        predicted, measured: seconds per step; the measured one a median.
        plan: its first line.
    """

    predicted: float
    measured: float
    plan: str


def run_plans(name: str, options: argparse.Namespace) -> dict[str, Result]:
    """All plans of the space of one model, and what the search picks; every rank calls it."""
    model, rounds = MODELS[name], options.rounds
    torch.manual_seed(0)
    own = measure(model.make(), model.batch(ROWS // 2), model.loss, rounds)
    own.write_profile(options.profile)
    engines = {}
    for plan, written in (*space(own.cluster), (SEARCHED, None)):
        try:
            engines[plan] = make_engine(model, own.cluster, options.profile, written)
        except WhaleError as error:  # the same on all ranks: the plan cannot be had of this model
            tell(f"nothing of {plan}: {str(error).splitlines()[0]}")
    chosen = engines.pop(SEARCHED)
    same = next((plan for plan, engine in engines.items() if str(engine.plan) == str(chosen.plan)), SEARCHED)
    engines.setdefault(same, chosen)
    seconds: dict[str, list[float]] = {plan: [] for plan in engines}
    batch = model.batch(ROWS)
    for number in range(options.warmup + options.steps):
        for plan, engine in engines.items():
            taken = slowest(timed(partial(engine.step, batch)))
            if number >= options.warmup:
                seconds[plan].append(taken)
    found = {
        plan: Result(engine.plan.step_seconds, statistics.median(seconds[plan]), str(engine.plan).partition("\n")[0])
        for plan, engine in engines.items()
    }
    for engine in dict.fromkeys((*engines.values(), chosen)):  # in one order on all ranks
        engine.close()
    return found | {SEARCHED: found[same]}


def make_engine(model: Model, cluster: Cluster, profile: Path, written: Written | None) -> whale.Engine[Any]:
    torch.manual_seed(0)
    config: dict[str, object] = {"cluster.profile": str(profile)}
    if written is not None:
        config |= {"plan": written, "planning.search": "off"}
    return whale.parallelize(model.make(), loss=model.loss, optimizer=OPTIMIZER, batch=model.batch(ROWS), config=config, cluster=cluster)


def show(name: str, results: dict[str, Result]) -> None:
    best = min(result.measured for plan, result in results.items() if plan != SEARCHED)
    print(f"{name}: the plan of the search takes {results[SEARCHED].measured / best - 1:+.1%} against the fastest of the space")
    for plan, result in sorted(results.items(), key=lambda item: item[1].measured):
        print(f"  {1e3 * result.measured:7.1f} ms, predicted {1e3 * result.predicted:7.1f} ms  {plan}")
    print(f"  searched: {results[SEARCHED].plan}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--speeds", type=float, nargs="+", metavar="SHARE", help="of a core, one per rank; default: all of it")
    for name, default in {"rounds": 5, "steps": 5, "warmup": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--only", action="append", choices=MODELS, help="one model; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    results = {}
    for name in options.only or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            options.profile = Path(directory) / "profile.json"
            shares = options.speeds or ()
            results[name] = on_ranks(len(shares) or options.ranks, run_plans, name, options, shares=shares)
        show(name, results[name])
    if options.json is not None:
        found = {name: {plan: asdict(result) for plan, result in each.items()} for name, each in results.items()}
        options.json.write_text(json.dumps(found | {"speeds": options.speeds, "load": os.getloadavg()[0]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
