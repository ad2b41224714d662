"""What a split costs beside torch's own tensor parallelism: the same model, weights, batch, threads and optimizer, in one run.

    python examples/benchmarks/split.py --json split.json

block        a GPT block: its heads and its feed-forward features are cut
sequence     the block with long sequences: Whale cuts the tokens, the peer, as there is no other way on CPU ranks, the heads
classifier   a wide last layer, its classes cut, behind a small backbone that runs whole on either rank
colocated    the same with each rank's own rows in the backbone, which is data parallel

The peer is `torch.distributed.tensor.parallel.parallelize_module`, in the plan that a user who knows it well would write:
column- then row-wise layers in the block, local tensors between them; in the classifiers a column-wise layer and
`loss_parallel`; where the backbone is data parallel, DistributedDataParallel around it, and the layer gathers the features
itself. All step AdamW in its fused form.

Each is measured on small shapes, where what surrounds the arithmetic is the cost, and on large ones. Both sides must first have
trained alike: the same losses, the same weights. Each pair times one block of steps of either side, in alternating order, so
that a slow moment of the machine hits both. Ratio = the peer's time / Whale's of a training step (forward, backward,
optimizer), the median over the pairs; above 1, Whale is the faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Pair, compared, line, on_ranks, pair_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import whale

Batch = dict[str, Tensor]
Step = Callable[[], Tensor]
Scope = AbstractContextManager[object]
Tensors = Callable[[], dict[str, Tensor]]
NUM_RANKS = 2
NO_SCOPE: Scope = nullcontext()
FEATURES = 32


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison.

    Attributes:
        rows: of the global batch.
        width: features.
        context: positions of a row; of the block.
        heads: of the block.
        classes: of the classifier.
        steps: per block that is timed.
    """

    rows: int
    width: int
    context: int = 0
    heads: int = 0
    classes: int = 0
    steps: int = 1


SHAPES = {
    "block": {"small": Shape(4, 128, context=32, heads=4, steps=20), "large": Shape(16, 512, context=128, heads=8)},
    "sequence": {"small": Shape(2, 64, context=512, heads=4, steps=10), "large": Shape(2, 256, context=2048, heads=8)},
    "classifier": {"small": Shape(16, 64, classes=2048, steps=20), "large": Shape(64, 256, classes=100_000)},
    "colocated": {"small": Shape(16, 64, classes=2048, steps=20), "large": Shape(64, 256, classes=100_000)},
}


@dataclass(frozen=True)
class Side:
    """One of the two, ready to train.

    Attributes:
        step: one training step; gives the loss.
        gradients: this rank's, or its parts, after a step.
        weights: the whole parameters.
        shards: what is cut, in words.
        close: ends it.
    """

    step: Step
    gradients: Tensors
    weights: Tensors
    shards: str
    close: Callable[[], None] = lambda: None


class Attention(nn.Module):
    """Causal self-attention; the projection's columns lie head by head, so that a part of them is a part of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, -1))
        return result


class Block(nn.Module):
    """A GPT block.

    Args:
        shape: its sizes.
        scope: under which its layers are made.
    """

    def __init__(self, shape: Shape, scope: Scope = NO_SCOPE) -> None:
        super().__init__()
        with scope:
            self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
            self.attention = Attention(shape.width, shape.heads)
            self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Classifier(nn.Module):
    """A backbone and a layer with one output for each class.

    Args:
        shape: its sizes.
        all, backbone, head: scopes of its layers.
    """

    def __init__(self, shape: Shape, all: Scope = NO_SCOPE, backbone: Scope = NO_SCOPE, head: Scope = NO_SCOPE) -> None:
        super().__init__()
        width = shape.width
        with all:
            with backbone:
                self.backbone = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            with head:
                self.head = nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


def block_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["y"])


def classifier_loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


def block(shape: Shape, mesh: DeviceMesh, axis: str | None = None) -> tuple[Side, Side]:
    draw = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(shape.rows, shape.context, shape.width, generator=draw) for name in ("x", "y")}
    ours = whale_side(seeded(partial(Block, shape, whale.split(NUM_RANKS, axis=axis))), batch, block_loss)
    model = seeded(partial(Block, shape))
    layers = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, layers)
    return ours, torch_side(model, lambda: block_loss(model(batch["x"]), batch), nullcontext, "heads, features of the feed-forward")


def classifier(shape: Shape, mesh: DeviceMesh) -> tuple[Side, Side]:
    batch = samples(shape)
    ours = whale_side(seeded(partial(Classifier, shape, all=split_classes())), batch, classifier_loss)
    model = seeded(partial(Classifier, shape))
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    return ours, torch_side(model, lambda: classifier_loss(model(batch["x"]), batch), loss_parallel, "classes")


def colocated(shape: Shape, mesh: DeviceMesh) -> tuple[Side, Side]:
    batch = samples(shape)
    ours = whale_side(seeded(partial(Classifier, shape, backbone=whale.replicate(NUM_RANKS), head=split_classes())), batch, classifier_loss)
    model = seeded(partial(Classifier, shape))
    parallelize_module(model.head, mesh, ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False))
    backbone = nn.parallel.DistributedDataParallel(model.backbone)
    own = batch["x"].chunk(NUM_RANKS)[dist.get_rank()]

    def loss() -> Tensor:
        return classifier_loss(model.head(summed(backbone(own))), batch)

    return ours, torch_side(model, loss, loss_parallel, "classes")


def split_classes() -> Scope:
    return whale.split(NUM_RANKS, axis="classes")


def samples(shape: Shape) -> Batch:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(shape.classes, (shape.rows,), generator=draw)
    return {"x": torch.randn(shape.rows, FEATURES, generator=draw), "label": labels}


def summed(features: Tensor) -> Tensor:
    """DistributedDataParallel takes the mean over the ranks of gradients that are here parts of one sum."""
    features.register_hook(lambda gradient: gradient * NUM_RANKS)
    return features


CASES: dict[str, Callable[[Shape, DeviceMesh], tuple[Side, Side]]] = {
    "block": block,
    "sequence": partial(block, axis="sequence"),
    "classifier": classifier,
    "colocated": colocated,
}


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def whale_side(model: nn.Module, batch: Batch, loss: Callable[[Tensor, Batch], Tensor]) -> Side:
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine = whale.parallelize(model, loss=loss, optimizer=optimizer, batch=batch, config={"planning.search": "off"})
    stages = engine.plan.replicas[0].stages
    shards = ", ".join(f"{shard.axis} {':'.join(map(str, shard.sizes))}" for stage in stages for shard in stage.shards)
    return Side(partial(engine.step, batch), engine.gradients, lambda: engine.state_dict() or {}, shards, engine.close)


def torch_side(model: nn.Module, loss: Callable[[], Tensor], around: Callable[[], Scope], shards: str) -> Side:
    """The plain training step; cut and whole parameters in groups of their own, as the fused optimizer wants them."""
    parameters = dict(model.named_parameters())
    groups = [[p for p in parameters.values() if isinstance(p, DTensor) == is_sharded] for is_sharded in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-3, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        with around():
            value = loss()
            value.backward()
        optimizer.step()
        return value.detach()

    def gradients() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return {name: g.to_local() if isinstance(g, DTensor) else g for name, g in found.items()}

    return Side(step, gradients, lambda: {name: whole(p.detach()) for name, p in parameters.items()}, shards)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_equal(ours: Side, peer: Side, num_steps: int) -> list[Pair]:
    """Both sides train alike: a comparison of different work would say nothing. Returns what each step took."""
    first, last = [], dict[str, Tensor]()
    for number in range(num_steps):
        first.append(pair_of(lambda: last.update(ours=ours.step()), lambda: last.update(peer=peer.step()), 1, number))
        compare(f"loss of step {number}", last["ours"], whole(last["peer"]))
        if number == 0:  # AdamW would hide a factor
            check_alike("gradient", mean_squares(ours.gradients()), mean_squares(peer.gradients()))
    check_alike("parameter", ours.weights(), peer.weights(), 1e-2)  # AdamW makes rounding of the smallest gradients larger
    return first


def mean_squares(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per tensor, over all ranks: the same whether they hold parts of it or copies."""
    names = sorted(parts)
    sums = torch.tensor([[float(parts[name].double().square().sum()), parts[name].numel()] for name in names], dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(names, sums[:, 0] / sums[:, 1], strict=True))


def check_alike(what: str, ours: dict[str, Tensor], peer: dict[str, Tensor], most: float = 1e-3) -> None:
    if ours.keys() != peer.keys():
        raise SystemExit(f"the {what}s are not the same: {sorted(ours.keys() ^ peer.keys())} on one side only")
    for name, own in ours.items():
        compare(f"{what} {name}", own, peer[name], most)


def compare(what: str, own: Tensor, theirs: Tensor, most: float = 1e-3) -> None:
    apart = float((own - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    if not apart < most:
        raise SystemExit(f"{what} differs between the two sides by {apart:.2g} of its largest element")


def run_case(case: str, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one comparison; every rank calls it."""
    ours, peer = CASES[case](shape, init_device_mesh("cpu", (NUM_RANKS,)))
    first = check_equal(ours, peer, options.warmup)
    result = compared(ours.step, peer.step, shape.steps, options.pairs, first)
    ours.close()
    sizes = {name: value for name, value in asdict(shape).items() if value}
    return {**result, "shape": sizes, "whale_cuts": ours.shards, "peer_cuts": peer.shards}


def run_cases(shapes: list[tuple[str, str, Shape]], options: argparse.Namespace) -> list[dict[str, Any]]:
    return [run_case(case, shape, options) for case, _, shape in shapes]


def tiny(shape: Shape) -> Shape:
    """Sizes for a trial that is over at once; the times mean nothing."""
    return replace(shape, rows=4, width=32, context=min(shape.context, 8), heads=min(shape.heads, 4), classes=min(shape.classes, 64))


def main() -> None:
    options = parse_options()
    chosen = [
        (case, size, replace(tiny(shape) if options.tiny else shape, steps=options.steps or shape.steps))
        for case in ([options.only] if options.only else CASES)
        for size, shape in SHAPES[case].items()
        if options.size in (size, None)
    ]
    found: dict[str, dict[str, Any]] = {}
    for (case, size, _), result in zip(chosen, on_ranks(NUM_RANKS, run_cases, chosen, options), strict=True):
        found.setdefault(case, {}).update(result if size == "small" else {size: result})
        print(f"{case:10} {size:5} {line(result)}  [{result['whale_cuts']}]")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=11, help="default 11")
    parser.add_argument("--warmup", type=int, default=4, help="steps of both sides that are compared before; default 4")
    parser.add_argument("--steps", type=int, help="per block that is timed, in place of each shape's own number")
    parser.add_argument("--only", choices=sorted(CASES), help="one comparison")
    parser.add_argument("--size", choices=("small", "large"), help="one size")
    parser.add_argument("--tiny", action="store_true", help="sizes for a trial of the script; its times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
